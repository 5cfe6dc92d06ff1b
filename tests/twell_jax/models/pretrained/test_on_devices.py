"""Where loaded parameters lie, whatever is set around the call, and that they keep their values."""

import jax
import pytest
from flax import nnx

from tests.twell_jax.models.pretrained.small import assert_same_parameters
from twell_jax.models import sharding
from twell_jax.models.pretrained import from_pretrained


def test_parameters_are_loaded_onto_a_mesh(saved):
    model, directory = saved
    mesh = sharding.make_mesh((2, 4), jax.devices("cpu")[:8])
    loaded = from_pretrained(directory, mesh=mesh)
    assert_same_parameters(loaded, model)
    w_up, kernel = loaded.blocks.mlp.w_up[...], loaded.blocks.attention.query.kernel[...]
    assert w_up.sharding.shard_shape(w_up.shape) == (2, 24, 4)
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 4, 16)


def set_around(name):
    devices = jax.devices("cpu")[:8]
    if name == "guard":
        return jax.transfer_guard("disallow")
    if name == "explicit":
        axis_types = (jax.sharding.AxisType.Explicit,)
        return jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types, devices=devices))
    return jax.set_mesh(sharding.make_mesh((2, 4), devices))


@pytest.mark.parametrize("name", ["mesh", "explicit", "guard"])
@pytest.mark.parametrize("on_a_mesh", [True, False])
def test_what_is_set_around_a_call_decides_nothing(saved, on_a_mesh, name):
    if on_a_mesh and name == "guard":
        pytest.skip("arrays on meshes are made of callbacks, which no guard allows")
    model, directory = saved
    mesh = sharding.make_mesh((1, 2), jax.devices("cpu")[2:4]) if on_a_mesh else None
    with set_around(name):
        loaded = from_pretrained(directory, mesh=mesh)
    assert_same_parameters(loaded, model)
    for a in jax.tree.leaves(nnx.state(loaded)):
        assert a.committed == on_a_mesh and len(a.devices()) == (2 if on_a_mesh else 1)


def test_parameters_do_not_follow_their_file(saved):
    model, directory = saved
    loaded = from_pretrained(directory)
    file = directory / "model.safetensors"
    with file.open("r+b") as content:  # where the mapped bytes are
        content.write(bytes(file.stat().st_size))
    assert_same_parameters(loaded, model)
