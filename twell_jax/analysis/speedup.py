"""Times the kernels against XLA on each layer of a trained model, with its weights and inputs."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from twell_jax.analysis import timing
from twell_jax.analysis.activity import THROUGH_XLA
from twell_jax.ffn import Biases, CannotServe, SparseMLP, order_by_use, sparse_ffn
from twell_jax.ffn.activations import Activation
from twell_jax.models import Transformer, graphdef

TOKENS = 16384  # in a call; enough to fill a GPU


@dataclass(frozen=True)
class Speedup:
    """Times and errors of the feed-forward blocks of a model, one layer at a time.

    Attributes:
      device: name of the device.
      tokens: number of tokens in a call.
      nnz: float64 [layers], mean number of active neurons per token.
      xla_ms, mosaic_ms: float64 [layers], device time of a call in milliseconds, dense by XLA and
        by the kernels.
      xla_error, mosaic_error: float64 [layers], ||y - reference|| / ||reference||, where the
        reference is the same block in float32; 0 where both are zero. With a backward pass, the
        largest such error of y and the gradients.
    """

    device: str
    tokens: int
    nnz: np.ndarray
    xla_ms: np.ndarray
    mosaic_ms: np.ndarray
    xla_error: np.ndarray
    mosaic_error: np.ndarray

    @property
    def factor(self) -> np.ndarray:
        """float64 [layers], the time of XLA over that of the kernels."""
        return self.xla_ms / self.mosaic_ms

    def summarise(self) -> dict[str, Any]:
        """The fields and `factor`, ready for JSON."""
        layers = ("nnz", "factor", "xla_ms", "mosaic_ms", "xla_error", "mosaic_error")
        of_layers = {name: getattr(self, name).tolist() for name in layers}
        return {"device": self.device, "tokens": self.tokens} | of_layers


def measure_speedup(
    model: Transformer,
    sequences: np.ndarray,
    *,
    document_end: int | None = None,
    backward: bool = False,
) -> Speedup:
    """Times each layer's block through XLA and through the kernels.

    The outputs of both are compared with a float32 reference.

    Args:
      model: the language model.
      sequences: int [n, T + 1]; at most `TOKENS` tokens are used, but at least one sequence.
      document_end: see `Transformer`.
      backward: measure the forward and backward pass, with the gradients of a random cotangent,
        not the forward pass alone. The kernels' gradients are sparse, with full capacity, and
        neurons are in the order that training would give them (`order_by_use`).

    Raises:
      CannotServe: the kernels cannot serve this model here.
    """
    if model.quantised():
        raise CannotServe.because("measure_speedup", "its weights are 8-bit floats")
    config, mlp = model.config, model.blocks.mlp
    block = _Block(config.ffn_activation, backward)

    def weights(layer):
        stacked = (mlp.w_gate, mlp.w_up, mlp.w_down)
        return [None if w is None else w[layer].astype(config.dtype) for w in stacked]

    def live(layer):
        return mlp.live[layer] if config.live_width else None

    tokens = sequences[:, :-1]  # which may be far shorter than the context
    tokens = tokens[: max(1, TOKENS // tokens.shape[1])]
    like = jax.ShapeDtypeStruct((tokens.size, config.d_model), config.dtype)
    biases = Biases(down=jnp.zeros(config.d_model, config.dtype)) if config.mlp_bias else None
    check = partial(block.apply, "mosaic", biases=biases)
    jax.eval_shape(check, live(0), like, *weights(0))  # CannotServe
    inputs = ffn_inputs(model, tokens, document_end=document_end)
    dy = jax.random.normal(jax.random.key(0), like.shape, like.dtype)
    layers, nnz = [], []
    for layer, x in enumerate(inputs.reshape(config.layers, *like.shape)):
        of_layer = weights(layer)
        stats = block.stats(live(layer), x, *of_layer)
        nnz.append(stats.nnz)
        if backward:
            order = order_by_use(stats.tiles, stats.nnz)
            of_layer = [None if w is None else w[order] for w in of_layer]
        layers.append((live(layer), dy, x, *of_layer))

    def measure(implementation):
        ms, errors = [], []
        for operands in layers:
            compute = partial(block.outputs, implementation)
            ms.append(timing.milliseconds(compute, *operands, calls=4 if backward else 20))
            errors.append(block.largest_error(compute(*operands), *operands))
        return np.array(ms), np.array(errors, np.float64)

    xla_ms, xla_error = measure("xla")
    mosaic_ms, mosaic_error = measure("mosaic")
    return Speedup(
        device=jax.devices()[0].device_kind,
        tokens=tokens.size,
        nnz=np.array(nnz, np.float64),
        xla_ms=xla_ms,
        mosaic_ms=mosaic_ms,
        xla_error=xla_error,
        mosaic_error=mosaic_error,
    )


@dataclass(frozen=True)
class _Block:
    """What is measured of a layer. Equal blocks share their compiled programs.

    Attributes:
      activation: of `sparse_ffn`.
      backward: as of `measure_speedup`.
    """

    activation: Activation
    backward: bool

    def apply(self, implementation, live, x, *weights, biases=None):
        """y and its statistics."""
        return sparse_ffn(
            x,
            *weights,
            biases=biases,
            live=live,
            activation=self.activation,
            implementation=implementation,
            gradients="sparse" if self.backward and implementation == "mosaic" else None,
        )

    @partial(jax.jit, static_argnums=0)
    def stats(self, live, *operands):
        """The statistics by dense XLA."""
        return self.apply("xla", live, *operands)[1]

    @partial(jax.jit, static_argnums=(0, 1))
    def outputs(self, implementation, live, dy, *operands):
        """y and, with a backward pass, the gradients of sum(y dy)."""

        def ffn(*operands):
            return self.apply(implementation, live, *operands)[0]

        if not self.backward:
            return [ffn(*operands)]
        y, vjp = jax.vjp(ffn, *operands)
        return [y, *vjp(dy)]  # XLA would skip a matmul without y

    @partial(jax.jit, static_argnums=0)
    def largest_error(self, found, live, *operands):
        """The largest error of `outputs`, relative to the same block in float32."""
        operands, found = jax.tree.map(lambda a: a.astype(jnp.float32), (operands, found))
        with jax.default_matmul_precision("highest"):
            reference = self.outputs("xla", live, *operands)

        def error(out, ref):
            # A layer without active neurons has an error of 0, not NaN, if its output is zero too.
            least = jnp.finfo(jnp.float32).tiny
            return jnp.sqrt(jnp.sum((out - ref) ** 2) / jnp.maximum(jnp.sum(ref**2), least))

        errors = jax.tree.map(error, found, reference)
        return jnp.max(jnp.stack(jax.tree.leaves(errors)))


def ffn_inputs(
    model: Transformer, tokens: np.ndarray, *, document_end: int | None = None
) -> jax.Array:
    """The inputs of each layer's feed-forward block, `[layers, B, T, D]` in `config.dtype`.

    Args:
      model: the language model.
      tokens: int [B, T].
      document_end: see `Transformer`.
    """
    graph = graphdef(model.config.model_copy(update=THROUGH_XLA))
    recording = nnx.merge(graph, nnx.state(model))
    recording.blocks.mlp = _InputRecorder(recording.blocks.mlp)
    graph, params = nnx.split(recording)
    run = jax.jit(
        lambda params, tokens: nnx.merge(graph, params)(tokens, document_end=document_end)[1]
    )
    return run(params, tokens)


class _InputRecorder(nnx.Module):
    """Wraps a `SparseMLP` and returns its input in place of its statistics."""

    def __init__(self, mlp: SparseMLP):
        self.mlp = mlp

    def __call__(
        self, x: jax.Array, *, return_stats: bool = False, **options: Any
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        y = self.mlp(x, **options)
        return (y, x) if return_stats else y
