"""`SparseMLP`: the sparse feed-forward block as a Flax NNX module."""

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.quantised import Quantised
from twell_jax.ffn import arguments
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.algorithms import Implementation, LayerGradients, Packing
from twell_jax.ffn.api import sparse_ffn
from twell_jax.ffn.arguments import MatmulDtype, refuses_old_names
from twell_jax.ffn.capture import SownStats
from twell_jax.ffn.lasso import Windows
from twell_jax.ffn.numeric import is_integer
from twell_jax.ffn.stats import FFNStats, no_stats
from twell_jax.ffn.xla import Biases


class LiveWidth(nnx.Variable):
    """The variable type of the number of live neurons of a `SparseMLP`, int32 `[]`; stacked
    modules have `[layers]`. It is no parameter: optimizers leave it alone."""


# The parameters of a `SparseMLP` that have a row or a value for each neuron.
BY_NEURON = ("w_gate", "w_up", "w_down", "b_gate", "b_up")

_FROM_D_MODEL = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
_FROM_D_FF = nnx.initializers.lecun_normal(in_axis=0, out_axis=1)


class SparseMLP(nnx.Module):
    """Feed-forward block with ReLU sparsity: `y = mlp(x)`.

    Gated: h = relu(x w_gate^T) * (x w_up^T); non-gated: h = relu(x w_up^T); y = h w_down
    (arXiv 2603.23198, section 2). An L1 term in the loss makes h sparse: `y, stats = mlp(x,
    return_stats=True)` gives it for one block, `capture_stats` for all blocks of a model. For the
    latter the block sows its statistics into `SownStats`; outside of `nnx.capture` it stores none,
    unless it is made with `keep_stats=True`, for Linen models.

    All weights are neuron-major, `[d_ff, d_model]`: row n of `w_gate`, `w_up` and `w_down` belongs
    to neuron n (`nnx.Linear` kernels of the gate and up projections are the transpose of this).
    They carry the logical axes ("mlp", "embed") as `out_sharding`; map these to mesh axes with
    `nnx.logical_axis_rules` and `nnx.get_named_sharding`. If "mlp" is mapped to a mesh axis named
    "tensor", each device computes its own neurons; over other axes weights are gathered. See
    `sparse_ffn`. `quantise_mlps` makes 8-bit floats of them.

    Args:
      d_model: width of the input and output, D.
      d_ff: hidden units, H.
      gated: whether there is a gate projection.
      activation: see `sparse_ffn`; the formulas above are those of "relu".
      use_bias: adds `b_gate` (if gated) and `b_up` `[H]`, and `b_down` `[D]`.
      dtype: dtype of the computation: bfloat16, float16 or float32. None takes that of the input,
        and where the input is integers, that of the parameters.
      param_dtype: dtype of the parameters, a floating-point one.
      up_init: initialiser of `w_gate` and `w_up`, for the shape `[H, D]`.
      down_init: initialiser of `w_down`, for the shape `[H, D]`.
      implementation, packing, gradients: see `sparse_ffn`.
      live: number of live neurons, from 0 to H: those from this number on are never active (see
        `sparse_ffn`). It is held as the variable `live`, a `LiveWidth`, beside the weights, so that
        it can be changed, and layers in a scan have their own. None: no variable, any may be
        active.
      keep_stats: hold the `FFNStats` of the last call as the variable `stats`, a `SownStats`. For
        `nnx.bridge.to_linen`, which knows no `nnx.capture`: `Module.apply` returns them if
        "SownStats" is mutable, and `collect_stats` takes them.
      rngs: source of the initial weights.

    Raises:
      TypeError: an argument has the name of an earlier version; the message says the new one.
      ValueError: an argument is none of these.
    """

    @refuses_old_names("threshold", "gradient_capacity", "expected_nnz")
    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        gated: bool = True,
        activation: Activation = "relu",
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        up_init: nnx.Initializer = _FROM_D_MODEL,
        down_init: nnx.Initializer = _FROM_D_FF,
        implementation: Implementation | None = None,
        packing: Packing | None = None,
        gradients: LayerGradients = None,
        live: int | None = None,
        keep_stats: bool = False,
        rngs: nnx.Rngs,
    ):
        _check_size("d_model", d_model)
        _check_size("d_ff", d_ff)
        arguments.check_words(implementation, packing)
        arguments.check_gradients(gradients)
        arguments.check_activation(activation, gated)
        arguments.check_live(live, d_ff)
        if dtype is not None:
            arguments.check_dtype("dtype", dtype)
        if not _is_floating(param_dtype):
            raise ValueError(f"param_dtype must be a floating-point dtype, got {param_dtype}")

        def param(init, shape, axes):
            # Not sharded eagerly, because the module must also work without a mesh.
            value = init(rngs.params(), shape, param_dtype)
            return nnx.Param(value, out_sharding=axes, eager_sharding=False)

        matrix, zeros = ((d_ff, d_model), ("mlp", "embed")), nnx.initializers.zeros
        self.w_gate = param(up_init, *matrix) if gated else nnx.data(None)
        self.w_up = param(up_init, *matrix)
        self.w_down = param(down_init, *matrix)
        self.b_gate = param(zeros, (d_ff,), ("mlp",)) if use_bias and gated else nnx.data(None)
        self.b_up = param(zeros, (d_ff,), ("mlp",)) if use_bias else nnx.data(None)
        self.b_down = param(zeros, (d_model,), ("embed",)) if use_bias else nnx.data(None)
        self.live = nnx.data(None) if live is None else LiveWidth(jnp.int32(live))
        # There from the start, because a scan over layers may not add variables to them.
        self.stats = SownStats(no_stats(d_ff)) if keep_stats else nnx.data(None)
        self.activation = activation
        self.dtype = dtype
        self.implementation = implementation
        self.packing = packing
        self.gradients = gradients

    @overload
    def __call__(
        self,
        x: ArrayLike,
        *,
        return_stats: Literal[False] = ...,
        gradients: LayerGradients = ...,
        windows: Windows | None = ...,
        residual: ArrayLike | None = ...,
        matmul_dtype: MatmulDtype | None = ...,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        x: ArrayLike,
        *,
        return_stats: Literal[True],
        gradients: LayerGradients = ...,
        windows: Windows | None = ...,
        residual: ArrayLike | None = ...,
        matmul_dtype: MatmulDtype | None = ...,
    ) -> tuple[jax.Array, FFNStats]: ...

    @refuses_old_names("gradient_capacity")
    def __call__(
        self,
        x: ArrayLike,
        *,
        return_stats: bool = False,
        gradients: LayerGradients = None,
        windows: Windows | None = None,
        residual: ArrayLike | None = None,
        matmul_dtype: MatmulDtype | None = None,
    ) -> jax.Array | tuple[jax.Array, FFNStats]:
        """Applies the block.

        Args:
          x: `[..., D]`, anything that `jnp.asarray` takes.
          return_stats: return the statistics, too.
          gradients: override those of the module; None does not.
          windows: those of `FFNStats.lasso`, if it is wanted; see `sparse_ffn`.
          residual: `[..., D]` in the dtype of the computation, to which y is added; see
            `sparse_ffn`.
          matmul_dtype: see `sparse_ffn`.

        Returns:
          y: `[..., D]`, or the pair of y and the `FFNStats`.

        Raises:
          TypeError, ValueError, CannotServe: see `sparse_ffn`.
        """
        operands = self.operands(
            x,
            gradients=gradients,
            windows=windows,
            residual=residual,
            matmul_dtype=matmul_dtype,
        )
        y, stats = sparse_ffn(**operands)
        self.sow(SownStats, "stats", stats, capture_noop=True)
        if self.stats is not None:
            self.stats.set_value(stats)
        return (y, stats) if return_stats else y

    def operands(
        self,
        x: ArrayLike | jax.ShapeDtypeStruct,
        *,
        gradients: LayerGradients = None,
        windows: Windows | None = None,
        residual: ArrayLike | None = None,
        matmul_dtype: MatmulDtype | None = None,
    ) -> dict[str, Any]:
        """The arguments of the `sparse_ffn` that a call of the module is, by their names.

        Args: as of the call; x and the parameters may be `jax.ShapeDtypeStruct`s.
        """
        if isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.integer):
            # Here, as on the device 64 bits would become 32 before they become floats.
            x = x.astype(self.dtype or self.w_up[...].dtype)
        x = x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)
        is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        dtype = self.dtype or (x if is_inexact else _value(self.w_up)).dtype

        def cast(param):
            value = _value(param)
            is_exact = value is None or isinstance(value, Quantised)
            return value if is_exact else _in_dtype(value, dtype)

        return {
            "x": _in_dtype(x, dtype),
            "w_gate": cast(self.w_gate),
            "w_up": cast(self.w_up),
            "w_down": cast(self.w_down),
            "biases": Biases(cast(self.b_gate), cast(self.b_up), cast(self.b_down)),
            "live": _value(self.live),
            "activation": self.activation,
            "implementation": self.implementation,
            "packing": self.packing,
            "gradients": self.gradients if gradients is None else gradients,
            "windows": windows,
            "residual": residual,
            "matmul_dtype": matmul_dtype,
        }


def _value(param: Any) -> Any:
    """The array of a parameter, its shape and dtype if it has only these, or its `Quantised`."""
    if param is None:
        return None
    return param.get_value() if isinstance(param, nnx.Variable) else param[...]


def _in_dtype(array: Any, dtype: DTypeLike) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(dtype=jnp.dtype(dtype))
    return array.astype(dtype)


def _check_size(name: str, size: int) -> None:
    if not is_integer(size) or size < 1:
        raise ValueError(f"{name} must be a positive integer, got {size!r}")


def _is_floating(dtype: DTypeLike) -> bool:
    try:
        return jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        return False
