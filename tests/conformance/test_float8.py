"""Unions behind a gate whose product has operands of 8 bits; gradients are of exact operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantised import quantise, rounded
from tests import seeds
from tests.conformance.cases import draw, either_form, gradients
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.eight_bits import in_float64, lost
from twell_jax import sparse_ffn

UNIONS = {"implementation": "mosaic", "packing": "unions"}
FLOAT8 = {**UNIONS, "matmul_dtype": "float8"}


def draw_operands(d=256, *, gated):
    """Most neurons of two tokens are active."""
    x, *weights = draw(700, d, 384, gated=gated)
    x[[3, 300], -1] = -1
    return x, weights


def in_8_bits(a):
    """`a` in float64, rounded with a scale for each row; NumPy's quotients break ties elsewhere."""
    with jax.default_device(jax.devices("cpu")[0]):
        return in_float64(jax.jit(rounded)(jnp.asarray(a, jnp.bfloat16)))


def exact(x, weights, dy):
    """y and the gradients of sum(y dy) + l1, in float64."""
    x, gate, up, down = (None if a is None else a.astype(np.float64) for a in (x, *weights))
    z = in_8_bits(x) @ in_8_bits(up if gate is None else gate).T
    u = 1 if gate is None else x @ up.T
    h = np.maximum(z, 0) * u
    of_h = dy @ down.T + np.sign(h) / len(x)
    of_inner = [of_h * u * (z > 0)] + ([] if gate is None else [of_h * np.maximum(z, 0)])
    inner = [w for w in (gate, up) if w is not None]
    of_x = sum(grad @ w for grad, w in zip(of_inner, inner, strict=True))
    return h @ down, of_x, *(grad.T @ x for grad in of_inner), h.T @ dy


@pytest.mark.sampled(1)
@pytest.mark.parametrize("capacity", [1.0, 0.02])  # too little: all is computed again
@either_form
def test_gradients_are_those_of_what_is_not_rounded(back_end, capacity, gated):
    x, weights = draw_operands(gated=gated)
    dy = seeds.rng().standard_normal(x.shape)
    ffn = functools.partial(sparse_ffn, **FLOAT8, gradients=capacity)
    grads, (y, stats) = jax.jit(functools.partial(gradients, ffn))((x, *weights), dy)
    assert stats.overflow == (capacity < 1)
    for ours, theirs in zip((y, *jax.tree.leaves(grads)), exact(x, weights, dy), strict=True):
        # Of g, h, the gradients of each, and the result. Where ties go the other way, on GPUs, a
        # gate in a thousand may open or close, which is its root of the gradients.
        of_ties = 2 * 0.001**0.5 * (jax.default_backend() == "gpu")
        assert relative_error(ours, theirs) < 4 * ROUNDING + lost(256) + of_ties


@pytest.mark.sampled(1)
@either_form
def test_forwards_are_those_of_a_quantised_gate(back_end, gated):
    x, weights = draw_operands(gated=gated)
    rounded = [quantise(w) if i == (0 if gated else 1) else w for i, w in enumerate(weights)]
    expected, of_expected = jax.jit(functools.partial(sparse_ffn, **UNIONS))(x, *rounded)
    for options in (FLOAT8, FLOAT8 | {"gradients": "sparse"}):
        y, stats = jax.jit(functools.partial(sparse_ffn, **options))(x, *weights)
        np.testing.assert_array_equal(y, expected)
        assert stats.nnz == of_expected.nnz and stats.l1 == of_expected.l1


def test_with_other_widths_the_gate_stays_as_it_is(back_end):
    x, weights = draw_operands(192, gated=True)
    ours, theirs = (
        jax.jit(functools.partial(sparse_ffn, **options))(x, *weights)[0]
        for options in (FLOAT8, UNIONS)
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_both_passes_lower_for_an_h100(lower):
    shapes = [(2048, 2048), *3 * [(5632, 2048)]]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    ffn = functools.partial(sparse_ffn, **FLOAT8, gradients=0.75)
    text = lower(lambda *given: gradients(ffn, given, 1.0)[0], *operands)
    assert text.count("f8E4M3FN") > 2
