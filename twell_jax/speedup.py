"""How the kernels do on each layer of a trained model: its own weights, on inputs that it sees."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from twell_jax import timing
from twell_jax.ffn import sparse_ffn
from twell_jax.model import Transformer, graphdef

TOKENS = 16384  # of a call; enough to fill a GPU


@dataclass(frozen=True)
class Speedup:
    """Times of the feed-forward blocks of a model, one layer at a time.

    Attributes:
      device: what they were measured on.
      tokens: of a call.
      nnz: float64 [layers], mean number of neurons that fire for one of these tokens.
      xla_ms, mosaic_ms: float64 [layers], the device's time for a call, by implementation.
    """

    device: str
    tokens: int
    nnz: np.ndarray
    xla_ms: np.ndarray
    mosaic_ms: np.ndarray

    @property
    def factor(self) -> np.ndarray:
        """float64 [layers], the time of XLA over that of the kernels."""
        return self.xla_ms / self.mosaic_ms

    def summarise(self) -> dict[str, Any]:
        """For analysis.json."""
        arrays = {"nnz": self.nnz, "xla_ms": self.xla_ms, "mosaic_ms": self.mosaic_ms}
        rest = {"device": self.device, "tokens": self.tokens, "factor": self.factor.tolist()}
        return rest | {name: array.tolist() for name, array in arrays.items()}


def measure_speedup(
    model: Transformer, sequences: np.ndarray, *, document_end: int | None = None
) -> Speedup:
    """Times the forward pass of each layer's block through XLA and through the kernels.

    Args:
      model: the language model.
      sequences: int [n, T + 1]; of these, as many as hold `TOKENS` tokens.
      document_end: see `Transformer`.

    Raises:
      CannotServe: the kernels cannot serve this model here.
    """
    config, mlp = model.config, model.blocks.mlp

    def weights(layer):
        stacked = (mlp.w_gate, mlp.w_up, mlp.w_down)
        return [None if w is None else w[layer].astype(config.dtype) for w in stacked]

    def block(x, *weights, implementation):
        return sparse_ffn(x, *weights, activation=config.activation, implementation=implementation)

    tokens = sequences[: max(1, TOKENS // config.context), :-1]
    x = jax.ShapeDtypeStruct((tokens.size, config.d_model), config.dtype)
    jax.eval_shape(partial(block, implementation="mosaic"), x, *weights(0))  # or it cannot serve
    inputs = ffn_inputs(model, tokens, document_end=document_end)
    layers = list(enumerate(inputs.reshape(config.layers, *x.shape)))
    statistics = jax.jit(lambda *operands: block(*operands, implementation="xla")[1])

    def measure(implementation):
        output = jax.jit(lambda *operands: block(*operands, implementation=implementation)[0])
        return np.array([timing.milliseconds(output, x, *weights(i), calls=20) for i, x in layers])

    return Speedup(
        device=jax.devices()[0].device_kind,
        tokens=tokens.size,
        nnz=np.array([statistics(x, *weights(i)).nnz for i, x in layers], np.float64),
        xla_ms=measure("xla"),
        mosaic_ms=measure("mosaic"),
    )


def ffn_inputs(
    model: Transformer, tokens: np.ndarray, *, document_end: int | None = None
) -> jax.Array:
    """What the feed-forward block of each layer is given: `[layers, B, T, D]` in `config.dtype`.

    Args:
      model: the language model.
      tokens: int [B, T].
      document_end: see `Transformer`.
    """
    graph = graphdef(model.config.model_copy(update={"ffn_implementation": "xla"}))
    recording = nnx.merge(graph, nnx.state(model))
    recording.blocks.mlp = _InputAsStats(recording.blocks.mlp)
    graph, params = nnx.split(recording)
    run = jax.jit(
        lambda params, tokens: nnx.merge(graph, params)(tokens, document_end=document_end)[1]
    )
    return run(params, tokens)


class _InputAsStats(nnx.Module):
    """Takes the place of a `SparseMLP` and returns its input instead of the statistics."""

    def __init__(self, mlp):
        self.mlp = mlp

    def __call__(self, x):
        return self.mlp(x)[0], x
