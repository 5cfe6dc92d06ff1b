"""Replicas of an array that differ: each has a digest of its own, and none is restored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from twell_jax.train import checkpoint
from twell_jax.train.checkpoint import Checkpoints, digest_texts, digests_of_arrays
from twell_jax.train.state import TrainState


def with_another_replica(array, unequal):
    """Replicas on four devices, of which one differs in one bit."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices("cpu")[:4])
    copies = [np.array(array) for _ in mesh.devices]
    copies[unequal].view(np.uint8).flat[-1] ^= 1
    placed = map(jax.device_put, copies, mesh.devices)
    sharding = NamedSharding(mesh, P())
    return jax.make_array_from_single_device_arrays(array.shape, sharding, list(placed))


def test_replicas_are_compared_each():
    array = with_another_replica(np.float32([1, 2]), unequal=2)
    first, second, third, fourth = digest_texts(digests_of_arrays({"x": array})["x"])
    assert first == second == fourth != third


def state_of(step):
    params = nnx.State({"w": nnx.Param(jnp.arange(6.0) + step)})
    return TrainState(jnp.int32(step), params, (), jnp.zeros((2, 3), jnp.int32))


@pytest.mark.parametrize("unequal", [0, 2])
def test_one_unequal_replica_is_refused(tmp_path, monkeypatch, unequal):
    def read_on_four_devices(step, items):
        restored = read(step, items)
        if step.name == "6":
            weight = restored.state["params"]["w"]
            weight.set_value(with_another_replica(weight[...], unequal))
        return restored

    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (3, 6):
            checkpoints.save(step, state_of(step), {})
    read = checkpoint._read
    monkeypatch.setattr(checkpoint, "_read", read_on_four_devices)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        on_one = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_one), state_of(0)
        )
        restored, _ = checkpoints.restore(abstract)
    assert restored.step == 3
