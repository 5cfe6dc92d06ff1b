import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kernels import HOPPER, REFERENCE
from pallas_kernels.weights import Weights
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.launches import SM_BYTES, launches


def draw(m, d, h, active, dtype):
    """x, w_gate, w_up and w_down, of NumPy. The last column of x is 1, and that of w_gate makes
    about a share `active` of the neurons fire."""
    normal = functools.partial(seeds.rng().standard_normal, dtype=np.float32)
    x, w_gate, w_up, w_down = normal((m, d)), normal((h, d)), normal((h, d)), normal((h, d))
    x[:, -1] = 1
    w_gate /= d**0.5
    w_gate[:, -1] = np.quantile(normal(10000), active)
    return [a.astype(dtype) for a in (x, w_gate, w_up / d**0.5, w_down)]


def dense(x, w_gate, w_up, w_down):
    """(y, l1) in float64 on the host, from the gate as rounded to the dtype of x."""
    dtype = x.dtype
    x, w_up, w_down = (np.asarray(a, np.float64) for a in (x, w_up, w_down))
    first = w_up if w_gate is None else np.asarray(w_gate, np.float64)
    h = np.maximum((x @ first.T).astype(dtype).astype(np.float64), 0)
    if w_gate is not None:
        h = h * (x @ w_up.T)
    return h @ w_down, np.sum(np.abs(h), axis=1)


def assert_matches(out, x, w_gate, w_up, w_down):
    y, nnz, l1, fired = jax.device_get(out)
    y_ref, l1_ref = dense(x, w_gate, w_up, w_down)
    assert y.dtype == x.dtype and y.shape == y_ref.shape
    assert relative_error(y, y_ref) < 2 * ROUNDING  # of the gate and of y
    assert relative_error(l1, l1_ref) < ROUNDING
    # A gate within rounding of zero may go either way.
    first = w_up if w_gate is None else w_gate
    gate = np.asarray(x, np.float64) @ np.asarray(first, np.float64).T
    assert np.all(np.sum(gate > 1e-5, axis=1) <= nnz)
    assert np.all(nnz <= np.sum(gate > -1e-5, axis=1))
    assert np.all((gate > 1e-5).any(axis=0) <= fired)
    assert np.all(fired <= (gate > -1e-5).any(axis=0))


@jax.jit
def reference(x, *weights):
    return REFERENCE.few_tokens_ffn(x, Weights(*weights))


def shapes(m, d, h, dtype, gated=True):
    x, w = jax.ShapeDtypeStruct((m, d), dtype), jax.ShapeDtypeStruct((h, d), dtype)
    return x, Weights(w if gated else None, w, w)


@pytest.mark.parametrize(
    ("m", "d", "h", "dtype"),
    [
        (1, 2048, 5632, jnp.bfloat16),
        (7, 192, 384, jnp.float16),
        (33, 8192, 128, jnp.bfloat16),
    ],
)
def test_lowers_without_a_gpu(lower, m, d, h, dtype):
    text = lower(HOPPER.few_tokens_ffn, *shapes(m, d, h, dtype))
    assert "token_gate" in text and "token_ffn" in text


@pytest.mark.parametrize("m", [1, 3, 8])
def test_neither_x_nor_y_is_copied(lower, m):
    text = lower(lambda *a: HOPPER.few_tokens_ffn(*a)[0], *shapes(m, 2048, 5632, jnp.bfloat16))
    assert "token_ffn" in text
    assert not re.search(r"stablehlo\.(pad|slice)", text)


def test_lowers_without_a_gpu_non_gated(lower):
    operands = shapes(8, 768, 5632, jnp.bfloat16, gated=False)
    assert "token_ffn" in lower(HOPPER.few_tokens_ffn, *operands)


@pytest.mark.parametrize(
    ("m", "d", "h"),
    [
        (1, 2048, 5632),
        (8, 192, 640),
        pytest.param(8, 128, 65536, marks=pytest.mark.slow),
        (17, 2048, 5632),
        (64, 128, 16384),
    ],
)
def test_blocks_that_wait_for_each_other_are_on_the_gpu_together(lower, m, d, h):
    text = lower(HOPPER.few_tokens_ffn, *shapes(m, d, h, jnp.bfloat16))
    launch = launches(text)["token_ffn"]
    # Blocks, in `grid.wait`; what waits for votes does not trap.
    waited_for = int(re.search(r"stuck trap;.*?more, seen, (\d+);", text)[1])
    on_sm = SM_BYTES // (launch.smem + 1024)
    assert launch.cluster == (8 if m <= 16 else 4)
    # What an H100 holds, by cuOccupancyMaxActiveClusters, with 1 and 2 blocks on an SM; registers
    # allow two.
    held = {4: {1: 30, 2: 62}, 8: {1: 15, 2: 30}}[launch.cluster][min(on_sm, 2)]
    assert waited_for // launch.cluster <= held


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_reference_matches_dense(gated, dtype):
    x, w_gate, w_up, w_down = draw(5, 192, 384, 0.05, dtype)
    operands = (x, w_gate if gated else None, w_up, w_down)
    assert_matches(reference(*operands), *operands)


def with_non_finite_rows(x):
    """x with an inf in token 1 and a NaN in token 2, in a column where weights have both signs."""
    x = x.copy()
    x[1, 3], x[2, 5] = np.inf, np.nan
    return x


def assert_non_finite_as_in_dense(out, x, w_gate, w_up, w_down):
    y, nnz, l1, _ = (np.asarray(a, np.float32) for a in out)
    with np.errstate(invalid="ignore"):
        y_ref, l1_ref = dense(x, w_gate, w_up, w_down)
    assert np.isnan(y_ref[1:3]).all() and np.isfinite(np.delete(y_ref, [1, 2], 0)).all()
    np.testing.assert_array_equal(np.isnan(y), np.isnan(y_ref))
    np.testing.assert_array_equal(l1[1:3], l1_ref[1:3])  # NaN, or inf in the non-gated form
    assert 0 < nnz[1] < nnz[2] == w_up.shape[0]


@pytest.mark.parametrize("gated", [True, False])
def test_reference_is_non_finite_where_dense_is(gated):
    x, w_gate, w_up, w_down = draw(5, 192, 384, 0.05, jnp.bfloat16)
    operands = (with_non_finite_rows(x), w_gate if gated else None, w_up, w_down)
    assert_non_finite_as_in_dense(reference(*operands), *operands)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=np.zeros((0, 192), jnp.bfloat16)), "M from 1 to 64"),
        (dict(x=np.zeros((65, 192), jnp.bfloat16)), "M from 1 to 64"),
        (dict(x=np.zeros((4, 384), jnp.bfloat16)), r"x must be bfloat16 \[4, 192\]"),
        (dict(x=np.zeros((4, 192), jnp.float32)), "x must be bfloat16"),
        (dict(w_gate=np.zeros((192, 384), jnp.bfloat16)), "w_gate must be"),
        (dict(w_up=np.zeros((384, 96), jnp.bfloat16)), r"w_up must be bfloat16 \[384, 192\]"),
        (dict(w_down=np.zeros((384, 96), jnp.bfloat16)), "w_down must be .* a multiple of 64"),
        (dict(w_down=np.zeros((192, 384), jnp.bfloat16)), "w_down must be"),
    ],
)
def test_bad_operands_are_named(change, message):
    w = np.zeros((384, 192), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        hopper(**dict(x=w[:4], w_gate=w, w_up=w, w_down=w) | change)


def hopper(x, w_gate, w_up, w_down):
    return HOPPER.few_tokens_ffn(x, Weights(w_gate, w_up, w_down))


def run(*operands):
    """`few_tokens_ffn` on memory that held NaN just before."""
    poison = jnp.full((64, 1 << 20), jnp.nan)
    poison.block_until_ready()
    poison.delete()
    return jax.block_until_ready(jax.jit(hopper)(*operands))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "d", "h", "active", "dtype", "gated"),
    [
        (1, 128, 128, 0.05, jnp.bfloat16, True),
        (7, 192, 384, 0.05, jnp.float16, True),
        (1, 2048, 5632, 0.005, jnp.bfloat16, True),
        (8, 768, 5632, 0.005, jnp.float16, False),
        (9, 128, 65536, 0.005, jnp.bfloat16, True),
        (33, 1024, 5632, 0.1, jnp.bfloat16, False),
        (64, 2048, 5632, 0.005, jnp.bfloat16, True),
        (3, 8192, 5632, 0.005, jnp.float16, True),
        (17, 4096, 384, 1.0, jnp.bfloat16, True),
        (17, 4096, 384, 1.0, jnp.float16, False),
        (1, 2048, 5632, 1.0, jnp.bfloat16, True),
        (64, 128, 65536, 1.0, jnp.bfloat16, True),
        (64, 8192, 640, 1.0, jnp.bfloat16, True),
        (1, 2048, 5632, 0.4, jnp.bfloat16, True),  # the blocks of some tiles agree, of others not
        (2, 2048, 5632, 0.3, jnp.float16, True),
        (33, 1024, 640, 0.12, jnp.bfloat16, True),
    ],
)
def test_matches_dense(m, d, h, active, dtype, gated):
    x, w_gate, w_up, w_down = draw(m, d, h, active, dtype)
    if active == 1.0:
        w_gate[:, -1] = 60  # every neuron fires
    operands = (x, w_gate, w_up, w_down) if gated else (x, None, w_gate, w_down)
    assert_matches(run(*operands), *operands)


@pytest.mark.gpu
def test_same_bits_every_time_and_none_for_a_silent_token():
    x, w_gate, w_up, w_down = draw(8, 2048, 5632, 0.01, jnp.bfloat16)
    w_gate[:, 0] = -1
    x[3] = np.arange(2048) == 0  # every gate is -1
    first = run(x, w_gate, w_up, w_down)
    for _ in range(3):
        for a, b in zip(first, run(x, w_gate, w_up, w_down), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    y, nnz, l1, _ = first
    assert not y[3].any() and nnz[3] == 0 and l1[3] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("m", "d"), [(4, 192), (33, 2048)])
def test_non_finite_where_dense_is(m, d, gated):
    x, w_gate, w_up, w_down = draw(m, d, 384, 0.05, jnp.bfloat16)
    operands = (with_non_finite_rows(x), w_gate if gated else None, w_up, w_down)
    assert_non_finite_as_in_dense(run(*operands), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [2, 8])
def test_layers_in_a_chain_wait_for_each_other(m):
    x, w_gate, w_up, w_down = draw(m, 2048, 5632, 0.005, jnp.bfloat16)
    weights = (w_gate, w_up, w_down / 32)

    def chain(x, layer):
        outs = [layer(x, *weights)[0]]
        for _ in range(3):
            outs.append(layer(outs[-1], *weights)[0])
        return outs

    together = jax.jit(functools.partial(chain, layer=hopper))(x)
    for a, b in zip(together, chain(x, run), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.gpu
def test_nan_reaches_its_token_and_no_other():
    x, w_gate, w_up, w_down = draw(4, 768, 5632, 0.005, jnp.bfloat16)
    w_gate[7] = -100 * np.eye(1, 768, 767)[0]
    w_up[7] = np.nan  # neuron 7 never fires
    x[2, 5] = np.nan
    y, nnz, l1, _ = (np.asarray(a, np.float32) for a in run(x, w_gate, w_up, w_down))
    assert np.isnan(y[2]).all() and np.isnan(l1[2]) and nnz[2] == 5632
    others = [0, 1, 3]
    assert np.isfinite(y[others]).all() and np.isfinite(l1[others]).all()
