"""The tile lasso by every back end, and its gradients, in every way that the backward takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests import seeds
from tests.conformance.cases import COLUMNS, TOKENS, draw, in_float32, sparse
from tests.conformance.patterns import SHAPE, draw_pattern
from tests.devices import make_mesh, place
from tests.errors import ROUNDING, relative_error
from twell_jax import explain, sparse_ffn
from twell_jax.ffn import CannotServe, Windows, dispatch
from twell_jax.ffn.residuals import Way

M, D, _ = SHAPE
GRIDS = {  # tokens of a sequence and of a window
    "a sequence": (700, 256),
    "sequences that tiles cut": (100, 32),
    "a window each": (175, 175),
}


def loss(ffn, length, offset, dy, penalty, operands):
    """sum(y dy), and the penalties as sums over tokens; the statistics."""
    y, stats = ffn(*operands, windows=Windows(offset, length=length))
    product = jnp.sum(y.astype(jnp.float32) * dy)
    return product + penalty * M * (stats.lasso + 0.3 * stats.l1), stats


def gradients(options, length, *operands):
    """Gradients of `loss` and the statistics by `sparse_ffn` with these options; traced once."""
    return _gradients(dispatch.BACK_ENDS, tuple(options.items()), length)(*operands)


@functools.cache
def _gradients(back_ends, options, length):
    ffn = functools.partial(sparse_ffn, **dict(options))
    return jax.jit(jax.grad(functools.partial(loss, ffn, length), argnums=3, has_aux=True))


def in_sequences(operands, tokens):
    x, *weights = operands
    return [x.reshape(-1, tokens, x.shape[-1]), *weights]


def assert_exact(operands, grid, capacity=1.0, *, with_y=True):
    """Gradients of the lasso, with those of y or alone, against dense float32 ones; the overflow.

    The kernels round h and what its gradient has from the lasso.
    """
    tokens, length = GRIDS[grid]
    rng = seeds.rng()
    operands, offset = in_sequences(operands, tokens), jnp.int32(rng.integers(length))
    dy = rng.standard_normal(operands[0].shape).astype(np.float32) * with_y
    given = offset, dy, jnp.float32(1)
    with jax.default_matmul_precision("highest"):
        reference, expected = gradients({}, length, *given, in_float32(operands))
    dense, _ = gradients({}, length, *given, operands)
    ours, stats = gradients(sparse(capacity), length, *given, operands)
    again, _ = gradients(sparse(capacity), length, *given, operands)
    for out, same, own, ref in zip(
        *map(jax.tree.leaves, (ours, again, dense, reference)), strict=True
    ):
        assert relative_error(out, ref) < max(4 * ROUNDING, relative_error(own, ref))
        np.testing.assert_array_equal(out, same)
    np.testing.assert_allclose(stats.lasso, expected.lasso, rtol=1e-2)
    np.testing.assert_allclose(stats.l1, expected.l1, rtol=1e-2)
    return stats.overflow


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("pattern", "gated", "grid"),
    [  # with few pairs of a form and a grid, so that cases share compiled programs
        ("sparse", True, "sequences that tiles cut"),
        pytest.param("sparse", False, "a sequence", marks=pytest.mark.slow),
        ("some dense tokens", True, "sequences that tiles cut"),
        ("the last tile does not fit", False, "a sequence"),
        ("the lists do not fit", False, "a sequence"),
        pytest.param(
            "the lists do not fit", True, "sequences that tiles cut", marks=pytest.mark.slow
        ),
        pytest.param("dense", True, "a window each", marks=pytest.mark.slow),
        pytest.param("dense", False, "a sequence", marks=pytest.mark.slow),
        ("zero but for one token", True, "sequences that tiles cut"),
        pytest.param("zero but for one token", True, "a window each", marks=pytest.mark.slow),
        ("dense is faster", True, "sequences that tiles cut"),
        pytest.param("dense is faster", False, "a sequence", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("with_y", [True, False], ids=["with y", "alone"])
def test_gradients(back_end, pattern, gated, grid, with_y):
    operands, capacity, way = draw_pattern(pattern, gated)
    assert assert_exact(operands, grid, capacity, with_y=with_y) == (way == Way.RECOMPUTE)


def test_without_gradients(back_end):
    """More tokens leave the unions than are kept, and h is computed again."""
    operands = in_sequences(draw(*SHAPE, threshold=1.5), 100)
    windows = Windows(jnp.int32(7), length=32)
    ours, dense = (
        jax.jit(functools.partial(sparse_ffn, windows=windows, **options))(*operands)[1].lasso
        for options in (sparse(0.1), {})
    )
    np.testing.assert_allclose(ours, dense, rtol=1e-2)


@pytest.mark.slow
def test_rematerialised_and_mapped(reference_kernels):
    x, *weights = draw(2 * 200, 128, 256)
    x = x.reshape(2, 2, 100, 128)
    dy, given = np.ones(x.shape[1:], np.float32), (jnp.int32(5), 1.0)

    def mapped(options):
        ffn = functools.partial(sparse_ffn, **options)

        def of(x):
            checkpointed = jax.checkpoint(functools.partial(loss, ffn, 32))
            return checkpointed(given[0], dy, given[1], [x, *weights])[0]

        return jax.jit(jax.vmap(jax.grad(of)))(x)

    assert relative_error(mapped(sparse()), mapped({})) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "tokens", "weights"),
    [
        pytest.param(("data", "fsdp"), TOKENS, COLUMNS, marks=pytest.mark.slow),
        (("data", "tensor"), P("data"), P("tensor")),
    ],
)
def test_over_a_mesh(reference_kernels, axes, tokens, weights):
    operands = in_sequences(draw(800, D, 512), 100)
    operands[0][3, 1::50, -1] = -1
    length, dy = 32, np.zeros(operands[0].shape, np.float32)
    given = jnp.int32(9), dy, jnp.float32(1)
    reference, expected = gradients({}, length, *given, operands)
    mesh = make_mesh((2, 2), axes)
    with jax.set_mesh(mesh):
        placed = place(mesh, operands, [tokens, *3 * [weights]])
        ours, stats = gradients(sparse(), length, *given, placed)
    np.testing.assert_allclose(stats.lasso, expected.lasso, rtol=1e-2)
    for out, ref in zip(*map(jax.tree.leaves, (ours, reference)), strict=True):
        assert relative_error(out, ref) < 1e-2


def test_what_kernels_do_not_serve_is_said(reference_kernels):
    x, w = jnp.ones((4, 100, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    windows = Windows(jnp.int32(0))
    with pytest.raises(CannotServe, match="compute the lasso with sparse gradients alone"):
        sparse_ffn(x, w, w, w, implementation="mosaic", windows=windows)
    assert "dense, by xla" in explain(x, w, w, w, windows=windows)
    assert "unions, by mosaic" in explain(x, w, w, w, windows=windows, gradients="sparse")
    documents = Windows(jnp.int32(0), jnp.zeros((4, 100), jnp.int32))
    with pytest.raises(CannotServe, match="no lasso over windows of documents"):
        sparse_ffn(x, w, w, w, gradients="sparse", windows=documents)
    with (
        jax.set_mesh(make_mesh((8,), ("data",))),
        pytest.raises(CannotServe, match="parts of the windows of a sequence"),
    ):
        sparse_ffn(x, w, w, w, gradients="sparse", windows=windows)
