"""The `(data, fsdp)` device mesh, and how parameters and batches are sharded over it.

Batches are split over all devices. Every matrix has one "embed" axis (d_model), which is split over
`fsdp`; XLA gathers a layer's weights before use and reduce-scatters their gradients (ZeRO-3).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from twell_jax.ffn.partition import ONE_DEVICE, auto_axes, devices

_AXES = ("data", "fsdp")
BATCH = P(_AXES)
LOGICAL_AXES = (
    ("embed", "fsdp"),
    ("mlp", None),
    ("heads", None),
    ("vocab", None),
    ("layers", None),
)


def make_mesh(
    shape: tuple[int, int], devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """The mesh of `shape`, (data, fsdp), over `devices` (default: all).

    `MeshConfig.shape` gives the shape for a configuration and a number of devices.
    """
    return jax.make_mesh(shape, _AXES, (AxisType.Auto, AxisType.Auto), devices=devices)


def of_params(params: nnx.State, mesh: jax.sharding.Mesh) -> nnx.State:
    """`NamedSharding`s for a state of parameters that carry logical axes."""
    with nnx.logical_axis_rules(LOGICAL_AXES):
        return nnx.get_named_sharding(params, mesh)


def of_batch(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The sharding of an array whose leading axis is the batch."""
    return NamedSharding(mesh, BATCH)


def split_batch(x: jax.Array) -> jax.Array:
    """Splits the leading axis of an activation, the batch, over all devices of the current mesh.

    Without it XLA may follow the weights' FSDP sharding and split activations along d_model. The
    sharding is left to XLA if the batch does not divide by the number of devices, or if the mesh is
    not one of `make_mesh`.
    """
    return jax.lax.with_sharding_constraint(x, P(auto_axes())) if _is_split(x) else x


def on_shares(
    function: Callable,
    x: jax.Array,
    *operands: jax.Array | None,
    whole: Any = None,
    joined: tuple[int, ...] | None = None,
) -> Any:
    """Calls `function(x, *operands)` on each device with its share of the leading axis, the batch.

    Results are joined along their leading axes, or those that `joined` names, one for each. Use it
    for operations that XLA cannot partition, or not well. Where `split_batch` leaves the sharding
    to XLA, so does this. `whole`, arrays which each device gets as they are, becomes the last
    argument.
    """
    last = () if whole is None else (whole,)
    if _is_split(x):
        batch, axes = P(auto_axes()), set(auto_axes())
        function = jax.shard_map(
            function,
            in_specs=(batch,) * (1 + len(operands)) + (P(),) * len(last),
            out_specs=batch
            if joined is None
            else tuple(P(*axis * [None], auto_axes()) for axis in joined),
            axis_names=axes,
            check_vma=False,
        )
    return function(x, *operands, *last)


def has_shares(x: jax.Array) -> bool:
    """Whether all that `on_shares` calls a function with lies on one device."""
    return _is_split(x) or devices() == ONE_DEVICE


def _is_split(x: jax.Array) -> bool:
    mesh, axes = jax.sharding.get_abstract_mesh(), auto_axes()
    shares = math.prod(mesh.shape[axis] for axis in axes)
    return bool(axes) and mesh.axis_names == _AXES and len(x) % shares == 0
