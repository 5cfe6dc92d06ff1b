"""Times a whole model on this device, with dense blocks and with those that serve by default."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from twell_jax import models
from twell_jax.analysis import timing
from twell_jax.config import ModelConfig
from twell_jax.ffn.algorithms import LayerGradients
from twell_jax.models import DECODE_OPTIONS, PREFILL_OPTIONS, KVCache, Transformer, graphdef

PROMPT = 512  # the most tokens of a prompt
DECODED = (1, 8, 32)  # sequences that get one more token each
DENSE = {"ffn_implementation": "xla"}
DEFAULT = {"ffn_implementation": None}


@dataclass(frozen=True)
class Work:
    """What a model does, and how long it takes.

    Attributes:
      name: in words.
      dense_ms, ours_ms: milliseconds with dense blocks and with those that serve by default.
    """

    name: str
    dense_ms: float
    ours_ms: float

    @property
    def gain(self) -> float:
        """How many times as fast the default is."""
        return self.dense_ms / self.ours_ms


def in_bfloat16(model: Transformer) -> Transformer:
    """The model that computes in bfloat16, and keeps its parameters in it."""
    changes = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    config = model.config.model_copy(update=changes)
    params = jax.tree.map(
        lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, nnx.state(model)
    )
    return nnx.merge(graphdef(config, model.quantised()), params)


def needs(model: Transformer, tokens: np.ndarray) -> tuple[list[float], list[float]]:
    """For each layer the share of its neurons that 256 tokens use, and that of its lists.

    Args:
      model: the language model.
      tokens: int `[B, T + 1]`.
    """
    graph, params = _parts(model, DENSE)
    stats = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens)[1])(
        params, tokens[:, :-1]
    )
    return np.asarray(stats.union).tolist(), np.asarray(stats.listed).tolist()


def works(
    model: Transformer, tokens: np.ndarray, ffn_gradients: tuple[LayerGradients, ...]
) -> dict[str, Callable[[], Work]]:
    """What times each work, by its name; those that say most come first.

    Args:
      model: in bfloat16.
      tokens: int32 `[B, T + 1]`.
      ffn_gradients: those of each layer, beside dense ones.
    """
    batch, context = tokens.shape[0], tokens.shape[1] - 1
    prompts = tokens[: min(8, batch), : min(PROMPT, context)]
    length = prompts.shape[1]
    capacity = -(-length // 8) * 8 + 8
    score = f"score {batch} x {context}", partial(_scorer, tokens)
    read = f"read {len(prompts)} x {length}", partial(_reader, prompts, capacity)
    one, *more = (
        (
            f"one more token of {count}",
            partial(_decoder, model.config, np.resize(tokens[:, 0], (count, 1)), length, capacity),
        )
        for count in DECODED
    )
    step = f"forward and backward of {batch} x {context}", partial(_stepper, tokens, ffn_gradients)
    in_order: tuple[tuple[str, Callable], ...] = (score, one, step, read, *more)
    return {name: partial(_compared, name, model, make) for name, make in in_order}


def _compared(name: str, model: Transformer, make: Callable[..., Callable]) -> Work:
    times = (_milliseconds(make(*_parts(model, changes))) for changes in (DENSE, DEFAULT))
    return Work(name, *times)


def _parts(model: Transformer, changes: dict[str, Any]) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of the model with other settings, and its parameters."""
    config = model.config.model_copy(update=changes)
    return graphdef(config, model.quantised()), nnx.state(model)


def _milliseconds(run: Callable[[], Any]) -> float:
    return timing.milliseconds(run, calls=4, repeats=5)


def _scorer(tokens: np.ndarray, *of: Any) -> Callable[[], jax.Array]:
    return partial(_score, *of, tokens)


def _reader(
    prompts: np.ndarray, capacity: int, graph: nnx.GraphDef, params: nnx.State
) -> Callable[[], jax.Array]:
    return partial(_read, graph, capacity, params, prompts)


def _stepper(
    tokens: np.ndarray, ffn_gradients: tuple[LayerGradients, ...], *of: Any
) -> Callable[[], nnx.State]:
    return partial(_gradients, *of, tokens, ffn_gradients)


@partial(jax.jit, static_argnums=0)
def _score(graph: nnx.GraphDef, params: nnx.State, tokens: jax.Array) -> jax.Array:
    logits, _ = nnx.merge(graph, params)(tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


@partial(jax.jit, static_argnums=(0, 1), compiler_options=PREFILL_OPTIONS)
def _read(graph: nnx.GraphDef, capacity: int, params: nnx.State, tokens: jax.Array) -> jax.Array:
    # Without the cache, as the caches of all queued calls would not fit into memory.
    return nnx.merge(graph, params).prefill(tokens, capacity)[0]


def _decoder(
    config: ModelConfig,
    token: np.ndarray,
    length: int,
    capacity: int,
    graph: nnx.GraphDef,
    params: nnx.State,
) -> Callable[[], jax.Array]:
    """What extends sequences by a token, always in the same slot of a cache."""
    cache = jax.tree.map(jnp.zeros_like, KVCache.empty(config, len(token), capacity))
    cache = replace(cache, length=jnp.int32(length))

    def run() -> jax.Array:
        nonlocal cache
        logits, cache = _extend(graph, params, token, cache)
        return logits

    return run


@partial(jax.jit, static_argnums=0, donate_argnums=3, compiler_options=DECODE_OPTIONS)
def _extend(
    graph: nnx.GraphDef, params: nnx.State, token: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    logits, longer = models.decode(nnx.merge(graph, params), token, cache)
    return logits, replace(longer, length=cache.length)


@partial(jax.jit, static_argnums=(0, 3))
def _gradients(
    graph: nnx.GraphDef,
    params: nnx.State,
    tokens: jax.Array,
    ffn_gradients: tuple[LayerGradients, ...],
) -> nnx.State:
    def loss(params):
        model = nnx.merge(graph, params)
        dense = model.config.ffn_implementation == DENSE["ffn_implementation"]
        logits, stats = model(tokens[:, :-1], ffn_gradients=None if dense else ffn_gradients)
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(ce) + 1e-4 * jnp.mean(stats.l1)

    return jax.grad(loss, allow_int=True)(params)
