"""Over how many devices a call is split, and what its statistics make of that."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import seeds
from tests.devices import make_mesh
from tests.pattern_shares import shares
from twell_jax import explain, sparse_ffn
from twell_jax.ffn import partition, stats
from twell_jax.ffn.partition import ONE_DEVICE, Devices

AUTO, MANUAL, EXPLICIT = AxisType.Auto, AxisType.Manual, AxisType.Explicit


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ((AUTO, AUTO), Devices(2, 4)),
        ((MANUAL, AUTO), Devices(1, 4)),
        ((AUTO, MANUAL), Devices(2, 1)),
        ((MANUAL, MANUAL), ONE_DEVICE),
        ((MANUAL, EXPLICIT), Devices(1, 4, explicit_in_shard_map=True)),
    ],
)
def test_manual_axes_are_split_already(types, expected):
    assert partition.devices() == ONE_DEVICE
    with jax.sharding.use_abstract_mesh(AbstractMesh((2, 4), ("data", "tensor"), types)):
        assert partition.devices() == expected


@pytest.mark.parametrize("function", [sparse_ffn, explain])
def test_weights_over_explicit_axes_need_their_mesh(function):
    mesh = jax.make_mesh((4,), ("tensor",), (EXPLICIT,), devices=jax.devices("cpu")[:4])
    x, w = np.ones((5, 4), np.float32), np.ones((8, 4), np.float32)
    w = jax.device_put(w, NamedSharding(mesh, P("tensor")))
    with pytest.raises(ValueError, match=r"weights are sharded as .*'tensor'.* inside jax.set_mes"):
        function(x, w, w, w)
    with jax.set_mesh(mesh):
        function(x, w, w, w)


def test_each_device_lets_tokens_leave_the_unions():
    rng = seeds.rng()
    active = rng.random((1300, 1408)) < 0.003
    active[3::4] = rng.random((325, 1408)) < 0.9  # more than one device lets leave
    h = active.astype(np.float32)
    with jax.set_mesh(make_mesh((2,), ("data",))):
        found = jax.jit(stats.of_dense)(h, h)
    expected = shares(active, most_heavy=512)
    np.testing.assert_allclose((found.union, found.listed), expected, rtol=1e-6)
    assert expected[0] < shares(active)[0]
