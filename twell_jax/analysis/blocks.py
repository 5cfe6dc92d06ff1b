"""Times a feed-forward block on this device, dense and by each algorithm that can serve it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kernels import Kernels
from pallas_kernels.weights import Weights
from twell_jax.analysis import patterns, timing
from twell_jax.analysis.programs import Program, compiled
from twell_jax.ffn import dispatch, mosaic, sparse_ffn, xla
from twell_jax.ffn.activations import rectifier
from twell_jax.ffn.algorithms import ALGORITHMS, Case
from twell_jax.ffn.dispatch import CannotServe
from twell_jax.ffn.measured import Block

TOKENS = (1, 64, 256, 1024, 16384)  # Python lowers each for some seconds
BACKWARD = (16384,)  # of which gradients are timed, too
SHARE = 0.005  # of the neurons that are active for a token
# Sets of weights take turns, so that they come from memory, as in a model: so many bytes, at most
# so many sets.
COLD, LAYERS = 128 * 2**20, 4
_CANDIDATES = {
    "dense": (1, 2**30),
    "few_tokens": (1, 64),
    "dense_block": (65, 4096),
    "unions": (512, 2**30),
}


@dataclass(frozen=True)
class Times:
    """What one number of tokens takes.

    Attributes:
      tokens: in a call.
      forward: milliseconds of the block, for each algorithm.
      both: milliseconds of forward and backward, with "dense" and with "sparse" gradients; empty if
        they were not measured.
    """

    tokens: int
    forward: dict[str, float]
    both: dict[str, float]

    @property
    def fastest(self) -> str:
        """The fastest algorithm forward."""
        return min(self.forward, key=self.forward.__getitem__)

    @property
    def gain(self) -> float:
        """How many times as fast it is as dense XLA."""
        return self.forward["dense"] / self.forward[self.fastest]


def measure(block: Block, tokens: Sequence[int] = TOKENS) -> list[Times]:
    """Times the block with random weights, of whose neurons `SHARE` are active for a token.

    Some neurons are often active and many never, as in trained models (`patterns.independent`).

    Raises:
      CannotServe: no kernels can serve the block on this device.
    """
    like = jax.ShapeDtypeStruct((block.neurons, block.width), block.dtype)
    kernels, why = dispatch.back_end(like)
    if kernels is None:
        raise CannotServe.because("twell_jax.measure", str(why))
    arguments = draw.lower(block, max(tokens), _sets(block))
    with ThreadPoolExecutor(1) as thread:  # as XLA compiles it for seconds
        drawing = thread.submit(lambda: arguments.compile()())
        programs = _programs(kernels, block, tokens, *arguments.out_info)
        made = compiled(programs)
        x, layers = drawing.result()
    found: dict[tuple[int, str], dict[str, float]] = {}
    for (count, passes, name), program in programs.items():
        these = layers[:1] if passes == "both" else layers
        run = replace(program, args=(x[:count], these)).caller(made[count, passes, name])
        ms = timing.milliseconds(run, calls=program.calls, repeats=5)
        found.setdefault((count, passes), {})[name] = ms / len(these)
    return [Times(n, found[n, "forward"], found.get((n, "both"), {})) for n in tokens]


def _programs(
    kernels: Kernels, block: Block, tokens: Sequence[int], x: Any, layers: Any
) -> dict[tuple[int, str, str], Program]:
    """By tokens, passes and algorithm; `x` and `layers` are the shapes of what `draw` makes."""

    def part(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)

    # One layer's activations fill the cache, and more would take long to compile.
    return {
        (count, "both", kind): Program(
            _gradients, (kind,), (part(count), layers[:1]), kind == "dense", _calls(count)
        )
        for count in BACKWARD
        for kind in _GRADIENTS
    } | {
        (count, "forward", name): Program(
            _stack, (kernels, name), (part(count), layers), name == "dense", _calls(count)
        )
        for count in sorted(tokens, reverse=True)  # few tokens compile quickly
        for name in _CANDIDATES
        if _can(name, block, count, kernels)
    }


def _sets(block: Block) -> int:
    """How many sets of weights take turns."""
    matrix = block.neurons * block.width * jnp.dtype(block.dtype).itemsize
    return min(LAYERS, -(-COLD // ((3 if block.gated else 2) * matrix)))


@partial(jax.jit, static_argnums=(0, 1, 2))  # one program; each operation alone would be compiled
def draw(block: Block, tokens: int, sets: int) -> tuple[jax.Array, list[Weights]]:
    """x, and the weights of so many layers."""
    d, h, dtype = block.width, block.neurons, jnp.dtype(block.dtype)
    key = jax.random.key(0)
    x, gate = patterns.independent(key, "skewed", tokens, d, h, SHARE * h, dtype)
    layers = []
    for layer in range(sets):
        up, down = jax.random.split(jax.random.fold_in(key, layer))
        w_gate = gate[np.random.default_rng(layer).permutation(h)]  # compiles at once
        w_up, w_down = (
            (jax.random.normal(k, (h, d)) / n**0.5).astype(dtype) for k, n in ((up, d), (down, h))
        )
        layers.append(
            Weights(w_gate, w_up, w_down) if block.gated else Weights(None, w_gate, w_down)
        )
    return x, layers


def _calls(tokens: int) -> int:
    return max(2, min(50, 2**17 // tokens))


def _can(name: str, block: Block, tokens: int, kernels: Kernels) -> bool:
    """Whether an algorithm can serve so many tokens, and is worth a try."""
    least, most = _CANDIDATES[name]
    case = Case(tokens, block.width, block.neurons, block.gated, back_end=kernels.name)
    return least <= tokens <= most and ALGORITHMS[name].unsupported(case, False) is None


@partial(jax.jit, static_argnums=(0, 1))
def _stack(kernels: Kernels, name: str, x: jax.Array, layers: list[Weights]) -> list[jax.Array]:
    """y of each layer, all of the same x."""
    if name == "dense":
        return [xla.ffn(x, weights, activation="relu")[0] for weights in layers]
    act = rectifier("relu")
    assert act is not None
    by_kernels = mosaic.dense_gradients(kernels, act, name, None)
    return [by_kernels(x, weights, None)[0] for weights in layers]


_GRADIENTS = {"dense": {"implementation": "xla"}, "sparse": {"gradients": "sparse"}}


@partial(jax.jit, static_argnums=0)
def _gradients(kind: str, x: jax.Array, layers: list[Weights]) -> list:
    """y and the gradients of its sum for each layer, all of the same x."""

    def ffn(x, weights):
        return sparse_ffn(x, weights.gate, weights.up, weights.down, **_GRADIENTS[kind])[0]

    results = []
    for weights in layers:
        y, vjp = jax.vjp(ffn, x, weights)
        results.append((y, vjp(x)))  # XLA would skip a matmul without y
    return results
