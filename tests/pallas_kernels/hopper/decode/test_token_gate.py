"""The gate of few tokens, and the tiles whose hidden activation its kernel computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.decode.active_counts import Launch
from pallas_kernels.rectifiers import rectifier
from pallas_kernels.weights import Weights
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.hopper.decode.products import (
    EPS,
    HOPPER,
    KERNELS,
    LAYER,
    REFERENCE,
    assert_counted,
    assert_hidden_of_agreed_tiles,
    draw_tiles,
    gate_and_counts,
    inverse_rms,
    normal,
    stream_of,
    votes_by_blocks,
    votes_of,
    weight,
    wide,
)
from tests.poisoned import on_poisoned_memory


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("has_norm", "layers"), [(True, 2), (False, 2), (False, 1)])
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
@pytest.mark.parametrize(("m", "batch", "d", "h"), [(8, 1, 192, 128), (64, 61, 1024, 384)])
def test_gate(kernels, m, batch, d, h, share, has_norm, layers):
    x, scale = normal(m, d).astype(jnp.bfloat16), np.abs(normal(d)).astype(jnp.bfloat16)
    x[:, -1] = scale[-1] = 1
    w, up, down = (weight(jnp.bfloat16, layers, h, d) for _ in range(3))
    quantile = -np.quantile(normal(10000), 1 - share)
    w[..., -1] = {0.0: -90, 1.0: 90}.get(share, quantile)
    stream = stream_of(x, scale)
    norm = (stream.squares, EPS) if has_norm else None
    function = functools.partial(gate_and_counts, kernels, norm=norm, batch=batch)
    layer = np.array([layers - 1], np.int32)
    gate, counts = on_poisoned_memory(function, stream.scaled, Weights(w, up, down), layer)
    exact = wide(stream.scaled) * (inverse_rms(x) if has_norm else 1)
    values = wide(gate.values[:batch])
    assert relative_error(values, np.maximum(exact @ wide(w[-1]).T, 0)[:batch]) < ROUNDING
    assert_counted(counts, values)
    if kernels is not REFERENCE:
        assert_voted(counts, values)
        agreed = assert_hidden_of_agreed_tiles(gate, exact @ wide(up[-1]).T, batch)
        assert len(agreed) == (0 if share < 1 else h // 64)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("m", [1, 5])
def test_fewer_tokens_than_8_need_no_padding(kernels, m):
    x = normal(m, 192).astype(jnp.bfloat16)
    w, up, down = (weight(jnp.bfloat16, 1, 128, 192) for _ in range(3))
    function = functools.partial(gate_and_counts, kernels, batch=m)
    gate, counts = on_poisoned_memory(function, x, Weights(w, up, down), np.zeros(1, np.int32))
    values = wide(gate.values[:m])
    assert relative_error(values, np.maximum(wide(x) @ wide(w[0]).T, 0)) < ROUNDING
    assert_counted(counts, values)


def assert_voted(counts, gate):
    assert counts[-1, 0, Launch.FFN] == 0
    np.testing.assert_array_equal(votes_of(counts), votes_by_blocks(gate).sum(axis=1))


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["relu", "relu2", "drelu"])
@pytest.mark.parametrize(
    ("m", "batch", "agreeing"), [(8, 7, [0, 2]), (64, 61, [0, 2]), (64, 64, [0, 1, 2, 3, 4, 5])]
)
def test_tiles_whose_blocks_agree_are_multiplied(m, batch, agreeing, act):
    (x, w), d, act = draw_tiles(m, 512), 512, rectifier(act, 0.0)
    up, down = (weight(jnp.bfloat16, 2, 384, d) for _ in range(2))
    function = functools.partial(gate_and_counts, HOPPER, act=act, batch=batch)
    gate, counts = on_poisoned_memory(function, x, Weights(w, up, down), LAYER)
    agreed = assert_hidden_of_agreed_tiles(gate, wide(x) @ wide(up[1]).T, batch, act)
    assert agreed.tolist() == agreeing
    assert_voted(counts, gate.values[:batch])
    assert_counted(counts, wide(gate.values[:batch]))


@pytest.mark.parametrize("kernels", KERNELS)
def test_gate_of_what_is_not_finite(kernels):
    x = normal(8, 256).astype(jnp.bfloat16)
    x[1, 3], x[2, 5] = np.inf, np.nan
    w = weight(jnp.bfloat16, 2, 128, 256)
    function = functools.partial(gate_and_counts, kernels, batch=8)
    gate, _ = on_poisoned_memory(function, x, Weights(w, w, w), LAYER)
    with np.errstate(invalid="ignore"):
        before = wide(x) @ wide(w[1]).T
    values = wide(gate.values)
    np.testing.assert_array_equal(np.isnan(values), np.isnan(before))
    np.testing.assert_array_equal(np.isposinf(values), np.isposinf(before))
    np.testing.assert_array_equal(np.signbit(values[1]), np.isneginf(before[1]))


def test_lowers_without_a_gpu(lower):
    shape = jax.ShapeDtypeStruct
    layer, w = shape((1,), jnp.int32), shape((3, 5632, 2048), jnp.bfloat16)
    for m in (8, 64):
        gate = functools.partial(gate_and_counts, HOPPER, batch=m)
        x = shape((m, 2048), jnp.bfloat16)
        for weights in (Weights(w, w, w), Weights(None, w, w)):
            assert "token_gate" in lower(gate, x, weights, layer)
