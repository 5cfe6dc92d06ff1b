"""Products of 8-bit operands for training, against float64 of operands rounded by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.float8 import E4M3, E5M2, rounded
from twell_jax.ffn import float8, quantise, sparse_ffn

# For cuBLASLt; Triton would be tried as well, and takes long.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def draw(scale=1.0):
    """x, whose tokens have other sizes, two kernels, and gradients of the two products."""
    shapes = (3, 48, 1), (3, 48, 64), (64, 96), (64, 32), (3, 48, 96), (3, 48, 32)
    sizes, x, *others = (seeds.rng().standard_normal(shape) for shape in shapes)
    factors = 2.0**-3, 2.0**-3, 2.0**-20, 2.0**-10
    scaled = scale * sizes * x, *(a * factor for a, factor in zip(others, factors, strict=True))
    x, first, second, *grads = (jnp.asarray(a, jnp.bfloat16) for a in scaled)
    return x, [first, second], grads


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("slack", [None, 1, 300])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_products_and_gradients_are_those_of_rounded_operands(scale, slack, axis):
    x, kernels, grads = draw(scale)
    matrix = jnp.concatenate(kernels, axis=1)
    most = slack and tuple(slack * jnp.abs(a).max().astype(jnp.float32) for a in (x, matrix))
    transposed = [jnp.swapaxes(kernel, 0, axis) for kernel in kernels]
    ys, gradients = jax.vjp(lambda *operands: float8.products(*operands, axis, most), x, transposed)
    of_x, of_kernels = gradients(grads)
    of_kernels = [jnp.swapaxes(grad, 0, axis) for grad in of_kernels]
    of_x_at_most, of_matrix_at_most = most or (None, None)
    rows = rounded(x.reshape(-1, 64), E4M3, of_x_at_most)
    matrix = rounded(matrix, E4M3, of_matrix_at_most)
    # A scale that is too large leaves enough bits.
    assert relative_error(rows, np.asarray(x, np.float64).reshape(-1, 64)) < 2.0**-5
    of_ys = rounded(jnp.concatenate(grads, axis=-1).reshape(-1, 128), E5M2)
    joined = np.concatenate(ys, axis=-1).reshape(-1, 128)
    for found, expected in (
        (joined, rows @ matrix),
        (of_x.reshape(-1, 64), of_ys @ matrix.T),
        (np.concatenate(of_kernels, axis=1), rows.T @ of_ys),
    ):
        assert found.dtype == np.dtype(jnp.bfloat16)
        assert relative_error(found, expected) <= ROUNDING


def test_what_is_zero_or_tiny_stays_and_what_is_not_finite_spreads():
    x, kernels, grads = draw()
    for y in float8.products(jnp.zeros_like(x), kernels):
        np.testing.assert_array_equal(y, 0)
    for tiny in (1e-38, 1e-45):
        assert all(np.isfinite(y).all() for y in float8.products(jnp.full_like(x, tiny), kernels))
    x = x.at[1, 2, 3].set(0) * 2.0**12  # too large for 8 bits without a scale
    expected = float8.products(x, kernels)
    for bad in (np.nan, np.inf):
        ys, gradients = jax.vjp(float8.products, x.at[1, 2, 3].set(bad), kernels)
        for y, of_zero in zip(ys, expected, strict=True):
            assert np.isnan(y[1, 2]).all()
            np.testing.assert_array_equal(y.at[1, 2].set(0), of_zero.at[1, 2].set(0))
        assert all(np.isnan(g[3]).any() for g in gradients(grads)[1])


def block(x, w_gate, w_up, w_down, dy):
    """y, and the gradients for x, w_gate, w_up and w_down, where operands alone are rounded."""
    weights = [w for w in (w_gate, w_up) if w is not None]
    rows, inner, down = (rounded(a, E4M3) for a in (x, np.concatenate(weights), w_down))
    *gate, up = np.split(rows @ inner.T, len(weights), axis=1)
    activated = np.maximum(gate[0] if gate else up, 0)
    h, of_y = rounded(activated * (up if gate else 1), E4M3), rounded(dy, E5M2)
    of_h = of_y @ down.T
    of_inner = [of_h * up * (activated > 0), of_h * activated] if gate else [of_h * (up > 0)]
    of_inner = rounded(np.concatenate(of_inner, axis=1), E5M2)
    of_weights = np.split(of_inner.T @ rows, len(weights))
    return h @ down, of_inner @ inner, *of_weights, h.T @ of_y


@pytest.mark.parametrize("gated", [True, False])
def test_a_block_has_operands_of_8_bits_in_both_passes(gated):
    rng = seeds.rng()
    x, dy = rng.standard_normal((2, 600, 64), np.float32)
    weights = rng.standard_normal((3, 192, 64), np.float32) * 2.0**-3
    weights = weights if gated else (None, *weights[1:])

    def y_of(x, weights):
        return sparse_ffn(x, *weights, implementation="xla", matmul_dtype="float8")[0]

    y, gradients = jax.vjp(y_of, x, tuple(weights))
    of_x, of_weights = gradients(dy)
    expected = block(x, *weights, dy)
    for ours, theirs in zip((y, of_x, *jax.tree.leaves(of_weights)), expected, strict=True):
        # An operand next to the middle of two numbers may become the other one, an eighth away.
        # Each other slip costs as much as rounding all, a thirtieth.
        assert relative_error(ours, theirs) < 2.0**-9


def test_dense_gradients_of_kernels_have_operands_of_8_bits(reference_kernels):
    rng = seeds.rng()
    x, dy = jnp.asarray(rng.standard_normal((2, 1024, 128)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((3, 256, 128)) * 2.0**-3, jnp.bfloat16)

    def gradients(implementation, matmul_dtype):
        options = {"implementation": implementation, "matmul_dtype": matmul_dtype}
        _, vjp = jax.vjp(lambda x, weights: sparse_ffn(x, *weights, **options)[0], x, weights)
        return vjp(dy)

    ours, theirs = (gradients(implementation, "float8") for implementation in ("mosaic", "xla"))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert relative_error(theirs[0], gradients("xla", None)[0]) > 2.0**-7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matmul_dtype": "float16"}, "matmul_dtype must be 'float8' or None, got 'float16'"),
        ({"x": jnp.ones((4, 8), jnp.float16)}, "needs x in bfloat16 or float32"),
        ({"w_up": quantise(jnp.ones((16, 8)))}, "some are Quantised; leave it out"),
    ],
)
def test_what_it_cannot_round_is_refused(changes, message):
    operands = {"x": jnp.ones((4, 8)), "matmul_dtype": "float8"} | changes
    w = jnp.ones((16, 8), operands["x"].dtype)
    with pytest.raises(ValueError, match=message):
        sparse_ffn(**{"w_gate": w, "w_up": w, "w_down": w} | operands)


@pytest.mark.gpu
def test_cublas_multiplies_8_bits_in_both_passes():
    x, kernels, _ = draw()

    def loss(x, kernels):
        return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in float8.products(x, kernels))

    def loss_of_block(x, kernels):
        w_up, w_down = (jnp.zeros((192, 64), jnp.bfloat16) + kernels[0][:, :1].T for _ in range(2))
        y, _ = sparse_ffn(x, w_up, w_up, w_down, matmul_dtype="float8", implementation="xla")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    for function, count in ((loss, 4), (loss_of_block, 7)):
        compiled = jax.jit(jax.grad(function, (0, 1))).lower(x, kernels).compile(OPTIONS)
        assert compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"') == count
