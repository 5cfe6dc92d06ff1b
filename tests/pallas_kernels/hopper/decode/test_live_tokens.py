"""A number of live neurons in the kernels for few tokens, on memory that held NaN before."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.decode import few_tokens, step, token_product
from pallas_kernels.layers import Layers
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.rectifiers import RELU
from pallas_kernels.weights import Weights
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.hopper.decode import blocks
from tests.pallas_kernels.hopper.decode.products import (
    EPS,
    HOPPER,
    KERNELS,
    LAYER,
    REFERENCE,
    assert_counted,
    gate_and_counts,
    normal,
    stream_of,
    weight,
    wide,
)
from tests.poisoned import on_poisoned_memory

AROUND_TILES = [0, 1, 63, 64, 65, 128, 200]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("m", "batch", "d", "h"), [(8, 1, 192, 256), (64, 61, 1024, 256)])
def test_gate_of_few_tokens(kernels, m, batch, d, h):
    x, w = normal(m, d).astype(jnp.bfloat16), weight(jnp.bfloat16, 2, h, d)
    for live in AROUND_TILES:
        poisoned = w.copy()
        poisoned[:, live:] = np.nan
        function = functools.partial(gate_and_counts, kernels, batch=batch)
        number = np.array([h, live], np.int32)
        weights = Weights(poisoned, w, w, number)
        gate, counts = on_poisoned_memory(function, x, weights, LAYER)
        gate = wide(gate.values[:batch])
        exact = np.maximum(wide(x) @ wide(w[1]).T, 0)[:batch]
        if live:
            assert relative_error(gate[:, :live], exact[:, :live]) < ROUNDING
        assert not gate[:, live:].any() and not np.signbit(gate[:, live:]).any()
        assert_counted(counts, gate)


@pytest.mark.parametrize("kernels", KERNELS)
def test_gate_of_a_token_that_is_not_finite(kernels):
    x, w = normal(8, 256).astype(jnp.bfloat16), weight(jnp.bfloat16, 2, 256, 256)
    x[1, 3], x[2, 5] = np.inf, np.nan
    stream = stream_of(x, np.ones(256, jnp.bfloat16))
    norm, weights = (stream.squares, EPS), Weights(w, w, w, np.array([256, 70], np.int32))
    function = functools.partial(gate_and_counts, kernels, norm=norm, batch=8)
    gate, _ = on_poisoned_memory(function, stream.scaled, weights, LAYER)
    gate = wide(gate.values)
    assert np.isnan(gate[2, :70]).all() and not gate[:, 70:].any()


# Half of the gates are active, in some cases too many for the kernels to take rows one by one.
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("m", "d"), [(8, 256), (64, 1024)])
@pytest.mark.parametrize("live", [0, 64, 700, 1280, 1408])
def test_block_of_few_tokens(kernels, m, d, live):
    x, *weights = blocks.draw(m, d, 1408, 0.5, jnp.bfloat16)
    poisoned = [w.copy() for w in weights]
    for w, value in zip(poisoned, (np.nan, np.nan, 1e4), strict=True):
        w[live:] = value
    operands = x, Weights(*poisoned, np.array([live], np.int32))
    *out, fired = on_poisoned_memory(kernels.few_tokens_ffn, *operands)
    blocks.assert_matches((*out, fired[:live]), x, *(w[:live] for w in weights))
    assert not np.asarray(fired[live:]).any()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "act", [pytest.param(RELU, id="relu"), pytest.param(None, id="silu", marks=pytest.mark.slow)]
)
def test_dense_hidden_activation(kernels, act):
    stream, weights, hidden = draw_hidden(kernels, 24, 256, 256, act)
    whole = wide(on_poisoned_memory(hidden, stream, weights, LAYER))
    for live in AROUND_TILES:
        out = wide(on_poisoned_memory(hidden_of_live(hidden), stream, weights, LAYER, of(live)))
        np.testing.assert_array_equal(out[:, :live], whole[:, :live])
        assert not out[:, live:].any()


# In the second case the last tile is left out.
@pytest.mark.sampled(1)
@pytest.mark.parametrize("live", [70, 64, 0])
def test_dense_hidden_activation_in_the_interpreter(interpreted, live):
    stream, weights, hidden = draw_hidden(HOPPER, 8, 256, 128, RELU)
    *_, reference = draw_hidden(REFERENCE, 8, 256, 128, RELU)
    of_layers = jnp.asarray([0 if live else 128, live], jnp.int32)  # the other layer's is another
    operands = stream, weights, jnp.asarray(LAYER), of_layers
    with interpreted():
        out = wide(hidden_of_live(hidden)(*operands))
    expected = wide(hidden_of_live(reference)(*operands))
    if live:
        assert relative_error(out, expected) < 2 * ROUNDING
    assert not out[:, live:].any()


def draw_hidden(kernels, m, d, h, act):
    x, scale = normal(m, d).astype(jnp.bfloat16), normal(d).astype(jnp.bfloat16)
    weights = tuple(weight(jnp.bfloat16, 2, h, d) for _ in range(2))
    hidden = functools.partial(kernels.hidden, eps=EPS, rectifier=act)
    return stream_of(x, scale), weights, hidden


def hidden_of_live(hidden):
    return lambda stream, weights, layer, live: hidden(stream, weights, layer, live=live)


def of(live):
    """The number for the second of two layers."""
    return np.array([256, live], np.int32)


def test_lowers_without_a_gpu(lower):
    shape, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    one, layers = shape((1,), jnp.int32), shape((3,), jnp.int32)
    few, w = shape((8, 2048), bf16), shape((5632, 2048), bf16)
    assert "token_gate" in lower(few_tokens.few_tokens_ffn, few, Weights(w, w, w, one))
    stream, w = Stream(few, few, shape((8, 128), jnp.float32)), shape((3, *w.shape), bf16)
    hidden = functools.partial(token_product.hidden, eps=EPS, rectifier=RELU)
    assert "token_hidden_dense" in lower(hidden_of_live(hidden), stream, (w, w), one, layers)


@pytest.mark.parametrize("is_sparse", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_decoding_step_reads_the_numbers_of_live_neurons(lower, is_sparse):
    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    w, norms, live = shape(2, 256, 1024), shape(2, 1024), shape(2, dtype=jnp.int32)
    mlp, qkv = Weights(w, w, w, live), 3 * (shape(2, 1024, 256),)
    x, cache, one = shape(8, 1024), shape(2, 1, 64, 4, 64), shape(1, dtype=jnp.int32)
    stream = Stream(x, x, shape(8, 64, dtype=jnp.float32))
    rope = 2 * (shape(1, 32, dtype=jnp.float32),)

    def decode(stream, layers, k, v, lengths, rope):
        caches, options = (jax.new_ref(k), jax.new_ref(v)), dict(heads=4, kv_heads=4, eps=EPS)
        options |= dict(rectifier=RELU, is_sparse=is_sparse, launches=0)
        return step.decode_layers(stream, layers, *caches, lengths, rope, **options)

    layers = Layers(qkv, None, w, None, mlp, (norms, norms))
    text = lower(decode, stream, layers, cache, cache, one, rope)
    (read,) = re.findall(r"@main\((.*)\) ->", text)  # which has no operand that is not read
    assert "tensor<2xi32>" in read
