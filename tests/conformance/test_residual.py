"""`sparse_ffn(..., residual=...)` by every back end and algorithm, against sums without it."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests import seeds
from tests.conformance.cases import (
    ALGORITHMS,
    assert_same_stats,
    by,
    draw,
    every_algorithm,
    gradients,
    in_float32,
    sparse,
    xla,
)
from tests.devices import make_mesh, place
from tests.errors import ROUNDING, relative_error
from twell_jax import sparse_ffn
from twell_jax.models import PREFILL_OPTIONS


def residual_for(operands):
    """As large as what y is added to: the tokens, in another order of features for each."""
    return seeds.rng().permuted(operands[0], axis=1)


@pytest.mark.sampled(3)
@every_algorithm
@pytest.mark.parametrize("heavy", [0, 3, 700])
def test_y_is_added_to_a_residual(back_end, algorithm, heavy):
    operands = draw(ALGORITHMS[algorithm][1], 192, 640)
    operands[0][:heavy, -1] = -1
    assert_added(jax.jit(by(algorithm)), operands, algorithm)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, PREFILL_OPTIONS], ids=["graphs", "prompts"])
@pytest.mark.parametrize(("m", "every"), [(1024, 1024), (1001, 5), (4096, 512), (16384, 100)])
def test_y_is_added_to_a_residual_at_full_size(m, every, options):
    operands = draw(m, 2048, 5632, threshold=2.57)
    operands[0][7::every, -1] = -1
    call = jax.jit(by("unions"), compiler_options=options)
    assert_added(call, operands, "unions")


def assert_added(call, operands, algorithm):
    """Sums and statistics are those without a residual."""
    residual = residual_for(operands)
    (y, stats), (alone, stats_alone) = call(*operands, residual=residual), call(*operands)
    expected = np.asarray(residual, np.float64) + np.asarray(alone, np.float64)
    assert y.dtype == alone.dtype and relative_error(y, expected) <= 2 * ROUNDING
    row = np.argmax(operands[0][:, -1] < 0)  # a heavy one, if there is any
    assert relative_error(y[row], expected[row]) <= 2 * ROUNDING
    assert_same_stats(algorithm, operands, stats, stats_alone)


@pytest.mark.parametrize("options", [{"packing": "unions"}, sparse()], ids=["alone", "gradients"])
def test_where_the_neurons_are_split_a_residual_is_added_once(reference_kernels, options):
    def block(x, *weights, residual):
        y, vjp = jax.vjp(lambda a: sparse_ffn(x, *weights, residual=a, **options)[0], residual)
        return y, vjp(y)[0]

    operands = draw(4 * 100, 128, 512)
    residual = residual_for(operands)
    mesh, specs = make_mesh((2, 2), ("data", "tensor")), [P("data"), *3 * [P("tensor")], P("data")]
    with jax.set_mesh(mesh):
        x, *weights, placed = place(mesh, [*operands, residual], specs)
        y, of_residual = jax.jit(block)(x, *weights, residual=placed)
    expected, _ = xla(*in_float32(operands), residual=residual.astype(np.float32))
    assert relative_error(y, expected) < 5e-3
    np.testing.assert_array_equal(of_residual, y)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"packing": "unions"}, sparse()], ids=["dense", "sparse"])
def test_gradients_of_a_residual_are_those_of_a_sum(back_end, options):
    """And the others are what they are without one."""
    operands = draw(700, 128, 512)
    residual, dy = residual_for(operands), seeds.rng().standard_normal((700, 128))

    def with_residual(*operands):
        *operands, residual = operands
        return sparse_ffn(*operands, residual=residual, **options)

    def a_sum(*operands):
        *operands, residual = operands
        y, stats = sparse_ffn(*operands, **options)
        return residual + y, stats

    call = jax.jit(gradients, static_argnums=0)
    ours, expected = (call(f, [*operands, residual], dy) for f in (with_residual, a_sum))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2 * ROUNDING, atol=1e-6), ours, expected
    )
    np.testing.assert_array_equal(ours[0][-1], dy.astype(residual.dtype))


@pytest.mark.parametrize(
    ("change", "got"),
    [(lambda a: a[:2], r"float32 \[2, 4\]"), (lambda a: a.astype(np.float16), r"float16 \[3, 4\]")],
)
def test_another_shape_or_dtype_is_an_error(change, got):
    x, w = np.ones((3, 4), np.float32), np.ones((6, 4), np.float32)
    with pytest.raises(ValueError, match=rf"^residual must be as x, float32 \[3, 4\], got {got}"):
        sparse_ffn(x, w, w, w, residual=change(x))
