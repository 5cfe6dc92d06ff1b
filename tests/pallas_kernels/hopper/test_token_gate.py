"""The gate of few tokens, and the tiles whose hidden activation its kernel computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.decode import active_counts, votes
from pallas_kernels.hopper.decode.active_counts import Launch
from pallas_kernels.kernels import HOPPER, REFERENCE
from pallas_kernels.rectifiers import RELU, rectifier
from pallas_kernels.weights import Weights
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.hopper.test_token_product import (
    EPS,
    KERNELS,
    LAYER,
    folder,
    normal,
    run,
    stream_of,
    weight,
    wide,
)


def gate_and_counts(kernels, x, weights, layer, norm=None, act=RELU, *, batch):
    """The gate, and counts of open gates, which are new if there is one layer."""
    layers, h, _ = weights.down.shape
    counts = None if layers == 1 else jax.new_ref(active_counts.zeros(layers, len(x), h))
    gate = folder(kernels).token_gate.gate(x, weights, layer, counts, act, batch=batch, norm=norm)
    return gate, gate.counts if counts is None else counts[...]


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
    gate, counts = run(function, stream.scaled, Weights(w, up, down), layer)
    exact = wide(stream.scaled)[0]
    if has_norm:
        exact /= np.sqrt(np.mean(wide(x)[0] ** 2, axis=1, keepdims=True) + EPS)
    (values,) = wide(gate.values[:batch])
    assert relative_error(values, np.maximum(exact @ wide(w[-1])[0].T, 0)[:batch]) < ROUNDING
    assert_counted(counts, values)
    if kernels is not REFERENCE:
        agreed = assert_hidden_of_agreed_tiles(gate, counts, exact @ wide(up[-1])[0].T, batch)
        assert agreed == (0 if share < 1 else h // 64)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("m", [1, 5])
def test_fewer_tokens_than_8_need_no_padding(kernels, m):
    x = normal(m, 192).astype(jnp.bfloat16)
    w, up, down = (weight(jnp.bfloat16, 1, 128, 192) for _ in range(3))
    function = functools.partial(gate_and_counts, kernels, batch=m)
    gate, counts = run(function, x, Weights(w, up, down), np.zeros(1, np.int32))
    (values,) = wide(gate.values[:m])
    assert relative_error(values, np.maximum(wide(x)[0] @ wide(w[0])[0].T, 0)) < ROUNDING
    assert_counted(counts, values)


def assert_counted(counts, gate):
    """The last layer's counts are the open gates of the tokens that are no padding."""
    of_tokens, batch = active_counts.of_tokens(counts)[-1], len(gate)
    np.testing.assert_array_equal(of_tokens[:batch], np.count_nonzero(gate, axis=1))
    assert not of_tokens[batch:].any() and not counts[:-1].any()


def assert_hidden_of_agreed_tiles(gate, counts, up, batch):
    """Where each of a tile's four blocks has a token with some open gates, and two have one with
    many, the hidden activation and its sum of magnitudes are there. Returns their number."""
    values, hidden = wide(gate.values[:batch], gate.hidden[:batch])
    opens = (values != 0).reshape(batch, -1, 4, 16).sum(axis=3).max(axis=0)
    agree = (opens >= votes.SOME).all(axis=1) & ((opens >= votes.MANY).sum(axis=1) >= 2)
    assert counts[-1, 0, Launch.FFN] == 0
    voted = counts[-1, 0, active_counts.column(0) :]
    of_blocks = np.where(opens < votes.MANY, votes.HAS_SOME, votes.HAS_MANY)
    of_blocks = np.where(opens < votes.SOME, votes.AGAINST, of_blocks)
    np.testing.assert_array_equal(voted, of_blocks.sum(axis=1))
    columns = np.repeat(agree, 64)
    if agree.any():
        exact = (values * up[:batch])[:, columns]
        assert relative_error(hidden[:, columns], exact) < 2 * ROUNDING
        l1 = wide(gate.l1[:batch])[0][:, np.repeat(agree, 4)]
        assert relative_error(l1, np.abs(exact).reshape(batch, -1, 16).sum(axis=2)) < ROUNDING
    return agree.sum()


def draw_tiles(m, d):
    """A token opens all of a tile's gates, none of one block, just enough, too few of one block,
    many in one block alone; then none. Another one opens all, but is padding if there is any."""
    x, w = normal(m, d), np.array(normal(2, 384, d)) / d**0.5
    x[:, -3:] = 1, 0, 0
    x[5, -2] = x[-1, -1] = 1
    opens = np.zeros((6, 4, 16), bool)
    opens[0] = True
    opens[1, [0, 1, 3]] = True
    opens[2:5, :, 3 : 3 + votes.SOME] = True
    opens[2:4, [0, 3], : votes.MANY] = True
    opens[3, 2, 3] = False
    opens[4, 1, : votes.MANY] = True
    w[..., -3] = -90
    w[..., -2] = 180 * opens.reshape(-1)
    w[..., -1] = 180
    return x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["relu", "relu2", "drelu"])
@pytest.mark.parametrize(("m", "batch", "agreeing"), [(8, 7, 2), (64, 61, 2), (64, 64, 6)])
def test_tiles_whose_blocks_agree_are_multiplied(m, batch, agreeing, act):
    (x, w), d = draw_tiles(m, 512), 512
    up, down = (weight(jnp.bfloat16, 2, 384, d) for _ in range(2))
    function = functools.partial(gate_and_counts, HOPPER, act=rectifier(act, 0.0), batch=batch)
    gate, counts = run(function, x, Weights(w, up, down), LAYER)
    exact = wide(x)[0] @ wide(up[1])[0].T
    exact = np.maximum(exact, 0) if act == "drelu" else exact
    assert assert_hidden_of_agreed_tiles(gate, counts, exact, batch) == agreeing
    assert_counted(counts, wide(gate.values[:batch])[0])


@pytest.mark.parametrize("kernels", KERNELS)
def test_gate_of_what_is_not_finite(kernels):
    x = normal(8, 256).astype(jnp.bfloat16)
    x[1, 3], x[2, 5] = np.inf, np.nan
    w = weight(jnp.bfloat16, 2, 128, 256)
    function = functools.partial(gate_and_counts, kernels, batch=8)
    gate, _ = run(function, x, Weights(w, w, w), LAYER)
    with np.errstate(invalid="ignore"):
        before = wide(x)[0] @ wide(w[1])[0].T
    (values,) = wide(gate.values)
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
