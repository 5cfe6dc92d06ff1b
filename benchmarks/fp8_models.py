"""Whole models with 8-bit weights, keys and values; and a dense one with all products in FP8."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from benchmarks.xla_fp8 import CALL
from twell_jax.config import ModelConfig
from twell_jax.ffn import FFNStats, SparseMLP, xla
from twell_jax.ffn.stats import no_stats
from twell_jax.models import Transformer, graphdef
from twell_jax.models.quantised import (
    ATTENTION,
    COVERED,
    QuantisedLinear,
    project,
    transposed,
)


class DenseBlock(nnx.Module):
    """relu(x gate^T) * (x up^T) down^T by XLA, all in FP8 with fast accumulation, no statistics.

    Args:
      mlp: a ReLU block with a gate and without biases, whose weights it takes.
    """

    def __init__(self, mlp: SparseMLP):
        self.d_ff = mlp.w_up.shape[-2]
        self.gate, self.up = QuantisedLinear(mlp.w_gate), QuantisedLinear(mlp.w_up)
        self.down = QuantisedLinear(transposed(mlp.w_down))

    def __call__(
        self, x: jax.Array, *, residual: jax.Array | None = None, **_: Any
    ) -> tuple[jax.Array, FFNStats]:
        """As `SparseMLP` with `return_stats`; statistics are zeros."""
        gate, up = project(x, self.gate, self.up)
        return xla.add(residual, self.down(jax.nn.relu(gate) * up)), no_stats(self.d_ff)


def _dense(model: Transformer) -> None:
    model.quantise((*ATTENTION, "head"))
    model.blocks.mlp = DenseBlock(model.blocks.mlp)


# What gives a model 8-bit weights, by the name of its row; the block's implementation is the first
# word of it.
VARIANTS: dict[str, Callable[[Transformer], None]] = {
    "xla, relu, fp8 all": _dense,
    "mosaic, relu, fp8 gate and up": lambda model: model.quantise(COVERED["fp8"]),
    "mosaic, relu, fp8 all but down": lambda model: model.quantise(COVERED["fp8-all-but-down"]),
}

SPARSE = tuple(name for name in VARIANTS if name.startswith("mosaic"))
# With keys and values in 8 bits, too.
CACHED: dict[str, Callable[[Transformer], None]] = {
    "mosaic, relu, fp8 cache": lambda model: None,
    "mosaic, relu, fp8 all but down, and cache": VARIANTS["mosaic, relu, fp8 all but down"],
}


def quantised(
    name: str, config: ModelConfig, params: nnx.State, implementation: str | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model of VARIANTS or CACHED with this name, made of a model's parameters.

    `implementation` replaces the one of the name, for the block.
    """
    named, activation, *_ = name.split(", ")
    changes = {"activation": activation, "ffn_implementation": implementation or named}
    changes |= {"kv_cache_dtype": "float8" if name in CACHED else None}
    model = nnx.merge(graphdef(config.model_copy(update=changes)), params)
    (VARIANTS | CACHED)[name](model)
    return nnx.split(model)


def details(
    graph: nnx.GraphDef, params: nnx.State, compiled: jax.stages.Compiled
) -> dict[str, int]:
    """Entries of a row: "fp8_matmuls" is how many matmuls XLA left to cuBLASLt's FP8.

    Those in a loop over layers count once. Without linear layers in 8 bits there is no entry.

    Raises:
      NotImplementedError: there is none, though the model has such layers.
    """
    modules = (module for _, module in nnx.iter_modules(nnx.merge(graph, params)))
    if not any(isinstance(module, QuantisedLinear) for module in modules):
        return {}
    count = compiled.as_text().count(f'custom_call_target="{CALL}"')
    if not count:
        raise NotImplementedError(f"XLA's compiled text has no {CALL}")
    return {"fp8_matmuls": count}
