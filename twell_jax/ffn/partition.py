"""Runs kernels under `vmap` and over a mesh, as XLA can neither map nor partition them by itself.

The tokens are split over the axes of the current mesh, except for an axis named "tensor", over
which the neurons are split.
"""

import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.sharding import PartitionSpec

TENSOR = "tensor"  # the mesh axis over which neurons are split, not tokens


class Share(enum.Enum):
    """How an operand is split over devices, and how their results are merged."""

    TOKENS = enum.auto()  # rows of the device's tokens; a result is summed over the neurons
    NEURONS = enum.auto()  # rows of the device's neurons; a result is summed over the tokens
    FIRED = enum.auto()  # bool for the device's neurons; a result is true if it is for any token
    SUM = enum.auto()  # summed over all devices
    MEAN = enum.auto()  # averaged over all devices
    OWN = enum.auto()  # a tree of arrays that stays on its device


def over_mesh(function: Callable, inputs: Any, outputs: Any) -> Callable:
    """`function`, which calls kernels, run by each device of the current mesh on its share.

    Args:
      function: takes and returns the arrays of one device.
      inputs: for each operand a `Share`, or a tree of them.
      outputs: a tree of `Share`s with the structure of the result.
    """

    def split(*operands):
        axes = auto_axes()
        if not axes:
            return function(*operands)
        neurons = tuple(axis for axis in axes if axis == TENSOR)
        tokens = tuple(axis for axis in axes if axis != TENSOR)
        specs = {
            Share.TOKENS: PartitionSpec(tokens),
            Share.NEURONS: PartitionSpec(neurons),
            Share.FIRED: PartitionSpec(neurons),
            Share.OWN: PartitionSpec(axes),
        }
        merges = {
            Share.TOKENS: lambda a: lax.psum(a, neurons),
            Share.NEURONS: lambda a: lax.psum(a, tokens),
            Share.FIRED: lambda a: lax.pmax(a.astype(jnp.int32), tokens) > 0,
            Share.SUM: lambda a: lax.psum(a, axes),
            Share.MEAN: lambda a: lax.pmean(a, axes),
            Share.OWN: lambda a: a,
        }

        def merged(*operands):
            parts = function(*operands)
            return jax.tree.map(lambda share, part: merges[share](part), outputs, parts)

        def spec(share):
            return specs.get(share, PartitionSpec())

        return jax.shard_map(
            merged,
            in_specs=jax.tree.map(spec, inputs),
            out_specs=jax.tree.map(spec, outputs),
            axis_names=set(axes),
            check_vma=False,
        )(*operands)

    return split


def left_to_xla(function: Callable, tokens: Any, *operands: Any) -> Any:
    """`function(tokens, *operands)`, a pair, with the explicit axes of the mesh left to XLA.

    The first of the pair is sharded as the first array of `tokens` is, the second is the same on
    all devices.

    Raises:
      ValueError: one of the operands is sharded over explicit axes that cannot be left to XLA.
    """
    check_shardings(operands)
    axes = _explicit_axes()
    if axes:
        shardings = jax.typeof(jax.tree.leaves(tokens)[0]).sharding.spec, PartitionSpec()
        function = jax.sharding.auto_axes(function, out_sharding=shardings, axes=axes)
    return function(tokens, *operands)


def check_shardings(*operands: Any) -> None:
    """Raises ValueError if one is sharded over explicit axes that cannot be left to XLA."""
    if _explicit_axes():
        return
    for operand in jax.tree.leaves(operands):
        sharding = jax.typeof(operand).sharding
        if any(sharding.spec):
            raise ValueError(
                f"weights are sharded as {sharding.spec} over explicit axes of a mesh: call it "
                "inside jax.set_mesh(mesh), but outside shard_map"
            )


def _explicit_axes() -> tuple[str, ...]:
    """The explicit axes of the current mesh that can be left to XLA."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.manual_axes else mesh.explicit_axes


def sequential_unless_few(function: Callable, few: Callable, many_tokens: int) -> Callable:
    """`function`, but `vmap` runs it one call after the other, or maps `few` if calls are small.

    Args:
      function: its first operand is `[tokens, D]`.
      few: computes the same; `vmap` maps it if a call has fewer than `many_tokens` tokens.
      many_tokens: enough tokens to fill the GPU.
    """
    mapped = custom_vmap(function)

    @mapped.def_vmap
    def _(size, is_batched, *operands):
        del size
        axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)
        each = few if operands[0].shape[-2] < many_tokens else sequential_vmap(function)
        out = jax.vmap(each, in_axes=tuple(axes))(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def auto_axes() -> tuple[str, ...]:
    """The axes of the current mesh that are left to XLA; none if the mesh has a single device.

    Axes of size 1 count, too: XLA refuses what it cannot partition if any axis is left to it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.auto_axes if mesh.size > 1 else ()


class Devices(NamedTuple):
    """Over how many devices tokens and neurons have yet to be split.

    Attributes:
      tokens, neurons: the numbers of devices.
      explicit_in_shard_map: whether some of the mesh's axes are explicit, inside shard_map.
    """

    tokens: int = 1
    neurons: int = 1
    explicit_in_shard_map: bool = False


ONE_DEVICE = Devices()


def devices() -> Devices:
    """Those of the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {axis: size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes}
    neurons = sizes.pop(TENSOR, 1)
    explicit = bool(mesh.explicit_axes and mesh.manual_axes)
    return Devices(math.prod(sizes.values()), neurons, explicit)
