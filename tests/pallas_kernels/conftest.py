import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


@pytest.fixture
def lower():
    """`lower(function, *operands)` is the text of the function, lowered for an H100 without one."""
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device)

    def lower(function, *operands):
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(function).trace(*operands)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    return lower
