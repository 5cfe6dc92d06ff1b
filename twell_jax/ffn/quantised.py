"""Feed-forward blocks whose weights are 8-bit floats (`Quantised`), for inference."""

from collections.abc import Sequence
from typing import Any, Literal

from flax import nnx

from pallas_kernels.quantised import Quantised, quantise
from twell_jax.ffn.module import SparseMLP

Projection = Literal["gate", "up", "down"]

# The axis that the products with each sum over, and numbers with one scale lie along.
AXES: dict[Projection, int] = {"gate": -1, "up": -1, "down": -2}


class EightBits(nnx.Param):
    """A part of a `QuantisedParam`: its values or their scales. Its dtype is not to be changed."""


class QuantisedParam(nnx.Module):
    """A weight of 8-bit floats where a block had an `nnx.Param`: `param[...]` is the `Quantised`.

    Attributes:
      values, scale: those of the `Quantised`, with the logical axes of the parameter.

    Args:
      param: a floating-point weight `[..., H, D]`.
      axis: see `quantise`.

    Raises:
      ValueError: see `quantise`.
    """

    def __init__(self, param: nnx.Variable, axis: int):
        matrix = quantise(param[...], axis)
        metadata = param.get_metadata()
        self.values = EightBits.from_metadata(matrix.values, dict(metadata))
        self.scale = EightBits.from_metadata(matrix.scale, dict(metadata))
        if axes := metadata.get("out_sharding"):
            axes = [*axes, *[None] * (len(self.shape) - len(axes))]
            axes[axis] = None  # a scale is on all devices that have a part of its row
            self.scale.set_metadata(out_sharding=tuple(axes))

    def __getitem__(self, index: Any) -> Quantised:
        return Quantised(self.values[index], self.scale[index])

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return self.values.shape


def quantise_mlps(model: nnx.Module, projections: Sequence[Projection] = ("gate", "up")) -> None:
    """Gives every `SparseMLP` of a model weights of 8-bit floats, in place.

    Tokens are then quantised, too, for the products with these weights; see `sparse_ffn`. What is
    quantised already stays. Such a model cannot be trained.

    Args:
      model: a `SparseMLP` or a module that holds some; also one that `nnx.eval_shape` made.
      projections: which of "gate", "up" and "down"; a block without a gate has none to quantise.

    Raises:
      ValueError: the model has no `SparseMLP`, there is no such projection, or a weight holds an
        inf or a NaN.

    Example:
      >>> mlp = SparseMLP(16, 128, rngs=nnx.Rngs(0))
      >>> quantise_mlps(mlp)
      >>> mlp.w_gate[...].values.dtype.name, mlp([[0.5] * 16]).dtype.name
      ('float8_e4m3fn', 'float32')
    """
    if unknown := [name for name in projections if name not in AXES]:
        raise ValueError(f"projections must be of {[*AXES]}, got {unknown}")
    blocks = [module for _, module in nnx.iter_modules(model) if isinstance(module, SparseMLP)]
    if projections and not blocks:
        raise ValueError("the model has no SparseMLP, so nothing to quantise")
    for block in blocks:
        for name in projections:
            param = getattr(block, f"w_{name}")
            if isinstance(param, nnx.Variable):
                setattr(block, f"w_{name}", QuantisedParam(param, AXES[name]))


def quantised_projections(block: SparseMLP) -> list[Projection]:
    """The projections of a block that are quantised."""
    return [name for name in AXES if isinstance(getattr(block, f"w_{name}"), QuantisedParam)]
