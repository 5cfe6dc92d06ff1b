"""Products of few tokens, and the block of them, in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from pallas_kernels.hopper.common.primitives import interpreting
from pallas_kernels.hopper.decode import (
    active_counts,
    active_gates,
    token_ffn,
    token_gate,
    token_product,
    votes,
)
from pallas_kernels.hopper.decode.active_counts import Launch
from pallas_kernels.hopper.decode.few_tokens import few_tokens_ffn
from pallas_kernels.hopper.decode.gate import Gate
from pallas_kernels.hopper.decode.token_ring import Product
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.weights import Weights
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.hopper.decode import blocks
from tests.pallas_kernels.hopper.decode.products import (
    EPS,
    HOPPER,
    LAYER,
    active_for_each,
    add_ffn,
    assert_consistent,
    assert_hidden_of_agreed_tiles,
    draw_tiles,
    in_8_bits,
    inverse_rms,
    normal,
    normed,
    product,
    stream_of,
    votes_by_blocks,
    votes_of,
    weight,
    weights_of,
    wide,
    without_gate,
)


# A ring that holds all stages, and one that is filled again.
@pytest.mark.parametrize(("m", "k"), [(8, 256), pytest.param(64, 1536, marks=pytest.mark.slow)])
def test_products(interpreted, m, k):
    x, scale = normal(m, k).astype(jnp.bfloat16), normal(1, k).astype(jnp.bfloat16)
    stream, layer = stream_of(x, scale[0]), jnp.asarray(LAYER)
    weights = tuple(weight(jnp.bfloat16, 2, k, n) for n in (64, 128))
    exact, bias = normed(x, scale), normal(2, 192).astype(jnp.bfloat16)
    with interpreted():
        y = token_product.project(stream, weights, layer, k_axis=1, eps=EPS, bias=bias)
    w = np.concatenate([wide(w[1]) for w in weights], axis=1)
    assert relative_error(y, exact @ w + wide(bias[1])) < 2 * ROUNDING

    weights = tuple(weight(jnp.bfloat16, 2, 64, k) for _ in range(2))
    with interpreted():
        h = token_product.hidden(stream, weights, layer, eps=EPS, rectifier=Rectifier(both=True))
    g, up = (np.maximum(exact @ wide(w[1]).T, 0) for w in weights)
    assert relative_error(h, g * up) < 3 * ROUNDING

    residual, after = normal(m, 64).astype(jnp.bfloat16), normal(2, 64).astype(jnp.bfloat16)
    w = weight(jnp.bfloat16, 2, k, 64)
    with interpreted():
        out = token_product.add_product(stream.x, w, layer, residual, after)
    assert relative_error(out.x, wide(residual) + wide(x) @ wide(w[1])) < ROUNDING
    assert_consistent(out, after[1])


# With 128 columns in a stage, the last block of the second case has none before K ends.
@pytest.mark.slow
@pytest.mark.parametrize(("m", "k"), [(8, 512), pytest.param(64, 640, marks=pytest.mark.slow)])
def test_products_in_8_bits(interpreted, m, k):
    x, residual = normal(m, k).astype(jnp.bfloat16), normal(m, 64).astype(jnp.bfloat16)
    weights, layer = tuple(in_8_bits(2, n, k) for n in (64, 128)), jnp.asarray(LAYER)
    stream, ones = stream_of(x, np.ones(k, jnp.bfloat16)), np.ones((2, 64), jnp.bfloat16)
    with interpreted():
        y = token_product.project(stream, weights, layer, k_axis=2, eps=EPS, dtype=jnp.float32)
        out = token_product.add_product(x, weights[0], layer, residual, ones)
    exact = np.concatenate([product(x, w) for w in weights], axis=1)
    assert relative_error(y, exact * inverse_rms(x)) < 1e-5
    assert relative_error(out.x, wide(residual) + exact[:, :64]) < ROUNDING


# Blocks with many active gates have filled a part of the ring, which they empty if others are
# against it (of tiles 1, 3 and 4); those with some fill all of it afterwards (tile 2). Of two
# layers the last tile is not live: it is there. Of one the kernel makes the counts, and on 5 SMs
# the blocks behind the first cluster ask for one stage at first, as they may share an SM.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("m", "batch", "d", "layers"), [(8, 7, 256, 2), (64, 61, 1536, 1)])
def test_gate(interpreted, monkeypatch, m, batch, d, layers):
    dropped, drop = [], Product.drop

    def noted(product, slots):
        io_callback(lambda tile: dropped.append(int(tile)), None, jax.lax.axis_index("cluster"))
        drop(product, slots)

    monkeypatch.setattr(Product, "drop", noted)
    x, w = draw_tiles(m, d)
    w, live = w[-layers:], jnp.array([384, 320], jnp.int32) if layers > 1 else None
    up, down = (weight(jnp.bfloat16, layers, 384, d) for _ in range(2))
    exact = np.maximum(wide(x) @ wide(w[-1]).T, 0)
    weights, layer = Weights(w, up, down, live), jnp.full(1, layers - 1, jnp.int32)
    counts = None if live is None else jax.new_ref(active_counts.zeros(layers, m, 384))
    if live is not None:
        w[:, 320:] = np.nan
        exact[:, 320:] = 0
    with interpreted(sms=5) as current:
        gate = token_gate.gate(x, weights, layer, counts, batch=batch)
    assert relative_error(gate.values[:batch], exact[:batch]) < ROUNDING
    agreed = assert_hidden_of_agreed_tiles(gate, wide(x) @ wide(up[-1]).T, batch)
    assert agreed.tolist() == [0, 2]
    assert sorted(dropped) == [1, 1, 1, 3, 3, 4]
    tiles = 6 if live is None else 5
    entries, of_blocks = current.shared["votes"].entries, votes_by_blocks(gate.values[:batch])
    for tile, expected in enumerate(of_blocks[:tiles]):
        assert sorted(number for of, number in entries if of == tile) == sorted(expected)
    assert len(entries) == 4 * tiles
    if live is None:  # votes are not added here
        assert not votes_of(gate.counts).any() and gate.counts[0, 0, Launch.FFN] == 0
    else:
        assert votes_of(counts[...]).tolist() == [0, 0, 0, 0, 0, votes.ALL_MANY]
        for result in (gate.values[:, 320:], gate.hidden[:, 320:], gate.l1[:, 20:]):
            assert not np.asarray(result).any()


def multiply(gate, hidden, x, weights, counts, *, batch):
    """`token_ffn.multiply`; the first so many columns of its result are those of x."""
    l1 = jnp.abs(hidden).astype(jnp.float32).reshape(len(gate), -1, 16).sum(axis=2)
    gate = Gate(gate) if weights.gate is None else Gate(gate, hidden, l1)
    weights, counts = jax.tree.map(lambda w: w[1:], weights), jax.new_ref(counts[1:])
    return token_ffn.multiply(gate, x, weights, counts, batch=batch)


@pytest.mark.parametrize(("tiles", "more", "few"), [(8, 0, True), (8, 1, False), (7, 64, True)])
def test_as_many_active_gates_as_a_limit_are_few(tiles, more, few):
    counts = np.full((2, tiles), 64, np.int32)  # of the first of each four tokens
    counts[1, 0] += more
    for limits in (dict(most=10**4, most_of_a_token=512), dict(most=1024, most_of_a_token=10**4)):
        with interpreting(sms=3):
            found = active_gates.are_few(counts, tiles, None, **limits)
        assert found == few, limits


# One cluster takes tiles of neurons or of columns one after the other; with few tokens it has two
# subclusters, each of which takes two tiles of w_up at once if there are many. The last ones may be
# none. The first `there` have been multiplied by the gate's kernel, so that their w_up is not
# needed. Where blocks wait for each other is no synchronisation that the search for races knows.
@pytest.mark.parametrize(
    ("m", "batch", "gated", "d", "h", "there"),
    [
        (8, 5, True, 1024, 192, 1),
        pytest.param(8, 8, False, 192, 512, 0, marks=pytest.mark.slow),
        pytest.param(24, 17, True, 64, 320, 2, marks=pytest.mark.slow),
        pytest.param(8, 8, True, 64, 640, 4, marks=pytest.mark.slow),
        pytest.param(8, 8, False, 1024, 128, 0, marks=pytest.mark.slow),
        pytest.param(24, 16, True, 64, 128, 2, marks=pytest.mark.slow),
        pytest.param(24, 16, True, 64, 128, 0, marks=pytest.mark.slow),
        pytest.param(8, 8, True, 64, 320, 0, marks=pytest.mark.slow),
        pytest.param(24, 24, True, 64, 128, 0, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_dense_block(interpreted, m, batch, gated, d, h, there):
    adds = d % 1024 == 0  # to the stream
    x, after = normal(m, d).astype(jnp.bfloat16), normal(2, d).astype(jnp.bfloat16)
    weights, counts = weights_of(2, h, d), active_for_each(min(513, 255 * h // 64), m, h)
    votes_of(counts)[:there] = votes.ALL_MANY
    gate = np.maximum(normal(m, h), 0).astype(jnp.bfloat16)
    exact = wide(gate)
    if gated:
        exact *= (normed(x, after[0]) if adds else wide(x)) @ wide(weights.up[1]).T
    hidden = np.where(np.arange(h) < 64 * there, exact, np.nan).astype(jnp.bfloat16)
    weights.up[:, : 64 * there] = np.nan
    used = weights if gated else without_gate(weights)
    product = (exact @ wide(weights.down[1]))[:batch]
    with interpreted(sms=9 if batch <= 16 else 5, detect_races=not gated):
        assert token_ffn.Cut.of(gate, x, used, batch).dense_clusters == 1
        if adds:
            out = add_ffn(HOPPER, gate, stream_of(x, after[0]), used, counts, after, hidden,
                          batch=batch)  # fmt: skip
        else:
            y, l1 = multiply(gate, hidden, x, used, counts, batch=batch)
    if adds:
        out = Stream(*(a[:batch] for a in out))
        assert relative_error(out.x, wide(x)[:batch] + product) < 2 * ROUNDING
        assert_consistent(out, after[1])
        return
    assert relative_error(y[:, :d], product) < 2 * ROUNDING
    if gated:
        l1 = wide(l1)[:batch].sum(axis=1)
        assert relative_error(l1, np.abs(exact[:batch]).sum(axis=1)) < ROUNDING
    else:
        assert l1 is None


# Eight blocks have a token, or, with many tokens, four; the second token has no active gate.
@pytest.mark.parametrize(
    ("m", "batch", "h", "gated"),
    [
        (8, 2, 256, True),
        pytest.param(8, 2, 256, False, marks=pytest.mark.slow),
        pytest.param(24, 17, 64, True, marks=pytest.mark.slow),
    ],
)
def test_rows(interpreted, m, batch, h, gated):
    d = 1024
    x, after = normal(m, d).astype(jnp.bfloat16), normal(2, d).astype(jnp.bfloat16)
    weights, counts = weights_of(2, h, d), active_for_each(h // 8, m, h)
    gate = np.maximum(normal(m, h) - 1, 0).astype(jnp.bfloat16)
    gate[1] = 0
    used = weights if gated else without_gate(weights)
    with interpreted(sms=9 if batch <= 16 else 5):
        out = add_ffn(HOPPER, gate, stream_of(x, after[0]), used, counts, after, batch=batch)
    up = normed(x, after[0]) @ wide(weights.up[1]).T if gated else 1.0
    expected = wide(x) + (wide(gate) * up) @ wide(weights.down[1])
    out = Stream(*(a[:batch] for a in out))
    assert relative_error(out.x, expected[:batch]) < ROUNDING
    assert_consistent(out, after[1])


def assert_block(few_tokens_ffn, interpreted, m, d, h, gated):
    x, *weights = blocks.draw(m, d, h, 0.1, jnp.bfloat16)
    block = Weights(*weights) if gated else Weights(None, *weights[1:])
    with interpreted(sms=9, detect_races=False):  # it knows nothing of blocks that wait
        y, _, l1, fired = few_tokens_ffn(x, block)  # nothing counts, as atomics lack
    expected, expected_l1 = blocks.dense(x, block.gate, block.up, block.down)
    assert relative_error(y, expected) < 2 * ROUNDING
    assert relative_error(l1, expected_l1) < ROUNDING
    gate = wide(x) @ wide(block.activated).T
    assert np.all((gate > 1e-5).any(axis=0) <= fired) and np.all(
        fired <= (gate > -1e-5).any(axis=0)
    )


@pytest.mark.slow
def test_a_block_of_few_tokens(interpreted):
    assert_block(few_tokens_ffn, interpreted, 3, 128, 128, gated=True)
