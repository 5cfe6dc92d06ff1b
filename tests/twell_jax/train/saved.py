"""Checkpoints of small states, one different from the other, that several tests share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from twell_jax.train.checkpoint import Checkpoints
from twell_jax.train.state import TrainState


def make_state(step, shape=(16, 8)):
    """A small state in the dtypes of a real one, different at every step."""
    w, b = jax.random.normal(jax.random.key(step), (2, *shape))
    params = nnx.State({"w": nnx.Param(w), "b": nnx.Param(b.astype(jnp.bfloat16))})
    moments = optax.adam(1.0).init(params)
    return TrainState(jnp.int32(step), params, moments, jnp.arange(6).reshape(2, 3) + step)


def abstract(state, sharding=None):
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)


def save(directory, *steps, keep=3, run=None):
    with Checkpoints(directory, keep, run) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"next_index": step})


def restore(directory, run=None):
    with Checkpoints(directory, keep=3, run=run) as checkpoints:
        return checkpoints.restore(abstract(make_state(0)))


def continue_to(directory, step):
    """Restores, and saves another step, as a run does."""
    with Checkpoints(directory, keep=3) as checkpoints:
        checkpoints.restore(abstract(make_state(0)))
        checkpoints.save(step, make_state(step), {"next_index": step})


def assert_is_step(restored, step):
    state, position = restored
    assert position == {"next_index": step}
    assert_same(state, make_state(step))


def assert_same(state, expected):
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for found, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert found.dtype == leaf.dtype
        assert np.asarray(found).tobytes() == np.asarray(leaf).tobytes()


def contents(directory):
    return {
        path.relative_to(directory): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }
