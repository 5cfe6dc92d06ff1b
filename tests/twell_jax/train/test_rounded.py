"""Matrices that are kept in the dtype of products, beside parameters in float32."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.twell_jax.train.small import D_FF, END, L1, draw, named, on_one_device, settings
from twell_jax.models import sharding
from twell_jax.train.state import init_state
from twell_jax.train.trainer import Trainer

IN_BFLOAT16 = {"dtype": "bfloat16"}


def test_state_is_float32_under_bfloat16_compute_but_for_rounded_matrices():
    state = jax.eval_shape(functools.partial(init_state, settings(model=IN_BFLOAT16)))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.rounded)} == {"bfloat16"}
    leaves = jax.tree.leaves(dataclasses.replace(state, rounded=None))
    assert {leaf.dtype.name for leaf in leaves} == {"float32", "int32"}
    assert init_state(settings()).rounded is None


def test_parameters_of_16_bits_compute_in_float32():
    run = settings(model={"param_dtype": "bfloat16"})
    trainer = on_one_device(run)
    with jax.set_mesh(trainer.mesh):
        state, metrics = trainer.step(trainer.init(), trainer.put_batch(draw()), L1)
    assert state.rounded is None and jnp.isfinite(metrics.ce)


@pytest.mark.parametrize("mesh", [pytest.param((1, 1), marks=pytest.mark.slow), (2, 2)])
def test_matrices_are_rounded_whenever_parameters_change(mesh):
    mesh = sharding.make_mesh(mesh, jax.devices("cpu")[: math.prod(mesh)])
    trainer = Trainer(settings(model=IN_BFLOAT16), END, mesh)

    def assert_rounded(state):
        rounded, params = named(state.rounded), named(state.params)
        assert len(rounded) == 7  # attention has four matrices, the block three
        for path, matrices in rounded.items():
            np.testing.assert_array_equal(matrices, params[path].astype(jnp.bfloat16), err_msg=path)
        placed = [
            {leaf.sharding for leaf in jax.tree.leaves(of)} for of in (state.rounded, state.params)
        ]
        assert placed[0] <= placed[1]

    with jax.set_mesh(trainer.mesh):
        state = trainer.init()
        assert_rounded(state)
        for _ in range(3):
            state, measured = trainer.step(state, trainer.put_batch(draw()), L1)
            assert_rounded(state)
        tiles = jax.random.randint(jax.random.key(0), (*measured.nnz.shape, D_FF), 0, 9)
        state = trainer.order_by_use(state, tiles, measured.nnz)
        assert_rounded(state)
        state = trainer.reinitialise(dataclasses.replace(state, idle_steps=state.idle_steps + 99))
        assert_rounded(state)
        others = jax.tree.map(lambda a: a + 1, state.params)
        state = trainer.with_rounded(dataclasses.replace(state, params=others, rounded=None))
        assert_rounded(state)
