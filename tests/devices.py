"""Meshes of virtual CPU devices, arrays that lie on them, and GPUs that are not there."""

import math

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding


def make_mesh(shape, axes, axis_type=AxisType.Auto, platform="cpu") -> Mesh:
    """A mesh of the first devices of a platform."""
    devices = jax.devices(platform)[: math.prod(shape)]
    return jax.make_mesh(shape, axes, len(axes) * (axis_type,), devices=devices)


def place(mesh, arrays, specs) -> list:
    """The arrays on the mesh, each as its `PartitionSpec` says; None stays None."""
    return [
        None if array is None else jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    ]


def abstract_gpu(
    name="NVIDIA H100 80GB HBM3", shape=(1, 1), axes=("data", "fsdp"), axis_type=AxisType.Auto
) -> AbstractMesh:
    """A mesh of GPUs, for which programs can be traced and lowered without one."""
    device = AbstractDevice(device_kind=name, num_cores=132, platform="gpu")
    return AbstractMesh(shape, axes, len(axes) * (axis_type,), abstract_device=device)


H100 = abstract_gpu()
