"""Products of few tokens with 8-bit weights, against the rounded operands in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.decode import active_counts, token_product, votes
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import Quantised
from pallas_kernels.weights import Weights
from tests.errors import ROUNDING, relative_error
from tests.launches import SM_BYTES, launches
from tests.pallas_kernels.eight_bits import lost
from tests.pallas_kernels.hopper.decode.products import (
    EPS,
    HOPPER,
    KERNELS,
    LAYER,
    REFERENCE,
    active_for_each,
    add_ffn,
    assert_consistent,
    assert_counted,
    draw_tiles_that_are_there,
    gate_and_counts,
    in_8_bits,
    inverse_rms,
    normal,
    product,
    stream_of,
    votes_of,
    weight,
    wide,
)
from tests.poisoned import on_poisoned_memory

SHAPES = [(8, 256, 64), (24, 640, 192), (64, 2048, 320)]


def tokens(m, d):
    """Tokens of very different sizes; the second is zero."""
    x = normal(m, d) * 8.0 ** (np.arange(m) % 4 - 2)[:, None]
    x[1] = 0
    return x.astype(jnp.bfloat16)


def assert_close_by_token(y, exact, k, roundings=1):
    """Each token is as close as tensor cores and roundings of the result to 16 bits let it be."""
    for token, (mine, theirs) in enumerate(zip(wide(y), exact, strict=True)):
        if theirs.any():
            assert relative_error(mine, theirs) < roundings * ROUNDING + 2 * lost(k), token
        else:
            assert not mine.any(), token


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("m", "d", "n"), SHAPES)
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_projections_side_by_side(kernels, m, d, n, dtype):
    x, scale = tokens(m, d), normal(d).astype(jnp.bfloat16)
    sizes = n, 64, 128
    weights = tuple(in_8_bits(2, size, d) for size in sizes)
    bias = jnp.asarray(weight(jnp.bfloat16, 2, sum(sizes)))
    stream = stream_of(x, scale)
    options = dict(k_axis=2, eps=EPS, dtype=dtype)
    y = on_poisoned_memory(
        lambda *a: kernels.project(*a, bias=bias, **options), stream, weights, LAYER
    )
    assert y.dtype == (dtype or jnp.bfloat16)
    exact = np.concatenate([product(stream.scaled, w) for w in weights], axis=1)
    exact = exact * inverse_rms(x) + wide(bias)[1]
    assert_close_by_token(y, exact, d, roundings=1 if dtype is None else 0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("m", "d", "h"), [(8, 256, 128), (64, 2048, 384)])
def test_dense_hidden_activation(kernels, m, d, h, gated):
    x, scale = tokens(m, d), normal(d).astype(jnp.bfloat16)
    weights = tuple(in_8_bits(2, h, d) for _ in range(1 + gated))
    stream = stream_of(x, scale)
    out = on_poisoned_memory(kernels.hidden, stream, weights, LAYER, eps=EPS, rectifier=None)
    g, *up = (product(stream.scaled, w) * inverse_rms(x) for w in weights)
    exact = functools.reduce(np.multiply, up, g / (1 + np.exp(-g)))
    assert_close_by_token(out, exact, d, roundings=2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("alike", [True, False])  # gate and up
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("m", "batch", "d", "h"), [(8, 8, 256, 128), (64, 61, 1024, 384)])
def test_gate(kernels, m, batch, d, h, has_norm, alike):
    x, scale = tokens(m, d), np.abs(normal(d)).astype(jnp.bfloat16)
    w, up = (in_8_bits(2, h, d) for _ in range(2))
    stream, factor = stream_of(x, scale), inverse_rms(x) if has_norm else 1
    norm = (stream.squares, EPS) if has_norm else None
    function = functools.partial(gate_and_counts, kernels, norm=norm, batch=batch)
    weights = Weights(w, up if alike else weight(jnp.bfloat16, 2, h, d), up.values)
    gate, counts = on_poisoned_memory(function, stream.scaled, weights, LAYER)
    exact = product(stream.scaled, w) * factor
    values = wide(gate.values[:batch])
    assert_close_by_token(values, np.maximum(exact, 0)[:batch], d)
    assert_counted(counts, values)
    if kernels is REFERENCE:
        return
    voted = votes_of(counts)
    if not alike:
        assert not voted.any()
    else:
        assert (voted < votes.AGAINST).all()  # a token with half of its gates active is among them
        exact = values * (product(stream.scaled, up) * factor)[:batch]
        assert_close_by_token(gate.hidden[:batch], exact, d, roundings=2)


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_not_finite_stays_in_its_token(kernels):
    x, w = tokens(16, 640), in_8_bits(2, 128, 640)
    x[3, 639], x[9, 5] = np.inf, np.nan
    stream = stream_of(x, np.ones(640, jnp.bfloat16))
    y = on_poisoned_memory(kernels.project, stream, (w,), LAYER, k_axis=2, eps=EPS)
    is_nan = np.isnan(wide(y))
    assert is_nan[[3, 9]].all() and not np.delete(is_nan, [3, 9], axis=0).any()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("m", "k", "d"), SHAPES)
def test_adds_to_the_stream(kernels, m, k, d):
    h, x = tokens(m, k), normal(m, d).astype(jnp.bfloat16)
    w, scale = in_8_bits(2, d, k), normal(2, d).astype(jnp.bfloat16)
    stream = on_poisoned_memory(kernels.add_product, h, w, LAYER, x, scale)
    assert_close_by_token(stream.x, wide(x) + product(h, w), k)
    assert_consistent(stream, scale[1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("counted", [1, 513])  # rows one by one, dense products
@pytest.mark.parametrize(
    ("m", "batch", "d", "h", "active"),
    [(8, 1, 1024, 5632, 0.01), (24, 17, 2048, 384, 1.0), (64, 64, 1024, 384, 0.1)],
)
def test_adds_a_sparse_block_to_the_stream(kernels, m, batch, d, h, active, counted):
    x, after = tokens(m, d), normal(2, d).astype(jnp.bfloat16)
    up, down = in_8_bits(2, h, d), weight(jnp.bfloat16, 2, h, d)
    gate = np.abs(normal(m, h)) * (np.abs(normal(m, h)) < 1.3 * active)
    gate[0] = 0
    gate, scale = gate.astype(jnp.bfloat16), normal(d).astype(jnp.bfloat16)
    counts = active_for_each(counted, m, h)
    stream = stream_of(x, scale)
    added = on_poisoned_memory(
        functools.partial(add_ffn, kernels, batch=batch),
        gate, stream, Weights(down, up, down), counts, after,
    )  # fmt: skip
    hidden = wide(gate) * product(stream.scaled, up) * inverse_rms(x)
    exact = wide(x) + hidden @ wide(down[1])
    added = jax.tree.map(lambda a: a[:batch], added)
    # In dense products the hidden activation is rounded, too.
    assert_close_by_token(added.x, exact[:batch], d, roundings=2)
    assert_consistent(added, after[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "d", "h"), [(8, 1024, 5632), (64, 2048, 384)])
def test_tiles_that_the_gate_has_multiplied_are_not_computed_again(m, d, h):
    x, after = tokens(m, d), normal(2, d).astype(jnp.bfloat16)
    up, down = in_8_bits(2, h, d), weight(jnp.bfloat16, 2, h, d)
    gate = np.abs(normal(m, h)).astype(jnp.bfloat16)
    counts, stream = active_for_each(513, m, h), stream_of(x, normal(d).astype(jnp.bfloat16))
    exact = wide(gate) * product(stream.scaled, up) * inverse_rms(x)
    of_tile = np.repeat(draw_tiles_that_are_there(counts, 0.5), 64)
    poisoned = jnp.where(of_tile[:, None], jnp.nan, up.scale)
    hidden = np.where(of_tile, exact, np.nan).astype(jnp.bfloat16)
    added = on_poisoned_memory(
        functools.partial(add_ffn, HOPPER, batch=m),
        gate, stream, Weights(down, Quantised(up.values, poisoned), down), counts, after, hidden,
    )  # fmt: skip
    expected = wide(x) + exact @ wide(down[1])
    assert_close_by_token(added.x, expected, d, roundings=2)
    assert_consistent(added, after[1])


@pytest.mark.parametrize("m", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_lowers_without_a_gpu(lower, m):
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def quantised(*shape):
        scale = struct(*shape[:-1], 1, dtype=jnp.float32)
        return Quantised(struct(*shape, dtype=jnp.float8_e4m3fn), scale)

    layer = struct(1, dtype=jnp.int32)
    x, w = struct(m, 2048), quantised(3, 2048, 2048)
    stream = Stream(x, x, struct(m, 128, dtype=jnp.float32))
    project = functools.partial(token_product.project, k_axis=2, eps=EPS)
    # Half the bytes of 16-bit stages, in as many blocks on an SM at least.
    text = lower(project, stream, (w, w, w), layer)
    assert "f32.e4m3.e4m3" in text
    (launch,) = launches(text).values()
    assert SM_BYTES // (launch.smem + 1024) >= 3
    ffn = functools.partial(add_ffn, HOPPER, batch=m)
    counts = jax.eval_shape(lambda: active_counts.zeros(3, m, 2048))
    weights = Weights(struct(3, 2048, 2048), w, struct(3, 2048, 2048))
    scale = struct(3, 2048)
    assert "token_add_ffn" in lower(ffn, x, stream, weights, counts, scale)
