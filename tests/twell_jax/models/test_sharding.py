"""How activations lie on a mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests import seeds
from tests.devices import make_mesh, place
from twell_jax.models import sharding


def split(mesh, sequences, axis):
    """What `split_batch` makes of activations that are split along d_model over `axis`."""
    x = seeds.rng().standard_normal((sequences, 3, 16))
    (placed,) = place(mesh, [x], [P(None, None, axis)])
    with jax.set_mesh(mesh):
        y = jax.jit(sharding.split_batch)(placed)
    np.testing.assert_array_equal(y, placed)
    return y.sharding, placed.sharding


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (8, 1)])
def test_the_batch_is_split_over_all_devices(shape):
    mesh = sharding.make_mesh(shape, jax.devices("cpu")[:8])
    found, _ = split(mesh, 16, "fsdp")
    assert found.is_equivalent_to(sharding.of_batch(mesh), 3)


def test_a_batch_that_does_not_divide_and_another_mesh_are_left_to_xla():
    of_models = sharding.make_mesh((2, 4), jax.devices("cpu")[:8])
    for case in ((of_models, 12, "fsdp"), (make_mesh((8,), ("x",)), 8, "x")):
        found, given = split(*case)
        assert found.is_equivalent_to(given, 3)
