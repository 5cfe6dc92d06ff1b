"""Weights of a `Transformer` as 8-bit floats, for inference: which, and their linear layers."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pallas_kernels.kernels import TransformerKernels
from pallas_kernels.quantised import Quantised, rounded
from twell_jax.ffn import float8
from twell_jax.ffn.quantised import AXES, Projection, QuantisedParam
from twell_jax.models import float8_linear
from twell_jax.models.rope import Rotation

type Part = Projection | Literal["query", "key", "value", "out", "head"]
type Quantise = Literal["fp8", "fp8-all-but-down"]

ATTENTION: tuple[Part, ...] = ("query", "key", "value", "out")
PARTS: tuple[Part, ...] = (*AXES, *ATTENTION, "head")

# What becomes 8-bit floats by a value of `quantise`. No kernel takes a `w_down` in 8 bits.
COVERED: dict[Quantise, tuple[Part, ...]] = {
    "fp8": ("gate", "up"),
    "fp8-all-but-down": ("gate", "up", *ATTENTION, "head"),
}

# For `jax.jit` around a model with linear layers in 8 bits, as `compiler_options`. Without them XLA
# also tries Triton for their products: for a model of 2B parameters on 16 x 2048 tokens it was not
# done after 97 seconds; with them it took four.
QUANTISED_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def covered(quantise: str | None) -> tuple[Part, ...]:
    """The parts that a value of `quantise` names; None names none.

    Raises:
      ValueError: there is no such value.
    """
    if quantise is None:
        return ()
    if quantise not in COVERED:
        known = " or ".join(map(repr, COVERED))
        raise ValueError(f"quantise must be {known} or None, got {quantise!r}")
    return COVERED[quantise]


class QuantisedLinear(nnx.Module):
    """A linear layer with a weight of 8-bit floats, in the place of an `nnx.Linear`.

    Attributes:
      weight: `[out, in]` with a scale for each output. Rows lie along the sum, unlike those of the
        kernel of an `nnx.Linear`, as cuBLASLt takes no other operands of 8 bits.
      bias: `[out]`, or None.

    Args:
      weight: a parameter of floats `[..., out, in]`.
      bias: a parameter `[..., out]`, or None.

    Raises:
      ValueError: see `quantise`.
    """

    def __init__(self, weight: nnx.Variable, bias: nnx.Variable | None = None):
        self.weight = QuantisedParam(weight, -1)
        self.bias = nnx.data(bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `x: [..., in]` to `[..., out]` in its dtype; see `products`."""
        return project(x, self)[0]


def transposed(kernel: nnx.Variable) -> nnx.Variable:
    """A parameter `[..., in, out]` as one `[..., out, in]`, with its logical axes."""
    metadata = dict(kernel.get_metadata())
    if axes := metadata.get("out_sharding"):
        metadata["out_sharding"] = (*axes[:-2], axes[-1], axes[-2])
    return nnx.Param.from_metadata(jnp.swapaxes(kernel[...], -1, -2), metadata)


def project(
    x: jax.Array,
    *layers: nnx.Linear | QuantisedLinear,
    most: float8.Most | None = None,
    rotation: Rotation | None = None,
    kernels: TransformerKernels | None = None,
    is_written: bool = False,
) -> list[jax.Array]:
    """`[layer(x) for layer in layers]`; x is quantised once for all that are.

    Args:
      x: `[..., in]`; with a rotation `[B, T, in]`.
      layers: whose inputs it is.
      most: of layers that are not quantised the operands get 8 bits for each product, those of the
        gradients, too, by `float8.products`; no element of x, and no weight, exceeds these. None:
        they stay.
      rotation: of some of the results; None: of none.
      kernels: round operands where they can; None: XLA does.
      is_written: whether x lies in memory, where kernels may read it.
    """
    linear = [layer for layer in layers if isinstance(layer, nnx.Linear)]
    if most is None or len(linear) < len(layers):
        ys = _products_by_layers(x, layers)
    else:
        weights = [layer.kernel[...].astype(x.dtype) for layer in linear]
        columns, biases = [w.shape[1] for w in weights], [layer.bias for layer in linear]
        no_biases, how = all(bias is None for bias in biases), {"is_written": is_written}
        if kernels and no_biases and float8_linear.serves(x, columns, rotation, **how):
            return float8_linear.products(x, weights, most, rotation, kernels, **how)
        ys = float8.products(x, weights, most=most)
        ys = [_with_bias(y, bias) for y, bias in zip(ys, biases, strict=True)]
    return rotation.of(ys) if rotation else ys


def _products_by_layers(
    x: jax.Array, layers: Sequence[nnx.Linear | QuantisedLinear]
) -> list[jax.Array]:
    weights = [layer.weight[...] for layer in layers if isinstance(layer, QuantisedLinear)]
    found = iter(products(x, weights) if weights else ())
    return [
        _with_bias(next(found), layer.bias) if isinstance(layer, QuantisedLinear) else layer(x)
        for layer in layers
    ]


def _with_bias(y: jax.Array, bias: nnx.Variable | None) -> jax.Array:
    return y if bias is None else y + bias[...].astype(y.dtype)


@jax.custom_jvp
def products(x: jax.Array, weights: Sequence[Quantised]) -> list[jax.Array]:
    """x times several quantised matrices, with x quantised, too: a scale for each of its rows.

    On Hopper XLA leaves them to cuBLASLt. Its tensor cores sum in fewer bits than float32 has (fast
    accumulation). Sums are rounded to the dtype of x, multiplied with the scales in float32, and
    rounded again. Elsewhere sums are those of float32.

    Args:
      x: `[..., K]`, usually tokens.
      weights: each `[N, K]` with a scale for each row.

    Returns:
      `[..., N]` in the dtype of x for each weight.

    Raises:
      ValueError: it is differentiated.
    """
    rows = rounded(x.reshape(-1, x.shape[-1]))
    return [_product(rows, w, x.dtype).reshape(*x.shape[:-1], -1) for w in weights]


def _product(x: Quantised, w: Quantised, dtype: jnp.dtype) -> jax.Array:
    # XLA's GemmRewriter takes bare matrices of 8 bits with one contracted axis.
    sums = lax.dot_general(
        x.values,
        w.values,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=dtype,
    )
    return (sums.astype(jnp.float32) * x.scale * w.scale[:, 0]).astype(dtype)


@products.defjvp
def _refuse(primals, tangents):
    raise ValueError(
        "a linear layer with 8-bit weights has no gradients; train the model, and quantise it then"
    )
