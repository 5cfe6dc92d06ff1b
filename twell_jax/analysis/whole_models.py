"""Times a whole model on this device, with dense blocks and with those that serve by default."""

from collections.abc import Mapping
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
from twell_jax.analysis.programs import Program, compiled
from twell_jax.config import ModelConfig
from twell_jax.ffn.algorithms import LayerGradients
from twell_jax.models import DECODE_OPTIONS, PREFILL_OPTIONS, KVCache, Transformer, graphdef

PROMPT = 512  # the most tokens of a prompt
CALLS = 4  # that are timed together
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
) -> dict[str, tuple[Program, Program]]:
    """What runs each work, by its name: with dense blocks, and by default.

    Args:
      model: in bfloat16.
      tokens: int32 `[B, T + 1]`.
      ffn_gradients: those of each layer, beside dense ones.
    """
    _, capacity = _of_cache(tokens)
    decoders = {count: models.laid_out(model, count, capacity) for count in DECODED}
    dense = _programs(model, decoders, tokens, None)
    default = _programs(model, decoders, tokens, ffn_gradients)
    return {name: (dense[name], default[name]) for name in dense}


def measure(works: Mapping[str, tuple[Program, Program]]) -> tuple[list[Work], list[str]]:
    """Compiles and times works; the second result names those for which memory did not suffice."""
    made = compiled({(name, p.dense): p for name, pair in works.items() for p in pair})
    found, too_large = [], []
    for name, pair in works.items():
        try:
            ms = (
                timing.milliseconds(p.caller(made.pop((name, p.dense))), calls=p.calls, repeats=5)
                for p in pair
            )
            found.append(Work(name, *ms))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            too_large.append(name)
    return found, too_large


def _parts(model: Transformer, changes: dict[str, Any]) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of the model with other settings, and its parameters."""
    config = model.config.model_copy(update=changes)
    return graphdef(config, model.quantised()), nnx.state(model)


def _of_cache(tokens: np.ndarray) -> tuple[int, int]:
    """Tokens of a prompt, and those that a cache has room for."""
    length = min(PROMPT, tokens.shape[1] - 1)
    return length, -(-length // 8) * 8 + 8


def _programs(
    model: Transformer,
    decoders: Mapping[int, Transformer],
    tokens: np.ndarray,
    ffn_gradients: tuple[LayerGradients, ...] | None,
) -> dict[str, Program]:
    """What runs each work, those first that say most; blocks are dense without `ffn_gradients`.

    `decoders` are the model as it lies in memory to decode so many sequences.
    """
    dense = ffn_gradients is None
    changes = DENSE if dense else DEFAULT
    graph, params = _parts(model, changes)
    batch, context = tokens.shape[0], tokens.shape[1] - 1
    length, capacity = _of_cache(tokens)
    prompts = tokens[:8, :length]
    found = {
        f"forward and backward of {batch} x {context}": Program(
            # The gradients of all calls that are timed together are in memory at once.
            _gradients,
            (graph, ffn_gradients),
            (params, tokens),
            dense,
            calls=2,
        ),
        f"score {batch} x {context}": Program(_score, (graph,), (params, tokens), dense, CALLS),
    }
    for count, decoder in decoders.items():
        token = np.resize(tokens[:, 0], (count, 1))
        cache = partial(_stored, model.config, count, length, capacity)
        of_step, laid_out = _parts(decoder, changes)
        found[f"one more token of {count}"] = Program(
            _extend, (of_step,), (laid_out, token), dense, CALLS, cache
        )
    found[f"read {len(prompts)} x {length}"] = Program(
        _read, (graph, capacity), (params, prompts), dense, CALLS
    )
    return found


def _stored(config: ModelConfig, count: int, length: int, capacity: int) -> KVCache:
    """A cache in which each sequence has `length` tokens."""
    cache = jax.tree.map(jnp.zeros_like, KVCache.empty(config, count, capacity))
    return replace(cache, lengths=jnp.full(count, length, jnp.int32))


@partial(jax.jit, static_argnums=0)
def _score(graph: nnx.GraphDef, params: nnx.State, tokens: jax.Array) -> jax.Array:
    logits, _ = nnx.merge(graph, params)(tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


@partial(jax.jit, static_argnums=(0, 1), compiler_options=PREFILL_OPTIONS)
def _read(graph: nnx.GraphDef, capacity: int, params: nnx.State, tokens: jax.Array) -> jax.Array:
    # Without the cache, as the caches of all queued calls would not fit into memory.
    return nnx.merge(graph, params).prefill(tokens, capacity)[0]


@partial(jax.jit, static_argnums=0, donate_argnums=3, compiler_options=DECODE_OPTIONS)
def _extend(
    graph: nnx.GraphDef, params: nnx.State, token: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    logits, longer = models.decode(nnx.merge(graph, params), token, cache)
    return logits, replace(longer, lengths=cache.lengths)


@partial(jax.jit, static_argnums=(0, 1))
def _gradients(
    graph: nnx.GraphDef,
    ffn_gradients: tuple[LayerGradients, ...] | None,
    params: nnx.State,
    tokens: jax.Array,
) -> nnx.State:
    def loss(params):
        logits, stats = nnx.merge(graph, params)(tokens[:, :-1], ffn_gradients=ffn_gradients)
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(ce) + 1e-4 * jnp.mean(stats.l1)

    return jax.grad(loss, allow_int=True)(params)
