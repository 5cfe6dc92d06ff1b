"""Linear layers in 8 bits whose gradients a kernel rounds, against float64 of rounded operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kernels import REFERENCE
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.float8 import E4M3, E5M2, rounded
from tests.twell_jax.drawn import SMALL
from twell_jax.config import ModelConfig
from twell_jax.ffn import float8
from twell_jax.models import float8_linear, sharding
from twell_jax.models.rope import Rotation, rope_table

BATCH, TOKENS, INNER, WIDTHS = 4, 128, 192, (256, 128, 64)
MESHES = {"one device": ((1, 1), 1), "two": ((2, 1), 2), "a batch that none splits": ((3, 1), 3)}


def draw():
    """x, the weights and the gradients of the products, of different sizes."""
    rng = seeds.rng()
    x = rng.standard_normal((BATCH, TOKENS, INNER)) * rng.standard_normal((BATCH, TOKENS, 1))
    weights = [rng.standard_normal((INNER, width)) / 8 for width in WIDTHS]
    grads = [rng.standard_normal((BATCH, TOKENS, width)) * 2.0**-20 for width in WIDTHS]
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (x, weights, grads))


def rotation_of(config, sequences, rotated=2):
    positions = seeds.rng().integers(0, 999, (sequences, TOKENS))
    return Rotation(rope_table(jnp.asarray(positions), config), 64, rotated)


def turned(a, table, sign):
    """`a: [B, T, N]`, in heads of 64, rotated by the angles, or back; float64."""
    cos, sin = (np.asarray(angles, np.float64) for angles in table)
    first, second = np.split(np.asarray(a, np.float64).reshape(*a.shape[:2], -1, 64), 2, axis=-1)
    sin = sign * sin
    both = first * cos - second * sin, second * cos + first * sin
    return np.concatenate(both, axis=-1).reshape(a.shape)


def bounds(x, weights):
    arrays = x, jnp.concatenate(weights, axis=1)
    return tuple(jnp.abs(a).max().astype(jnp.float32) for a in arrays)


def ours(rotation, *, is_written):
    """The function that trains, on the kernels' reference functions."""

    @jax.jit
    def gradients(x, weights, grads):
        def products(x, weights):
            most = bounds(x, weights)
            columns = [w.shape[1] for w in weights]
            if not float8_linear.serves(x, columns, rotation, is_written=is_written):
                return None
            return float8_linear.products(
                x, weights, most, rotation, REFERENCE, is_written=is_written
            )

        ys, vjp = jax.vjp(products, x, weights)
        return ys, *vjp(grads)

    return gradients


CONFIGS = {"plain": {}, "yarn": {"rope_scaling": {
    "type": "yarn", "factor": 4.0, "original_context": 64, "attention_factor": 1.5}}}  # fmt: skip


written = pytest.mark.parametrize("is_written", [False, True])


@pytest.mark.sampled(6)
@written
@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize("sequences", [1, BATCH], ids=["shared angles", "angles of each sequence"])
@pytest.mark.parametrize("settings", CONFIGS)
def test_products_are_rotated_and_gradients_rotated_back(settings, sequences, case, is_written):
    x, weights, grads = draw()
    config = ModelConfig(**SMALL | {"d_model": 128, "heads": 2} | CONFIGS[settings])
    rotation = rotation_of(config, sequences)
    shape, count = MESHES[case]
    with jax.set_mesh(sharding.make_mesh(shape, jax.devices()[:count])):
        if BATCH % count:
            assert not float8_linear.serves(x, list(WIDTHS), rotation, is_written=is_written)
            return
        ys, of_x, of_weights = ours(rotation, is_written=is_written)(x, weights, grads)
    most = jnp.abs(x).max()
    rows = rounded(x.reshape(-1, INNER), E4M3, most)
    matrix = rounded(jnp.concatenate(weights, axis=1), E4M3)
    expected = np.split(rows @ matrix, np.cumsum(WIDTHS)[:-1], axis=1)
    for i, (y, exact) in enumerate(zip(ys, expected, strict=True)):
        exact = exact.reshape(y.shape)
        exact = turned(exact, rotation.table, 1) if i < 2 else exact
        assert relative_error(y, exact) < 2 * ROUNDING
    back = [turned(g, rotation.table, -1) if i < 2 else g for i, g in enumerate(grads)]
    of_ys = np.concatenate([np.asarray(g, np.float32).reshape(-1, g.shape[-1]) for g in back], 1)
    factor = 1.4143 * (1.5 if settings == "yarn" else 1)
    bound = factor * max(float(jnp.abs(g).max()) for g in grads)
    of_ys = rounded(of_ys, E5M2, bound)
    assert relative_error(of_x, (of_ys @ matrix.T).reshape(x.shape)) < ROUNDING
    # XLA on CPUs multiplies a device's share in another order, and sums it in bfloat16.
    summed = 8 if is_written and count > 1 else 1
    for found, exact in zip(
        of_weights, np.split(rows.T @ of_ys, np.cumsum(WIDTHS)[:-1], axis=1), strict=True
    ):
        assert relative_error(found, exact) < summed * ROUNDING


@written
def test_without_a_rotation_they_are_the_products_of_float8_to_the_bit(is_written):
    x, weights, grads = draw()
    most = bounds(x, weights)
    theirs, vjp = jax.vjp(lambda x, w: float8.products(x, w, most=most), x, weights)
    expected = theirs, *vjp(grads)
    jax.tree.map(
        np.testing.assert_array_equal,
        list(ours(None, is_written=is_written)(x, weights, grads)),
        list(expected),
    )


def test_what_is_not_finite_in_gradients_reaches_both():
    x, weights, grads = draw()
    config = ModelConfig(**SMALL | {"d_model": 128, "heads": 2})
    for bad in (np.nan, np.inf):
        changed = [grads[0].at[1, 2, 3].set(bad), *grads[1:]]
        _, of_x, of_weights = ours(rotation_of(config, 1), is_written=False)(x, weights, changed)
        assert np.isnan(of_x[1, 2]).all() and np.isfinite(of_x.at[1, 2].set(0)).all()
        assert np.isnan(of_weights[0][:, 3]).all() and np.isfinite(of_weights[2]).all()


def test_what_is_not_finite_in_tokens_reaches_their_results_alone():
    x, weights, grads = draw()
    finite, *_ = ours(None, is_written=True)(x, weights, grads)
    for bad in (np.nan, np.inf):
        ys, _, of_weights = ours(None, is_written=True)(x.at[1, 2, 3].set(bad), weights, grads)
        for y, exact in zip(ys, finite, strict=True):
            assert np.isnan(y[1, 2]).all() and np.isfinite(y.at[1, 2].set(0)).all()
            assert y.shape == exact.shape
        assert all(np.isnan(of_w[3]).all() for of_w in of_weights)


def test_what_the_kernel_does_not_take_is_left_to_xla():
    config = ModelConfig(**SMALL | {"d_model": 128, "heads": 2})
    rotation, x = rotation_of(config, 1), jnp.zeros((2, 128, 96), jnp.bfloat16)
    assert float8_linear.serves(x, [128, 64], rotation, is_written=False)
    for operands in (
        (x[:, :100], [128], None),  # tokens
        (x.astype(jnp.float32), [128], None),
        (x, [128, 32], None),  # columns
        (x, [128], rotation._replace(head_dim=128)),  # features that are not rotated
        (jax.eval_shape(lambda: jnp.zeros((2**14, 2**13, 96), jnp.bfloat16)), [64], None),
    ):
        assert not float8_linear.serves(*operands, is_written=False)
    assert not float8_linear.serves(x, [128], None, is_written=True)  # columns of x
