"""Two decoding kernels in one launch."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.common.primitives import interpreting
from pallas_kernels.hopper.decode import (
    active_counts,
    decode_attention,
    launch,
    token_gate,
    token_pairs,
    token_product,
)
from pallas_kernels.hopper.decode.active_counts import Launch
from pallas_kernels.hopper.decode.token_ring import clusters_at_once
from pallas_kernels.layouts.stream import Stream
from tests.errors import ROUNDING, relative_error
from tests.launches import SM_BYTES, launches
from tests.pallas_kernels.hopper.decode.attention import LAYERS, draw, shapes
from tests.pallas_kernels.hopper.decode.products import (
    EPS,
    LAYER,
    assert_consistent,
    in_8_bits,
    normal,
    normed,
    stream_of,
    weight,
    weights_of,
    wide,
)
from tests.poisoned import on_poisoned_memory


def none_arrived(layers, tokens, neurons=64):
    return jax.new_ref(active_counts.zeros(layers, tokens, neurons))


def assert_same_bits(results, others):
    for result, other in zip(results, others, strict=True):
        np.testing.assert_array_equal(*(np.asarray(a).view(np.uint16) for a in (result, other)))


def add_product_hidden(h, w, x, scale, inner, counts=None):
    counts = none_arrived(2, len(x)) if counts is None else counts
    options = dict(eps=EPS, rectifier=None)
    return token_pairs.add_product_hidden(h, w, LAYER, x, scale, inner, counts, **options)


def operands_of_hidden(m, k, d, h):
    x, attended = normal(m, d).astype(jnp.bfloat16), normal(m, k).astype(jnp.bfloat16)
    inner = tuple(weight(jnp.bfloat16, 2, h, d) for _ in range(2))
    return attended, weight(jnp.bfloat16, 2, k, d), x, normal(2, d).astype(jnp.bfloat16), inner


def assert_hidden(result, operands):
    stream, hidden = result
    attended, w, x, scale, inner = operands
    assert relative_error(stream.x, wide(x) + wide(attended) @ wide(w[1])) < ROUNDING
    assert_consistent(stream, scale[1])
    g, up = (normed(stream.x, scale[1]) @ wide(w[1]).T for w in inner)
    assert relative_error(hidden, g / (1 + np.exp(-g)) * up) < 3 * ROUNDING


# The last has more blocks than a GPU holds at once.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "k", "d", "h"),
    [
        (8, 256, 128, 192),
        (64, 512, 256, 64),
        (8, 2048, 2048, 5632),
        (24, 1024, 2048, 16384),
    ],
)
def test_hidden(m, k, d, h):
    operands = operands_of_hidden(m, k, d, h)
    assert_hidden(on_poisoned_memory(add_product_hidden, *operands), operands)


def operands_of_gate(m, k, d, h):
    attended, w, x, scale, _ = operands_of_hidden(m, k, d, 64)
    return attended, w, x, scale, weights_of(2, h, d)


def add_product_gate(attended, w, x, scale, mlp, counts=None, *, batch):
    """The stream, the gate's values and the active gates of each token."""
    counts = none_arrived(2, len(x), mlp.down.shape[1]) if counts is None else counts
    options = dict(batch=batch, eps=EPS)
    out = attended, w, LAYER, x, scale, mlp, counts
    stream, gate = token_pairs.add_product_gate(*out, **options)
    return stream, gate.values, active_counts.of_tokens(counts[...])


def assert_gate(result, operands, batch):
    stream, values, _ = result
    attended, w, x, scale, mlp = operands
    assert relative_error(stream.x, wide(x) + wide(attended) @ wide(w[1])) < ROUNDING
    assert_consistent(stream, scale[1])
    exact = np.maximum(normed(stream.x, scale[1]) @ wide(mlp.gate[1]).T, 0)
    assert relative_error(values[:batch], exact[:batch]) < 2 * ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "batch", "d", "h"), [(8, 1, 2048, 5632), (64, 61, 1024, 384)])
def test_gate(m, batch, d, h):
    operands = operands_of_gate(m, 1024, d, h)
    result = on_poisoned_memory(functools.partial(add_product_gate, batch=batch), *operands)
    assert_gate(result, operands, batch)
    _, values, nnz = result
    np.testing.assert_array_equal(nnz[1, :batch], np.count_nonzero(values[:batch], axis=1))
    assert not nnz[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "d", "h"), [(8, 2048, 5632), (64, 1024, 384)])
def test_dense_gate_has_the_bits_that_it_has_alone(m, d, h):
    attended, w, x, scale, mlp = operands_of_gate(m, 1024, d, h)
    w[..., -1], x[:, -1], scale[:, -1], mlp.gate[..., -1] = 0, 1, 1, 90  # all gates are active
    operands = attended, w, x, scale, mlp

    def together(attended, w, x, scale, mlp):
        counts = jax.new_ref(active_counts.zeros(2, m, h))
        out = attended, w, LAYER, x, scale, mlp, counts
        stream, gate = token_pairs.add_product_gate(*out, batch=m, eps=EPS)
        return stream, gate, without_arrivals(counts)

    def apart(attended, w, x, scale, mlp):
        counts = jax.new_ref(active_counts.zeros(2, m, h))
        stream = token_product.add_product(attended, w, LAYER, x, scale)
        norm = stream.squares, EPS
        gate = token_gate.gate(stream.scaled, mlp, LAYER, counts, batch=m, norm=norm)
        return stream, gate, without_arrivals(counts)

    def without_arrivals(counts):
        return counts[...].at[:, 0, Launch.GATE].set(0)

    assert_same_bits(
        *(jax.tree.leaves(on_poisoned_memory(f, *operands)) for f in (together, apart))
    )


def operands_of_attention(heads, kv_heads, size, batch, capacity, length, d, is_8_bits=False):
    """Of `attend_to_projection`; the first sequence has the most tokens."""
    shape = heads, kv_heads, size, batch, capacity, length, jnp.bfloat16
    _, rope, k, v, layer, lengths = draw(*shape, fill=0)
    lengths[0] = length
    for cache in (k, v):
        cache[LAYER, 0, :length] = normal(length, kv_heads, size)
    widths = heads * size, kv_heads * size, kv_heads * size
    made = in_8_bits if is_8_bits else functools.partial(weight, jnp.bfloat16)
    weights = tuple(made(LAYERS, width, d) for width in widths)
    x, scale = normal(-(-batch // 8) * 8, d).astype(jnp.bfloat16), normal(d).astype(jnp.bfloat16)
    bias = normal(LAYERS, sum(widths)).astype(jnp.bfloat16)
    return stream_of(x, scale), weights, bias, *map(jax.device_put, (rope, k, v, layer, lengths))


def attend_to_projection(
    heads, kv_heads, stream, weights, bias, rope, k, v, *numbers, together, counts=None
):
    """What the new tokens attend to, and both caches."""
    (layer, lengths), caches = numbers, (jax.new_ref(k), jax.new_ref(v))
    shape, projection = dict(heads=heads, kv_heads=kv_heads), dict(k_axis=2, eps=EPS, bias=bias)
    if together:
        counts = none_arrived(LAYERS, len(stream.x)) if counts is None else counts
        attended = token_pairs.project_attend(
            stream, weights, layer, rope, *caches, lengths, counts, **shape, **projection
        )
    else:
        qkv = token_product.project(stream, weights, layer, **projection)
        attend = decode_attention.decode_attention
        attended = attend(qkv, rope, *caches, layer, lengths, **shape)
    return attended[: len(lengths)], *(ref[...] for ref in caches)


# Of 32 heads not all have room beside the projection: 5 clusters of four blocks are those of both
# phases, and with the longer cache 19 of eight.
@pytest.mark.gpu
@pytest.mark.parametrize("is_8_bits", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "batch", "capacity", "length"),
    [
        (32, 32, 64, 1, 1024, 512),
        (32, 32, 64, 1, 4096, 512),
        (64, 8, 64, 2, 2048, 2047),
        (8, 2, 128, 1, 1024, 600),
        (32, 8, 64, 1, 32768, 32767),
        (16, 16, 64, 4, 1024, 200),
        (4, 4, 64, 3, 512, 100),
    ],
)
def test_attention(heads, kv_heads, size, batch, capacity, length, is_8_bits):
    shape = heads, kv_heads, size, batch, capacity, length, 2048
    operands = operands_of_attention(*shape, is_8_bits)
    function = functools.partial(attend_to_projection, heads, kv_heads)
    apart = on_poisoned_memory(functools.partial(function, together=False), *operands)
    for _ in range(5):
        assert_same_bits(
            on_poisoned_memory(functools.partial(function, together=True), *operands), apart
        )


def assert_arrived_at(layer, launch, counts):
    """Blocks count themselves in this layer, for this launch."""
    arrived = np.asarray(counts[:, 0, : active_counts.column(0)])
    np.testing.assert_array_equal(np.argwhere(arrived), [[layer[0], launch]])


def assert_arrivals(current, blocks, waiting):
    """So many blocks have arrived, and so many have waited for them."""
    entries = current.shared["arrivals"].entries
    assert entries.count("arrived") == blocks
    assert entries.count(blocks) == waiting == len(entries) - blocks


# On few SMs there is room for one cluster less: the last of the first phase has one of the second,
# too. More can't be interpreted, as clusters run one after the other.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("m", "k", "d", "h", "sms", "clusters"),
    [
        (8, 256, 128, 192, 132, 5),
        pytest.param(64, 512, 256, 64, 132, 5, marks=pytest.mark.slow),
        (8, 256, 128, 192, 2, 4),
    ],
)
def test_hidden_interpreted(interpreted, m, k, d, h, sms, clusters):
    operands, counts = operands_of_hidden(m, k, d, h), none_arrived(2, m)
    with interpreted(sms=sms, detect_races=False) as current:  # it knows nothing of arrivals
        assert number_of_clusters(*operands) == clusters
        assert_hidden(add_product_hidden(*operands, counts), operands)
    assert_arrived_at(LAYER, Launch.GATE, counts)
    assert_arrivals(current, d // 16, h // 16)


def number_of_clusters(attended, w, x, scale, inner):
    first = token_product.add_product_phase(attended, w, LAYER, x, scale)
    stream = first.form(*first.outs)
    second = token_product.hidden_phase(stream, inner, LAYER, eps=EPS, rectifier=None)
    return launch.clusters_of(first, second)


def test_a_cluster_is_behind_those_of_the_first_phase_however_few_fit_at_once():
    with interpreting(sms=2):
        assert number_of_clusters(*operands_of_hidden(8, 512, 256, 64)) == 5


def test_gate_interpreted(interpreted):
    m, d, h = 8, 256, 192
    operands, counts = operands_of_gate(m, 512, d, h), none_arrived(2, m, h)
    with interpreted(detect_races=False) as current:
        result = add_product_gate(*operands, counts, batch=m)
    assert_gate(result, operands, m)
    assert_arrived_at(LAYER, Launch.GATE, counts)
    assert_arrivals(current, d // 16, h // 16)
    voted = {cluster for cluster, _ in current.shared["votes"].entries}
    assert voted == {4, 5, 6}  # the clusters behind the first phase's four


@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits", "capacity", "sms", "is_8_bits"), [(4, 520, 12, False), (8, 2048, 16, True)]
)
def test_attention_interpreted(interpreted, splits, capacity, sms, is_8_bits):
    heads, kv_heads, batch = 4, 2, 2
    operands = operands_of_attention(heads, kv_heads, 64, batch, capacity, 130, 512, is_8_bits)
    function = functools.partial(attend_to_projection, heads, kv_heads)
    counts, (*_, layer, _) = none_arrived(LAYERS, 8), operands
    with interpreted(sms=sms, detect_races=False) as current:
        first, second = phases_of_attention(heads, kv_heads, *operands)
        assert math.prod(second.cluster) == splits
        assert launch.clusters_of(first, second) == first.clusters + second.clusters - 1
        results = function(*operands, together=True, counts=counts)
        assert_same_bits(results, function(*operands, together=False))
    assert_arrived_at(layer, Launch.ATTENTION, counts)
    assert_arrivals(current, 4 * (heads + 2 * kv_heads), splits * kv_heads * batch)


def phases_of_attention(heads, kv_heads, stream, weights, bias, rope, k, v, *numbers):
    (layer, lengths), caches = numbers, (jax.new_ref(k), jax.new_ref(v))
    first = token_product.project_phase(stream, weights, layer, k_axis=2, eps=EPS, bias=bias)
    second = decode_attention.decode_attention_phase(
        *first.outs, rope, *caches, layer, lengths, heads=heads, kv_heads=kv_heads
    )
    return first.in_clusters(second.cluster), second


# With 128 features a block of attention takes so much shared memory that 48 clusters of the
# projection do not fit beside each other, but 12 do.
@pytest.mark.parametrize(
    ("heads", "size", "batch", "capacity", "number"),
    [
        (32, 64, 1, 1024, 1),
        pytest.param(32, 64, 1, 256, 2, marks=pytest.mark.slow),
        pytest.param(32, 64, 2, 1024, 1, marks=pytest.mark.slow),
        pytest.param(32, 64, 8, 1024, 2, marks=pytest.mark.slow),
        pytest.param(32, 128, 1, 1024, 2, marks=pytest.mark.slow),
        pytest.param(8, 128, 1, 1024, 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_attention_shares_a_launch_where_it_can(lower, heads, size, batch, capacity, number):
    def together(stream, weights, rope, k, v, layer, lengths):
        caches, counts = (jax.new_ref(k), jax.new_ref(v)), none_arrived(LAYERS, 8)
        return token_pairs.project_attend(
            stream, weights, layer, rope, *caches, lengths, counts,
            heads=heads, kv_heads=heads, k_axis=1, eps=EPS,
        )  # fmt: skip

    x, w = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 1024), (LAYERS, 1024, heads * size))
    )
    stream = Stream(x, x, jax.ShapeDtypeStruct((8, 32), jnp.float32))
    _, *attention = shapes(heads, heads, size, batch, capacity, jnp.bfloat16)
    found = launches(lower(together, stream, 3 * (w,), *attention))
    assert len(found) == number
    if number == 1:
        (pair,) = found.values()
        on_sm = SM_BYTES // (pair.smem + 1024)
        with interpreting(sms=132):
            assert pair.blocks // pair.cluster <= clusters_at_once(on_sm, pair.cluster)


def test_blocks_are_put_into_clusters_that_they_fill():
    x, w = jnp.zeros((8, 256), jnp.bfloat16), jnp.zeros((1, 192, 256), jnp.bfloat16)
    stream, layer = stream_of(x, jnp.ones(256, x.dtype)), jnp.zeros(1, jnp.int32)
    with interpreting(sms=132):
        projection = token_product.project_phase(stream, (w, w), layer, k_axis=2, eps=EPS)
    assert (projection.clusters, projection.cluster) == (6, (1, 4))
    assert projection.in_clusters((3, 4)).clusters == 2
    with pytest.raises(
        ValueError, match="token_project has 24 blocks, which fill no clusters of 16"
    ):
        projection.in_clusters((4, 4))
