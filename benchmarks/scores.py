"""How whole models score sequences, and how exactly: against float32, and against XLA's twin."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import fp8_models
from benchmarks.record import relative_error
from twell_jax.config import ModelConfig
from twell_jax.models import QUANTISED_OPTIONS, graphdef


def compiled(
    graph: nnx.GraphDef, params: nnx.State, tokens: jax.Array, options: Mapping | None = None
) -> jax.stages.Compiled:
    """Compiles `score` for a model, with these parameters and tokens as its arguments."""
    return jax.jit(partial(score, graph)).lower(params, tokens).compile(options)


def score(graph: nnx.GraphDef, params: nnx.State, tokens: jax.Array) -> dict[str, jax.Array]:
    """What is compared, by the name of its error.

    Args:
      graph: a `Transformer`.
      params: its parameters.
      tokens: int32 `[B, T + 1]`.

    Returns:
      "error": cross-entropies, float32 `[B, T]`; "logits_error": the last logits, `[B, vocab]`.
    """
    logits, _ = nnx.merge(graph, params)(tokens[:, :-1])
    ce = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return {"error": ce, "logits_error": logits[:, -1]}


def references(
    config: ModelConfig, params: nnx.State, tokens: jax.Array
) -> Callable[[str, dict[str, np.ndarray]], dict[str, float]]:
    """Scores sequences in float32; returns what gives a variant's errors against this.

    It maps the variant's name and its scores, of these sequences and any after them, to errors by
    "float32_" and the name of `score`. A sparse one of `fp8_models` is also compared with its twin,
    the same model with blocks by XLA: "twin_" and the name.
    """

    def in_float32(activation: str) -> dict[str, np.ndarray]:
        exact = {"dtype": "float32", "param_dtype": "float32", "ffn_implementation": "xla"}
        graph = graphdef(config.model_copy(update=exact | {"activation": activation}))
        weights = jax.tree.map(lambda a: a.astype(jnp.float32), params)
        with jax.default_matmul_precision("float32"):
            return scores(graph, weights)

    def twin(name: str) -> dict[str, np.ndarray]:
        return scores(*fp8_models.quantised(name, config, params, "xla"), QUANTISED_OPTIONS)

    def scores(graph: nnx.GraphDef, params: nnx.State, *options: Any) -> dict[str, np.ndarray]:
        return jax.tree.map(np.asarray, compiled(graph, params, tokens, *options)(params, tokens))

    exact = {activation: in_float32(activation) for activation in ("silu", "relu")}

    def errors(name: str, out: dict[str, np.ndarray]) -> dict[str, float]:
        compared = {"float32": exact[name.split(", ")[1]]}
        if name in fp8_models.SPARSE:
            compared["twin"] = twin(name)
        return {
            f"{kind}_{key}": relative_error(out[key][: len(tokens)], reference)
            for kind, by_name in compared.items()
            for key, reference in by_name.items()
        }

    return errors
