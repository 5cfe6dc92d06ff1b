"""Products of few tokens, and the block of them, in Pallas' interpreter."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import register_rows
from pallas_kernels.hopper.decode import (
    active_counts,
    active_gates,
    cluster,
    grid,
    token_call,
    token_columns,
    token_ffn,
    token_gate,
    token_product,
    token_ring,
    token_rows,
    words,
)
from pallas_kernels.hopper.decode import shares as device_shares
from pallas_kernels.hopper.decode import votes as device_votes
from pallas_kernels.hopper.decode.active_counts import Launch
from pallas_kernels.kernels import HOPPER
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.weights import Weights
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.hopper import tokens_in_jax
from tests.pallas_kernels.hopper.test_token_product import (
    EPS,
    LAYER,
    add_ffn,
    assert_consistent,
    normal,
    normed,
    stream_of,
    weight,
    wide,
)
from tests.pallas_kernels.hopper.test_token_product_8_bits import in_8_bits, inverse_rms, product


@pytest.fixture
def interpreted(monkeypatch, capsys):
    """`with interpreted():` runs products on the CPU and looks for races; pure JAX does what lanes
    do."""
    for module, functions in tokens_in_jax.replacements():
        for name, function in functions.items():
            monkeypatch.setattr(module, name, function)

    def interpret(detect_races=True):
        params = plgpu.InterpretGPUParams(detect_races=detect_races)
        return plgpu.force_gpu_interpret_mode(params)

    yield interpret
    assert "RACE" not in capsys.readouterr().out


# A ring that holds all stages, and one that is filled again.
@pytest.mark.parametrize(("m", "k"), [(8, 256), (64, 1536)])
def test_interpreted(interpreted, m, k):
    x, scale = normal(m, k).astype(jnp.bfloat16), normal(1, k).astype(jnp.bfloat16)
    stream, layer = stream_of(x, scale[0]), jnp.asarray(LAYER)
    weights = tuple(weight(jnp.bfloat16, 2, k, n) for n in (64, 128))
    exact = normed(x, scale)
    with interpreted():
        y = HOPPER.project(stream, weights, layer, k_axis=1, eps=EPS)
    w = np.concatenate(wide(*(w[1] for w in weights)), axis=1)
    assert relative_error(y, exact @ w) < 2 * ROUNDING

    weights = tuple(weight(jnp.bfloat16, 2, 64, k) for _ in range(2))
    with interpreted():
        h = token_product.hidden(stream, weights, layer, eps=EPS, rectifier=None)
    g, up = (exact @ wide(w[1])[0].T for w in weights)
    assert relative_error(h, g / (1 + np.exp(-g)) * up) < 3 * ROUNDING

    residual, after = normal(m, 64).astype(jnp.bfloat16), normal(2, 64).astype(jnp.bfloat16)
    w = weight(jnp.bfloat16, 2, k, 64)
    with interpreted():
        out = HOPPER.add_product(stream.x, w, layer, residual, after)
    assert relative_error(out.x, wide(residual)[0] + wide(x)[0] @ wide(w[1])[0]) < ROUNDING
    assert_consistent(out, after[1])


# With 128 columns in a stage, the last block of the second case has none before K ends.
@pytest.mark.parametrize(("m", "k"), [(8, 512), (64, 640)])
def test_8_bits_interpreted(interpreted, m, k):
    x, residual = normal(m, k).astype(jnp.bfloat16), normal(m, 64).astype(jnp.bfloat16)
    weights, layer = tuple(in_8_bits(2, n, k) for n in (64, 128)), jnp.asarray(LAYER)
    stream, ones = stream_of(x, np.ones(k, jnp.bfloat16)), np.ones((2, 64), jnp.bfloat16)
    with interpreted():
        y = HOPPER.project(stream, weights, layer, k_axis=2, eps=EPS, dtype=jnp.float32)
        out = HOPPER.add_product(x, weights[0], layer, residual, ones)
    exact = np.concatenate([product(x, w) for w in weights], axis=1)
    assert relative_error(y, exact * inverse_rms(x)) < 1e-5
    assert relative_error(out.x, wide(residual)[0] + exact[:, :64]) < ROUNDING


@pytest.fixture
def votes(monkeypatch):
    """What blocks vote, by tile; a list in a dictionary."""
    found = {}

    def vote(ref, number):
        def note(tile):
            found.setdefault(int(tile), []).append(number)

        io_callback(note, None, jax.lax.axis_index("cluster"))

    def count(values, tokens, ref):
        opens = jnp.sum(values.reshape(-1, 16)[:tokens] != 0, axis=1, dtype=jnp.int32)
        return jnp.max(opens)

    def store(ref, votes):
        ref[...] = jnp.zeros(ref.shape, jnp.int32).at[0].set(votes)

    for name, function in {
        "store": store,
        "count": count,
        "has": lambda most, number: most >= number,
    }.items():
        monkeypatch.setattr(active_gates, name, function)
    monkeypatch.setattr(device_votes, "vote", vote)
    monkeypatch.setattr(cluster, "fence", lambda: None)
    for module in (token_columns, register_rows):
        monkeypatch.setattr(module, "prefetch_rows", lambda *_: None)
    return found


# Blocks with many open gates have filled a part of the ring, which they empty if others are against
# it; those with some fill all of it afterwards. A third tile, if there is one, is not live: it is
# there. If there is none, the kernel makes the counts, of one layer, and the blocks of the second
# tile ask for one stage at first, as if they found others on their SM.
@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize(("m", "d", "h"), [(8, 256, 192), (64, 1536, 128)])
def test_gate_interpreted(interpreted, votes, monkeypatch, m, d, h, many, agree):
    dropped, drop = [], token_ring.Product.drop

    def noted(product, slots):
        io_callback(lambda tile: dropped.append(int(tile)), None, jax.lax.axis_index("cluster"))
        drop(product, slots)

    monkeypatch.setattr(token_ring.Product, "drop", noted)
    monkeypatch.setattr(device_votes, "MANY", device_votes.MANY if many else 17)
    monkeypatch.setattr(device_votes, "do_agree", lambda _: jnp.bool_(agree))
    monkeypatch.setattr(token_columns, "zeros", lambda count: jnp.zeros(16 * count))
    monkeypatch.setattr(token_call, "clusters_at_once", lambda _: 1)
    live = jnp.array([h, 128], jnp.int32) if h > 128 else None
    # Whole tiles are live or not.
    monkeypatch.setattr(token_gate, "only_live", lambda *_: lambda values: values)
    x = normal(m, d).astype(jnp.bfloat16)
    layers, layer = (1, np.zeros(1, np.int32)) if live is None else (2, LAYER)
    weights = Weights(*(weight(jnp.bfloat16, layers, h, d) for _ in range(3)), live)
    x[:, -1] = 1
    weights.gate[:, :64, -1] = -90  # the first tile's gates are all shut
    counts = None if live is None else jax.new_ref(active_counts.zeros(layers, m, h))
    with interpreted():
        gate = token_gate.gate(x, weights, jnp.asarray(layer), counts, batch=m)
    if counts is None:  # votes and additions are replaced here
        of_tiles = gate.counts[0, :, active_counts.column(0) :]
        assert not np.asarray(of_tiles).any() and gate.counts[0, 0, Launch.FFN] == 0
    else:
        voted = np.asarray(counts[...])[1, 0, active_counts.column(0) :]
        assert voted.tolist() == [0, 0, device_votes.ALL_MANY]
    for_it = device_votes.HAS_MANY if many else device_votes.HAS_SOME
    expected = [device_votes.AGAINST, for_it]
    assert dropped == (4 * [1] if many and not agree else [])
    assert votes == {tile: 4 * [vote] for tile, vote in enumerate(expected)}
    exact = np.maximum(wide(x)[0] @ wide(weights.gate[-1])[0].T, 0)[:, :128]
    assert relative_error(gate.values[:, :128], exact) < ROUNDING
    for result in (gate.values[:, 128:], gate.hidden[:, 128:], gate.l1[:, 8:]):
        assert not np.asarray(result).any()
    if agree:
        exact = (exact * (wide(x)[0] @ wide(weights.up[-1])[0].T)[:, :128])[:, 64:]
        assert relative_error(gate.hidden[:, 64:128], exact) < 2 * ROUNDING
        l1 = np.abs(exact).reshape(m, 4, 16).sum(axis=2)
        assert relative_error(gate.l1[:, 4:8], l1) < ROUNDING


def count_gates(monkeypatch, *, few, there=0):
    """The numbers of open gates say that they are few, or not, and votes how many tiles, from the
    first one on, are there."""

    class Missing:
        def __init__(self, _, tiles):
            self.total, self.tiles = jnp.int32(tiles - there), tiles

        def tile(self, rank):
            return jnp.where(rank < self.total, there + rank, self.tiles)

    monkeypatch.setattr(device_votes.Missing, "of", Missing)
    for module in (words, active_gates):
        monkeypatch.setattr(module, "load", lambda _: 0)
    monkeypatch.setattr(active_gates, "are_few", lambda *_, **__: jnp.bool_(few))
    monkeypatch.setattr(token_ring, "most_waiting", lambda *_: 1)
    for name in ("arrive", "wait"):
        monkeypatch.setattr(grid, name, lambda *_: None)


# One cluster takes tiles of neurons or of columns one after the other; with few tokens it has two
# quartets, each of which takes two tiles of w_up at once. The last ones may be none. The first
# `there` have been multiplied by the gate's kernel, so that their w_up is not needed. `meet` is no
# synchronisation that the search for races knows.
@pytest.mark.parametrize(
    ("m", "gated", "d", "h", "there"),
    [
        (8, False, 192, 512, 0), (24, True, 64, 320, 2), (8, True, 64, 640, 4),
        pytest.param(8, True, 64, 128, 2, marks=pytest.mark.slow),
        pytest.param(8, True, 64, 128, 0, marks=pytest.mark.slow),
        pytest.param(8, True, 64, 320, 0, marks=pytest.mark.slow),
        pytest.param(24, True, 64, 128, 0, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_dense_block_interpreted(interpreted, monkeypatch, m, gated, d, h, there):
    meeting = threading.Barrier(8 if m <= 16 else 4)

    def meet(arrived):
        meeting.wait(timeout=60)
        return np.int32(arrived)

    def wait(arrivals, count):
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        arrivals[...] = io_callback(meet, shape, arrivals[...])  # keeps its place in the program

    count_gates(monkeypatch, few=False, there=there)
    monkeypatch.setattr(grid, "wait", wait)
    monkeypatch.setattr(token_rows, "load_x", lambda *_, **__: jnp.int32(0))
    monkeypatch.setattr(device_shares, "find", lambda *_: None)
    monkeypatch.setattr(token_rows.Share, "of", lambda rank, *_: token_rows.Share(rank, 8, d // 8))
    monkeypatch.setattr(token_rows, "sum_rows", lambda *_: (jnp.zeros(d // 8), jnp.float32(0)))
    monkeypatch.setattr(token_rows, "load_now", lambda ref: ref[...].astype(jnp.float32))
    monkeypatch.setattr(token_columns, "store_total", lambda *_: None)

    x, after = normal(m, d).astype(jnp.bfloat16), normal(2, d).astype(jnp.bfloat16)
    weights = Weights(*(weight(jnp.bfloat16, 2, h, d) for _ in range(3)))
    gate = np.maximum(normal(m, h), 0).astype(jnp.bfloat16)
    stream, counts = stream_of(x, after[0]), active_counts.zeros(2, m, h)
    exact = wide(gate)[0]
    if gated:
        exact *= normed(x, after[0]) @ wide(weights.up[1])[0].T
    hidden = np.where(np.arange(h) < 64 * there, exact, np.nan).astype(jnp.bfloat16)
    weights.up[:, : 64 * there] = np.nan
    used = weights if gated else Weights(None, weights.up, weights.down)
    with interpreted(detect_races=not gated):
        out = add_ffn(HOPPER, gate, stream, used, counts, after, hidden, batch=m)
    expected = wide(x)[0] + exact @ wide(weights.down[1])[0]
    assert relative_error(out.x, expected) < 2 * ROUNDING
    assert_consistent(out, after[1])


@pytest.fixture
def rows_of_tokens(rows_in_jax, monkeypatch):
    """What the blocks of a cluster do with a token's open gates and rows, in JAX."""
    board, meetings, lock = {}, {}, threading.Lock()

    def find(gate_ref, active, _):
        bits = jax.lax.bitcast_convert_type(gate_ref[...], jnp.uint16)
        total = jnp.where(active, jnp.sum(bits != 0, dtype=jnp.int32), 0)
        return device_shares.Found([], [], total)

    def list_share(_, gate_ref, share, shares, entries_ref):
        bits = jax.lax.bitcast_convert_type(gate_ref[...], jnp.uint16).astype(jnp.uint32)
        rank = jnp.cumsum(bits != 0) - 1
        is_mine = (bits != 0) & (rank % shares == share)
        words = jnp.arange(bits.size, dtype=jnp.uint32) | bits << 16
        places = jnp.where(is_mine, rank // shares, entries_ref.shape[0])
        entries = jnp.full(entries_ref.shape, 0xFFFFFFFF, jnp.uint32)  # whatever lies past the list
        entries_ref[...] = entries.at[places].set(words, mode="drop")

    def send_parts(y, l1, block, y_parts_ref, l1_parts_ref, _):
        blocks, width = y_parts_ref.shape

        def exchange(tile, block, y, l1):
            tile, block = int(tile), int(block)
            with lock:
                meeting = meetings.setdefault(tile, threading.Barrier(blocks))
            board[tile, block] = np.asarray(y), np.asarray(l1)
            meeting.wait(timeout=60)  # all have sent
            rows, sums = zip(*(board[tile, sender] for sender in range(blocks)), strict=True)
            meeting.wait(timeout=60)  # all have received
            return np.stack(rows)[:, block * width : (block + 1) * width], np.stack(sums)

        shapes = [
            jax.ShapeDtypeStruct(ref.shape, jnp.float32) for ref in (y_parts_ref, l1_parts_ref)
        ]
        tile = jax.lax.axis_index("tile")
        y_parts_ref[...], l1_parts_ref[...] = io_callback(exchange, shapes, tile, block, y, l1)

    def store_total(sums_ref, share, shares, total):
        size = sums_ref.shape[0] // shares
        sums_ref[pl.ds(share * size, size)] = jnp.where(jnp.arange(size) == 0, total, 0.0)

    def inverse_rms_of_one(squares_ref, columns, eps):
        return jax.lax.rsqrt(jnp.sum(squares_ref[...]) / columns + eps)

    def load(ref):
        return ref[...].astype(jnp.float32)

    for module, replaced in (
        (device_shares, {"find": find, "list_share": list_share}),
        (cluster, {"send_parts": send_parts}),
        (token_columns, {"store_total": store_total, "inverse_rms_of_one": inverse_rms_of_one}),
        (token_rows, {"wide": load, "load_now": load}),
    ):
        for name, function in replaced.items():
            monkeypatch.setattr(module, name, function)


# Eight blocks have a token, or, with many tokens, four; the second token has no open gate.
@pytest.mark.parametrize(
    ("few", "gated"),
    [(16, True), pytest.param(16, False, marks=pytest.mark.slow), (0, True)],
)
def test_rows_interpreted(interpreted, rows_of_tokens, monkeypatch, few, gated):
    m, batch, d, h = 8, 2, 1024, 256
    count_gates(monkeypatch, few=True)
    monkeypatch.setattr(token_ffn, "_FEW", few)
    x, after = normal(m, d).astype(jnp.bfloat16), normal(2, d).astype(jnp.bfloat16)
    weights = Weights(*(weight(jnp.bfloat16, 2, h, d) for _ in range(3)))
    gate = np.maximum(normal(m, h) - 1, 0).astype(jnp.bfloat16)
    gate[1] = 0
    stream, counts = stream_of(x, after[0]), active_counts.zeros(2, m, h)
    used = weights if gated else Weights(None, weights.up, weights.down)
    with interpreted():
        out = add_ffn(HOPPER, gate, stream, used, counts, after, batch=batch)
    up = normed(x, after[0]) @ wide(weights.up[1])[0].T if gated else 1.0
    expected = wide(x)[0] + (wide(gate)[0] * up) @ wide(weights.down[1])[0]
    out = Stream(*(a[:batch] for a in out))
    assert relative_error(out.x, expected[:batch]) < ROUNDING
    assert_consistent(out, after[1])
