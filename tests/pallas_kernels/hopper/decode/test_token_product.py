"""Products of few tokens, and what the rest of a sparse block adds to the stream."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.common.primitives import interpreting
from pallas_kernels.hopper.decode import active_counts, token_product
from pallas_kernels.hopper.decode.token_ffn import Cut
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import E4M3, Quantised
from pallas_kernels.rectifiers import rectifier
from pallas_kernels.weights import Weights
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.launches import SM_BYTES, held, launches
from tests.pallas_kernels.hopper.decode.products import (
    EPS,
    HOPPER,
    KERNELS,
    LAYER,
    active_for_each,
    add_ffn,
    assert_consistent,
    draw_tiles_that_are_there,
    normal,
    normed,
    stream_of,
    weight,
    weights_of,
    wide,
    without_gate,
)
from tests.poisoned import on_poisoned_memory

SHAPES = [(8, 192, 64), (24, 512, 192), (64, 704, 320), (8, 5632, 2048)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("m", "d", "n"), SHAPES)
@pytest.mark.parametrize("k_axis", [1, 2])
def test_projections_side_by_side(kernels, m, d, n, k_axis):
    x, scale = (normal(m, d) * 3).astype(jnp.bfloat16), normal(d).astype(jnp.bfloat16)
    sizes = (n, 64, 128)
    weights = [weight(jnp.bfloat16, 2, size, d) for size in sizes]
    bias = jnp.asarray(weight(jnp.bfloat16, 2, sum(sizes)))
    given = tuple(np.swapaxes(w, 1, 2) if k_axis == 1 else w for w in weights)
    y = on_poisoned_memory(
        lambda *a: kernels.project(*a, k_axis=k_axis, eps=EPS, bias=bias),
        stream_of(x, scale),
        given,
        LAYER,
    )
    w = np.concatenate([wide(w[1]) for w in weights])
    assert y.dtype == jnp.bfloat16
    assert relative_error(y, normed(x, scale) @ w.T + wide(bias)[1]) < 2 * ROUNDING


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_are_not_rounded(kernels):
    x = normal(8, 256).astype(jnp.float16)
    w = weight(jnp.float16, 1, 128, 256)
    stream = stream_of(x, np.ones(256, jnp.float16))
    y = on_poisoned_memory(
        kernels.project, stream, (w,), np.zeros(1, np.int32), k_axis=2, eps=EPS, dtype=jnp.float32
    )
    assert y.dtype == jnp.float32
    assert relative_error(y, normed(x, np.ones(256)) @ wide(w[0]).T) < 1e-5


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu", "drelu", "silu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("m", "d", "h"), [(8, 192, 128), (64, 2048, 384)])
def test_dense_hidden_activation(kernels, m, d, h, activation, gated):
    x, scale = normal(m, d).astype(jnp.bfloat16), normal(d).astype(jnp.bfloat16)
    weights = tuple(weight(jnp.bfloat16, 2, h, d) for _ in range(1 + gated))
    stream = stream_of(x, scale)
    act = rectifier(activation, 0.5 if activation == "fatrelu" else 0.0)
    out = on_poisoned_memory(kernels.hidden, stream, weights, LAYER, eps=EPS, rectifier=act)
    g, *up = (normed(x, scale) @ wide(w[1]).T for w in weights)
    functions = {
        "relu2": lambda z: np.maximum(z, 0) ** 2,
        "fatrelu": lambda z: np.where(z > 0.5, z, 0),
        "silu": lambda z: z / (1 + np.exp(-z)),
    }
    h = functions.get(activation, lambda z: np.maximum(z, 0))(g)
    for u in up:
        h = h * (np.maximum(u, 0) if activation == "drelu" else u)
    sure = np.abs(g - 0.5) > 0.02 if activation == "fatrelu" else 1  # whatever the rounding
    assert relative_error(wide(out) * sure, h * sure) < 3 * ROUNDING


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("m", "k", "d"), SHAPES)
def test_adds_to_the_stream(kernels, m, k, d, biased):
    h, x = normal(m, k).astype(jnp.bfloat16), normal(m, d).astype(jnp.bfloat16)
    w, scale = weight(jnp.bfloat16, 2, k, d), normal(2, d).astype(jnp.bfloat16)
    bias = jnp.asarray(normal(2, d), jnp.bfloat16) if biased else None
    stream = on_poisoned_memory(kernels.add_product, h, w, LAYER, x, scale, bias=bias)
    expected = wide(x) + wide(h) @ wide(w[1])
    if biased:
        expected += wide(bias[1])
    assert relative_error(stream.x, expected) < ROUNDING
    assert_consistent(stream, scale[1])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("gated", [True, False])
# Rows one by one, as for the most that are few, and dense products.
@pytest.mark.sampled(4)
@pytest.mark.parametrize("counted", ["few", "most", "a token has many", "many together"])
@pytest.mark.parametrize(
    ("m", "batch", "d", "h", "active"),
    [
        (8, 1, 1024, 5632, 0.01),
        (24, 17, 2048, 384, 1.0),
        (64, 64, 1024, 384, 0.1),
        pytest.param(16, 9, 3072, 384, 0.1, marks=pytest.mark.gpu),
        # Two tiles of w_up at once: of all widths and tokens these take the most shared memory.
        pytest.param(16, 16, 2048, 5632, 0.1, marks=pytest.mark.gpu),
        pytest.param(32, 32, 3072, 8192, 0.1, marks=pytest.mark.gpu),
        pytest.param(8, 8, 7168, 1408, 0.01, marks=pytest.mark.gpu),
    ],
)
def test_adds_a_sparse_block_to_the_stream(kernels, m, batch, d, h, active, counted, gated):
    x, after = normal(m, d).astype(jnp.bfloat16), normal(2, d).astype(jnp.bfloat16)
    weights = weights_of(2, h, d)
    used = weights if gated else without_gate(weights)
    gate = np.abs(normal(m, h)) * (seeds.rng().random((m, h)) < active)
    gate[0] = 0
    gate, scale = gate.astype(jnp.bfloat16), normal(d).astype(jnp.bfloat16)
    each = {"few": 3, "most": min(512, 8192 // m), "many together": 8192 // m + 1}
    numbers = np.full(m, each.get(counted, 1))
    if counted == "a token has many":
        numbers[m - 1] = 513
    counts = active_for_each(numbers, m, h)  # only speed depends on them
    stream = on_poisoned_memory(
        functools.partial(add_ffn, kernels, batch=batch),
        gate, stream_of(x, scale), used, counts, after,
    )  # fmt: skip
    up = normed(x, scale) @ wide(weights.up[1]).T if gated else 1.0
    expected = (wide(x) + (wide(gate) * up) @ wide(weights.down[1]))[:batch]
    stream = Stream(*(a[:batch] for a in stream))
    assert relative_error(stream.x, expected) < 2 * ROUNDING
    np.testing.assert_array_equal(np.asarray(stream.x[0]), np.asarray(x[0]))
    assert_consistent(stream, after[1])


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.3, 0.8, 1.0])
@pytest.mark.parametrize(("m", "d", "h"), [(8, 1024, 5632), (64, 2048, 384)])
def test_tiles_that_the_gate_has_multiplied_are_not_computed_again(m, d, h, share):
    x, after = normal(m, d).astype(jnp.bfloat16), normal(2, d).astype(jnp.bfloat16)
    weights = weights_of(2, h, d)
    gate = np.maximum(normal(m, h), 0).astype(jnp.bfloat16)
    exact = wide(gate) * (normed(x, after[0]) @ wide(weights.up[1]).T)
    counts = active_for_each(513, m, h)
    of_tile = np.repeat(draw_tiles_that_are_there(counts, share), 64)
    weights.up[:, of_tile] = np.nan
    hidden = np.where(of_tile, exact, np.nan).astype(jnp.bfloat16)
    stream = on_poisoned_memory(
        functools.partial(add_ffn, HOPPER, batch=m),
        gate, stream_of(x, after[0]), weights, counts, after, hidden,
    )  # fmt: skip
    assert relative_error(stream.x, wide(x) + exact @ wide(weights.down[1])) < 2 * ROUNDING
    assert_consistent(stream, after[1])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("counted", [1, 513])  # rows one by one, dense products
def test_a_gate_of_minus_zero_is_not_ignored(kernels, counted):
    m, d, h = 8, 1024, 384
    weights = weights_of(2, h, d)
    weights.up[:, 5], weights.up[:, 7] = np.inf, np.nan
    gate = np.zeros((m, h), jnp.bfloat16)
    gate[3, 5] = -0.0
    counts = active_for_each(counted, m, h)
    x, scale = normal(m, d).astype(jnp.bfloat16), np.ones((2, d), jnp.bfloat16)
    stream = on_poisoned_memory(
        functools.partial(add_ffn, kernels, batch=m),
        gate, stream_of(x, scale[0]), weights, counts, scale,
    )  # fmt: skip
    is_nan = np.isnan(np.asarray(stream.x, np.float32))
    assert is_nan[3].all() and not np.delete(is_nan, 3, axis=0).any()


@pytest.mark.parametrize("m", [pytest.param(8, marks=pytest.mark.slow), 64])
def test_lowers_without_a_gpu(lower, m):
    shape = jax.ShapeDtypeStruct
    x, w = shape((m, 2048), jnp.bfloat16), shape((3, 5632, 2048), jnp.bfloat16)
    stream = Stream(x, x, shape((m, 128), jnp.float32))
    layer, scale = shape((1,), jnp.int32), shape((3, 2048), jnp.bfloat16)
    project = functools.partial(token_product.project, k_axis=2, eps=EPS)
    assert "token_project" in lower(project, stream, (w, w), layer)
    dense = functools.partial(token_product.hidden, eps=EPS, rectifier=None)
    assert "token_hidden_dense" in lower(dense, stream, (w, w), layer)
    h = shape((m, 5632), jnp.bfloat16)
    assert "token_add_product" in lower(token_product.add_product, h, w, layer, x, scale)
    ffn = functools.partial(add_ffn, HOPPER, batch=m)
    counts = jax.eval_shape(lambda: active_counts.zeros(3, m, 5632))
    assert "token_add_ffn" in lower(ffn, h, stream, Weights(w, w, w), counts, scale)


@pytest.mark.parametrize(
    ("m", "d", "h", "form"),
    [
        (16, 2048, 5632, "gated"),
        *(
            pytest.param(m, d, h, form, marks=pytest.mark.slow)
            for form in ("gated", "not gated", "8 bits")
            for m in (8, 16, 32, 64)
            for d, h in ((1024, 2816), (2048, 5632), (3072, 8192))
            if (m, d, h, form) != (16, 2048, 5632, "gated")
        ),
    ],
)
def test_blocks_that_wait_for_each_other_are_on_the_gpu_together(lower, m, d, h, form):
    shape = jax.ShapeDtypeStruct
    x, gate, w = (shape(s, jnp.bfloat16) for s in ((m, d), (m, h), (3, h, d)))
    up = Quantised(shape(w.shape, E4M3), shape((3, h, 1), jnp.float32)) if form == "8 bits" else w
    weights = Weights(None if form == "not gated" else up, up, w)
    stream, scale = Stream(x, x, shape((m, d // 16), jnp.float32)), shape((3, d), jnp.bfloat16)
    counts = jax.eval_shape(lambda: active_counts.zeros(3, m, h))
    step = functools.partial(add_ffn, HOPPER, batch=m)
    launch = launches(lower(step, gate, stream, weights, counts, scale))["token_add_ffn"]
    with interpreting(sms=132):
        cut = Cut.of(gate, x, weights, m)
    # If more wait than the GPU holds, those that are there wait for ever.
    assert cut.dense_clusters <= held(launch)


@pytest.mark.slow
@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_three_blocks_of_a_product_share_an_sm(lower, m):
    shape = jax.ShapeDtypeStruct
    x, w = shape((m, 2048), jnp.bfloat16), shape((3, 2048, 2048), jnp.bfloat16)
    stream, layer = Stream(x, x, shape((m, 128), jnp.float32)), shape((1,), jnp.int32)
    project = functools.partial(token_product.project, k_axis=1, eps=EPS)
    (qkv,) = launches(lower(project, stream, (w, w, w), layer)).values()
    assert SM_BYTES // (qkv.smem + 1024) == 4  # three would hold 92 of its 96 clusters
    scale = shape((3, 2048), jnp.bfloat16)
    (out,) = launches(lower(token_product.add_product, x, w, layer, x, scale)).values()
    assert SM_BYTES // (out.smem + 1024) == 3
