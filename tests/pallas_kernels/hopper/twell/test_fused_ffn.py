import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.twell import fused_ffn as fused
from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts import twell
from pallas_kernels.quantised import Tokens, rounded
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels import eight_bits
from tests.pallas_kernels.eight_bits import in_float64
from tests.poisoned import on_poisoned_memory

pack = jax.jit(twell.pack)
reference = jax.jit(REFERENCE.fused_ffn)
CAPACITY = twell.TILE // twell.COMPRESSION - 1


def draw(m, d, h, nnz, dtype):
    """x, gate, w_up and w_down, of NumPy, with about `nnz` entries in a row of the gate."""
    rng = seeds.rng()
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    gate = np.abs(normal((m, h))) * (rng.random((m, h)) < nnz / h)
    gate[0, 0] = 1  # not all zero
    x, w_up, w_down = normal((m, d)), normal((h, d)) / d**0.5, normal((h, d))
    return [a.astype(dtype) for a in (x, gate, w_up, w_down)]


def in_8_bits(x, w_up):
    """`Tokens` and a w_up in 8 bits, on the host."""
    with jax.default_device(jax.devices("cpu")[0]):  # quotients of XLA's are not exact on GPUs
        x_8_bits, w_up = (jax.device_get(rounded(jnp.asarray(a))) for a in (x, w_up))
    return Tokens(None, x_8_bits), w_up


def dense(x, gate, w_up, w_down):
    """(y, nnz, l1) of the dense block, float64 on the host, and l1 of the sums' magnitudes."""
    x = x.rounded if isinstance(x, Tokens) else x
    x, g, w_up, w_down = (in_float64(a) for a in (x, gate, w_up, w_down))
    h, magnitudes = g * (x @ w_up.T), np.abs(g) * (np.abs(x) @ np.abs(w_up).T)
    return h @ w_down, np.sum(g != 0, axis=1), np.sum(np.abs(h), axis=1), np.sum(magnitudes, axis=1)


def assert_matches(out, x, gate, w_up, w_down):
    y, nnz, l1, magnitudes = dense(x, gate, w_up, w_down)
    assert out[0].dtype == w_down.dtype
    assert relative_error(out[0], y) < ROUNDING  # of y, and float32's in between
    np.testing.assert_array_equal(out[1], nnz)
    # The sums behind h are float32's; where they cancel, h is far smaller than what was added.
    assert np.all(np.abs(np.asarray(out[2], np.float64) - l1) <= 16 * 2.0**-24 * magnitudes)


def assert_lists(heavy, rows, x):
    """`heavy` lists `rows` (given in ascending order) in any order, with their rows of x."""
    assert int(heavy.count[0]) == len(rows)
    listed = np.asarray(heavy.rows)[: len(rows)]
    np.testing.assert_array_equal(np.sort(listed), rows)
    for x_rows, part in zip(*map(jax.tree.leaves, (heavy.x, x)), strict=True):
        bits = (np.ascontiguousarray(a).view(np.uint8) for a in (x_rows[: len(rows)], part[listed]))
        np.testing.assert_array_equal(*bits)


def shapes(m, d, h, dtype, gated=True):
    x, w = jax.ShapeDtypeStruct((m, d), dtype), jax.ShapeDtypeStruct((h, d), dtype)
    packed = jax.ShapeDtypeStruct(twell.packed_shape(m, h), jnp.uint32)
    return x, packed, w if gated else None, w


@pytest.mark.parametrize(
    ("m", "d", "h", "dtype"),
    [
        (1, 128, 128, jnp.bfloat16),
        (7, 192, 384, jnp.float16),
        (1000, 2048, 5632, jnp.bfloat16),
        (65, 8192, 65536, jnp.bfloat16),
        (65, 8192, 65536, jnp.float16),
    ],
)
def test_lowers_without_a_gpu(lower, m, d, h, dtype):
    assert "mosaic_gpu" in lower(fused.fused_ffn, *shapes(m, d, h, dtype))


def test_lowers_without_a_gpu_non_gated(lower):
    operands = shapes(65, 768, 5632, jnp.bfloat16, gated=False)
    assert "mosaic_gpu" in lower(fused.fused_ffn, *operands)


def test_8_bits_lower_without_a_gpu(lower):
    _, packed, _, w_down = shapes(65, 2048, 5632, jnp.bfloat16)
    x, w_up = (eight_bits.shapes(rows, 2048) for rows in (65, 5632))
    assert "cvt.rn.f16x2.e4m3x2" in lower(fused.fused_ffn, Tokens(None, x), packed, w_up, w_down)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_reference_matches_dense(dtype):
    x, gate, w_up, w_down = draw(8, 192, 384, 9, dtype)
    for x_up, up in ((x, w_up), in_8_bits(x, w_up)):
        assert_matches(reference(x_up, pack(gate), up, w_down), x_up, gate, up, w_down)


def test_reference_lists_heavy_rows_and_skips_weights_without_entry():
    x, gate, w_up, w_down = draw(8, 192, 384, 9, jnp.bfloat16)
    gate[1, 256 : 256 + CAPACITY + 1] = 1
    gate[:, 5], w_up[5], w_down[5] = 0, np.nan, np.inf
    y, nnz, l1, heavy = jax.device_get(reference(x, pack(gate), w_up, w_down))
    np.testing.assert_array_equal(nnz, np.sum(gate != 0, axis=1))
    assert_lists(heavy, [1], x)
    assert not y[1].any() and l1[1] == 0
    assert np.isfinite(y).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("d", "form"), [(192, "gated"), (256, "8 bits"), (192, "plain")])
def test_interpreted(interpreted, d, form):
    gated = form != "plain"
    x, gate, w_up, w_down = draw(8, d, 384, 7, jnp.bfloat16)
    gate[2], gate[3, 256 : 256 + CAPACITY + 1] = 0, 1
    x[5, 17], x[3, 190] = np.inf, np.nan
    if form == "8 bits":
        x, w_up = in_8_bits(x, w_up)
    if not gated:
        w_up = None
    packed = pack(gate)
    with interpreted():
        out = jax.device_get(jax.jit(fused.fused_ffn)(x, packed, w_up, w_down))
    ref = jax.device_get(reference(x, packed, w_up, w_down))
    is_nan = gated & (np.arange(8) == 5)
    for i, bound in ((0, 4e-3), (2, 1e-5)):
        assert relative_error(out[i][~is_nan], ref[i][~is_nan]) < bound
        assert np.isnan(out[i][is_nan]).all() and np.isnan(ref[i][is_nan]).all()
    np.testing.assert_array_equal(out[1], ref[1])
    assert_lists(out[3], [3], x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(w_down=np.zeros((384, 192), jnp.float32)), "w_down must be a bfloat16"),
        (dict(w_down=np.zeros((300, 192), jnp.bfloat16)), "H a multiple of 128"),
        (dict(w_down=np.zeros((384, 200), jnp.bfloat16)), "D a multiple of 64"),
        (dict(w_up=np.zeros((192, 384), jnp.bfloat16)), r"w_up must be bfloat16 \[384, 192\]"),
        (dict(x=np.zeros((5, 192), jnp.bfloat16)), r"x must be bfloat16 \[4, 192\]"),
        (dict(x=np.zeros((4, 192), jnp.float16)), "x must be bfloat16"),
        (dict(packed=np.zeros((4, 3, 32), jnp.uint32)), r"packed must be uint32 \[4, 2, 32\]"),
        (
            dict(packed=np.zeros((0, 2, 32), jnp.uint32), x=np.zeros((0, 192), jnp.bfloat16)),
            "row",
        ),
    ],
)
def test_bad_operands_are_named(change, message):
    w = np.zeros((384, 192), jnp.bfloat16)
    good = dict(x=w[:4], packed=np.zeros((4, 2, 32), jnp.uint32), w_up=w, w_down=w)
    with pytest.raises(ValueError, match=message):
        fused.fused_ffn(**good | change)


run = functools.partial(on_poisoned_memory, fused.fused_ffn)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "d", "h", "nnz"),
    [
        (1, 128, 128, 3),
        (7, 192, 384, 9),
        (65, 512, 5632, 29),
        (1000, 768, 5632, 60),
        (1000, 1024, 128, 5),
        (1000, 2048, 5632, 29),
        (65, 256, 65536, 60),
        (65, 4096, 5632, 60),
        (7, 8192, 5632, 29),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_matches_dense(m, d, h, nnz, dtype):
    x, gate, w_up, w_down = draw(m, d, h, nnz, dtype)
    packed = pack(gate)
    assert not np.any(twell.overflowed(packed))
    assert_matches(run(x, packed, w_up, w_down), x, gate, w_up, w_down)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "d", "h", "nnz"), [(1, 128, 128, 3), (65, 384, 5632, 29), (7, 8192, 384, 9)]
)
def test_8_bits_match_dense(m, d, h, nnz):
    x, gate, w_up, w_down = draw(m, d, h, nnz, jnp.bfloat16)
    heavy = np.arange(m) % 3 == 1
    gate[heavy] = 1
    x, w_up = in_8_bits(x, w_up)
    *out, listed = run(x, pack(gate), w_up, w_down)
    assert_lists(listed, np.flatnonzero(heavy), x)
    assert not np.asarray(out[0], np.float32)[heavy].any()
    exact = Tokens(None, jax.tree.map(lambda a: a[~heavy], x.rounded))
    assert_matches([a[~heavy] for a in out], exact, gate[~heavy], w_up, w_down)


@pytest.mark.gpu
def test_non_gated_matches_dense():
    x, gate, _, w_down = draw(65, 2048, 5632, 29, jnp.bfloat16)
    y, nnz, l1, _ = run(x, pack(gate), None, w_down)
    expected = np.asarray(gate, np.float64) @ np.asarray(w_down, np.float64)
    assert relative_error(y, expected) < ROUNDING
    np.testing.assert_array_equal(nnz, np.sum(np.asarray(gate) != 0, axis=1))
    assert relative_error(l1, np.sum(np.asarray(gate, np.float64), axis=1)) < 1e-5


@pytest.mark.gpu
def test_rows_at_and_past_the_limits_and_not_finite():
    x, gate, w_up, w_down = draw(13, 2048, 5632, 29, jnp.bfloat16)
    full, heavy, empty, inf, nan, longest, long, dense_row = 1, 5, 6, 7, 8, 9, 10, 12
    x[inf, 2047], x[nan, 0] = -np.inf, np.nan
    column = np.arange(5632)
    gate[full] = (column % 256 < CAPACITY) & (column < 4 * 256)
    gate[longest] = column % 44 == 0
    gate[long] = (column % 44 == 1) | (column == 0)
    gate[heavy] = column >= 5632 - CAPACITY - 1
    gate[empty], gate[dense_row] = 0, 1
    packed = pack(gate)
    packed = packed.at[empty, :, 1:].set(0xFFFFFFFF)  # words past the count are unspecified
    y, nnz, l1, listed = run(x, packed, w_up, w_down)
    np.testing.assert_array_equal(nnz, np.sum(np.asarray(gate) != 0, axis=1))
    assert nnz[longest] == twell.MAX_ROW_ENTRIES and nnz[long] == twell.MAX_ROW_ENTRIES + 1
    assert_lists(listed, [heavy, long, dense_row], x)
    zero, poisoned = [heavy, long, dense_row, empty], [inf, nan]
    assert not np.asarray(y)[zero].any() and not np.asarray(l1)[zero].any()
    assert np.isnan(y[poisoned,]).all() and np.isnan(l1[poisoned,]).all()
    kept = ~np.isin(np.arange(13), zero + poisoned)
    assert_matches((y[kept], nnz[kept], l1[kept]), x[kept], gate[kept], w_up, w_down)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 6, 65, 1000])
def test_each_call_makes_its_own_list(m):
    """Its counters are a constant that all calls share: each leaves them at 0."""
    x, gate, w_up, w_down = draw(m, 256, 512, 5, jnp.bfloat16)
    gates = [gate.copy() for _ in range(3)]
    gates[1][::3], gates[2][:] = 1, 1
    packed = jnp.stack([pack(g) for g in gates] * 7)

    @jax.jit
    def run_all(x, packed, w_up, w_down):
        return jax.lax.map(lambda p: fused.fused_ffn(x, p, w_up, w_down)[3], packed)

    heavy = jax.device_get(run_all(x, packed, w_up, w_down))
    for i in range(len(packed)):
        rows = np.flatnonzero(np.sum(gates[i % 3] != 0, axis=1) > twell.MAX_ROW_ENTRIES)
        assert_lists(jax.tree.map(lambda a, i=i: a[i], heavy), rows, x)


@pytest.mark.gpu
def test_nan_and_inf_reach_their_rows_and_no_others():
    x, gate, w_up, w_down = draw(4, 768, 5632, 29, jnp.bfloat16)
    gate[:, :4] = 0
    gate[0, 0], gate[1, 1], gate[2, 2] = np.nan, np.inf, 1
    w_up[2] = np.inf
    w_up[3], w_down[3] = np.nan, np.inf  # no row has neuron 3
    out = run(x, pack(gate), w_up, w_down)
    y, _, l1 = (np.asarray(a, np.float32) for a in out[:3])
    assert np.isnan(y[0]).all() and np.isnan(l1[0])
    assert not np.isfinite(y[1]).any() and np.isposinf(l1[1])
    assert not np.isfinite(y[2]).any() and not np.isfinite(l1[2])
    assert np.isfinite(y[3]).all() and np.isfinite(l1[3])
