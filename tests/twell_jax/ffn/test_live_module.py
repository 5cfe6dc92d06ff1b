"""The number of live neurons as a variable of a `SparseMLP`, alone and in scans over layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import seeds
from twell_jax import SparseMLP
from twell_jax.ffn import LiveWidth

WIDTHS = np.array([0, 5, 24], np.int32)


def draw(*shape):
    return seeds.rng().standard_normal(shape, np.float32)


def truncated(x, mlp, live, layer=...):
    """y in float64 from the weights of the live neurons."""
    weights = (mlp.w_gate, mlp.w_up, mlp.w_down)
    gate, up, down = (np.asarray(w[layer], np.float64)[:live] for w in weights)
    return (np.maximum(x @ gate.T, 0) * (x @ up.T)) @ down


def test_the_number_can_be_changed_without_compiling_anew():
    mlp, x = SparseMLP(8, 24, live=7, rngs=nnx.Rngs(seeds.integer())), draw(5, 8)
    compiled = []

    @nnx.jit
    def call(mlp, x):
        compiled.append(True)
        return mlp(x)

    for live in (7, 0, 24):
        mlp.live[...] = jnp.int32(live)
        np.testing.assert_allclose(call(mlp, x), truncated(x, mlp, live), rtol=1e-4, atol=1e-5)
    assert len(compiled) == 1


def test_layers_in_a_scan_have_their_own():
    make = nnx.vmap(lambda rngs: SparseMLP(8, 24, live=24, rngs=rngs))
    mlps, x = make(nnx.Rngs(seeds.integer()).split(3)), draw(5, 8)
    assert mlps.live[...].shape == (3,)
    mlps.live[...] = jnp.asarray(WIDTHS)

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, mlp):
        return x + mlp(x)

    y = run(x, mlps)
    expected = x.astype(np.float64)
    for layer, live in enumerate(WIDTHS):
        expected = expected + truncated(expected, mlps, live, layer)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_an_optimizer_leaves_it_alone():
    mlp, x = SparseMLP(8, 24, live=7, rngs=nnx.Rngs(seeds.integer())), draw(5, 8)
    optimizer = nnx.Optimizer(mlp, optax.sgd(0.1), wrt=nnx.Param)
    before = jax.tree.map(np.array, nnx.state(mlp))
    optimizer.update(mlp, nnx.grad(lambda mlp: jnp.sum(mlp(x) ** 2))(mlp))
    assert [leaf.dtype for leaf in jax.tree.leaves(nnx.state(mlp, LiveWidth))] == [jnp.int32]
    assert mlp.live[...] == 7
    for name in ("w_gate", "w_up", "w_down"):
        new, old = np.asarray(getattr(mlp, name)), np.asarray(before[name])
        np.testing.assert_array_equal(new[7:], old[7:])
        assert not np.array_equal(new[:7], old[:7])


@pytest.mark.parametrize("live", [-1, 25, 2.0])
def test_what_is_no_number_of_neurons_is_named(live):
    with pytest.raises(ValueError, match=r"^live must be "):
        SparseMLP(8, 24, live=live, rngs=nnx.Rngs(0))
