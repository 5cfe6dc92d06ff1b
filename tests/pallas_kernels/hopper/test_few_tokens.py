import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import few_tokens
from pallas_kernels.hopper.device import cluster, shares
from pallas_kernels.kernels import HOPPER, REFERENCE
from pallas_kernels.layouts.weights import Weights
from tests import seeds
from tests.errors import ROUNDING, relative_error


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
        (64, 128, 65536, jnp.bfloat16),
        (64, 128, 65536, jnp.float16),
    ],
)
def test_lowers_without_a_gpu(lower, m, d, h, dtype):
    text = lower(HOPPER.few_tokens_ffn, *shapes(m, d, h, dtype))
    assert "few_tokens_gate" in text and "few_tokens_row" in text


def test_lowers_without_a_gpu_non_gated(lower):
    operands = shapes(8, 768, 5632, jnp.bfloat16, gated=False)
    assert "few_tokens_row" in lower(HOPPER.few_tokens_ffn, *operands)


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


@pytest.mark.parametrize(("m", "d"), [(3, 192), (16, 128)])
def test_gate_multiplies_like_xla(m, d):
    x, w_gate, *_ = draw(m, d, 128, 0.05, jnp.bfloat16)
    tokens = -(-m // 8) * 8

    def kernel(x, w, out):
        acc = few_tokens.multiply(x, w, jax.lax.axis_index("tile"), tokens=tokens, stages=2)
        out[jax.lax.axis_index("tile")] = acc

    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    out = jax.ShapeDtypeStruct((2, 64, tokens), jnp.float32)
    call = plgpu.kernel(
        kernel, out_type=out, grid=(2,), grid_names=("tile",), compiler_params=params
    )
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        product = np.asarray(call(x, w_gate)).reshape(128, tokens).T
    reference = np.asarray(x, np.float64) @ np.asarray(w_gate, np.float64).T
    assert relative_error(product[:m], reference) < 1e-5
    assert not np.any(product[m:])


def collect_share(gate_ref, share, entries_ref, counts_ref):
    """What `shares.collect_share` does, for the interpreter; after the share comes a NaN."""
    gate = gate_ref[...]
    is_entry = gate != 0
    rank = jnp.cumsum(is_entry) - 1
    place = jnp.where(
        is_entry & (rank % shares.SHARES == share), rank // shares.SHARES, entries_ref.size
    )
    bits = jax.lax.bitcast_convert_type(gate, jnp.uint16).astype(jnp.uint32)
    words = jnp.arange(gate.size, dtype=jnp.uint32) | bits << 16
    nan = jax.lax.bitcast_convert_type(jnp.array(jnp.nan, gate.dtype), jnp.uint16)
    unused = jnp.full(entries_ref.shape, nan, jnp.uint32) << 16
    entries_ref[...] = unused.at[place].set(words, mode="drop")
    return jnp.sum(is_entry, dtype=jnp.int32)


def exchange_parts(y_part, l1_part, block, y_parts_ref, l1_parts_ref, _, *, board, meeting):
    """What the blocks of a cluster do by `send_parts` and `wait_for_parts`, for the interpreter."""

    def exchange(y, l1, block):
        board[int(block)] = np.asarray(y).reshape(shares.SHARES, -1), np.asarray(l1)
        meeting.wait(timeout=60)  # all have sent
        y_parts = np.stack([board[sender][0][block] for sender in range(shares.SHARES)])
        l1_parts = np.stack([board[sender][1] for sender in range(shares.SHARES)])
        meeting.wait(timeout=60)  # all have received
        return y_parts, l1_parts

    shapes = [jax.ShapeDtypeStruct(ref.shape, jnp.float32) for ref in (y_parts_ref, l1_parts_ref)]
    y_parts_ref[...], l1_parts_ref[...] = io_callback(exchange, shapes, y_part, l1_part, block)


def test_interpreted(rows_in_jax, monkeypatch):
    exchange = functools.partial(exchange_parts, board={}, meeting=threading.Barrier(shares.SHARES))
    monkeypatch.setattr(shares, "collect_share", collect_share)
    monkeypatch.setattr(few_tokens, "prefetch_rows", lambda *_: None)
    monkeypatch.setattr(cluster, "expect_parts", lambda *_: None)
    monkeypatch.setattr(cluster, "send_parts", exchange)
    monkeypatch.setattr(cluster, "wait_for_parts", lambda _: None)
    monkeypatch.setattr(plgpu, "griddepcontrol_wait", lambda: None)
    monkeypatch.setattr(plgpu, "griddepcontrol_launch_dependents", lambda: None)
    x, *_ = operands = draw(2, 192, 128, 0.2, jnp.bfloat16)
    x[1] = 0  # no neuron fires for token 1
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        assert_matches(hopper(*operands), *operands)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.zeros((0, 192), jnp.bfloat16)), "M from 1 to 64"),
        (dict(x=jnp.zeros((65, 192), jnp.bfloat16)), "M from 1 to 64"),
        (dict(x=jnp.zeros((4, 384), jnp.bfloat16)), r"x must be bfloat16 \[4, 192\]"),
        (dict(x=jnp.zeros((4, 192), jnp.float32)), "x must be bfloat16"),
        (dict(w_gate=jnp.zeros((192, 384), jnp.bfloat16)), "w_gate must be"),
        (dict(w_up=jnp.zeros((384, 96), jnp.bfloat16)), "w_up must be .* a multiple of 64"),
        (dict(w_down=jnp.zeros((192, 384), jnp.bfloat16)), "w_down must be"),
    ],
)
def test_bad_operands_are_named(change, message):
    w = jnp.zeros((384, 192), jnp.bfloat16)
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
def test_layers_in_a_chain_wait_for_each_other():
    x, w_gate, w_up, w_down = draw(8, 2048, 5632, 0.005, jnp.bfloat16)
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
    w_up[7], w_down[7] = np.nan, np.inf  # neuron 7 never fires
    x[2, 5] = np.nan
    y, nnz, l1, _ = (np.asarray(a, np.float32) for a in run(x, w_gate, w_up, w_down))
    assert np.isnan(y[2]).all() and np.isnan(l1[2]) and nnz[2] == 5632
    others = [0, 1, 3]
    assert np.isfinite(y[others]).all() and np.isfinite(l1[others]).all()
