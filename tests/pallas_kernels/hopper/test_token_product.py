import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper, reference
from pallas_kernels.hopper.decode import active_counts, votes
from pallas_kernels.hopper.decode.gate import Gate
from pallas_kernels.kernels import HOPPER, REFERENCE
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.rectifiers import rectifier
from pallas_kernels.weights import Weights
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.launches import SM_BYTES, launches

EPS = 1e-5
LAYER = np.array([1], np.int32)
KERNELS = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(HOPPER, id="hopper", marks=pytest.mark.gpu),
]
SHAPES = [(8, 192, 64), (24, 512, 192), (64, 704, 320), (8, 5632, 2048)]


def folder(kernels):
    """Where a back end has each kernel by itself, also those that `Kernels` has in pairs only."""
    return {REFERENCE.name: reference, HOPPER.name: hopper}[kernels.name]


def normal(*shape):
    return seeds.rng().standard_normal(shape, dtype=np.float32)


def weight(dtype, *shape):
    return (normal(*shape) / shape[-1] ** 0.5).astype(dtype)


def stream_of(x, scale):
    """A stream with its squares in uneven parts, as several blocks write them."""
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    scaled = (x.astype(jnp.float32) * scale.astype(jnp.float32)).astype(x.dtype)
    squares = np.asarray(x, np.float32).reshape(len(x), -1, 32) ** 2
    return Stream(x, scaled, jnp.asarray(squares.sum(axis=2)))


def normed(x, scale):
    """The normed stream in float64, its scaling rounded as the stream rounds it."""
    x, scale = (np.asarray(a, np.float64) for a in (x, scale))
    return (x * scale) / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS)


def wide(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


def run(function, *operands, **options):
    """`function`, jitted, on memory that held NaN just before."""
    poison = jnp.full((64, 1 << 18), jnp.nan)
    poison.block_until_ready()
    poison.delete()
    return jax.block_until_ready(jax.jit(functools.partial(function, **options))(*operands))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("m", "d", "n"), SHAPES)
@pytest.mark.parametrize("k_axis", [1, 2])
def test_projections_side_by_side(kernels, m, d, n, k_axis):
    x, scale = (normal(m, d) * 3).astype(jnp.bfloat16), normal(d).astype(jnp.bfloat16)
    sizes = (n, 64, 128)
    weights = [weight(jnp.bfloat16, 2, size, d) for size in sizes]
    bias = jnp.asarray(weight(jnp.bfloat16, 2, sum(sizes)))
    given = tuple(np.swapaxes(w, 1, 2) if k_axis == 1 else w for w in weights)
    y = run(
        lambda *a: kernels.project(*a, k_axis=k_axis, eps=EPS, bias=bias),
        stream_of(x, scale),
        given,
        LAYER,
    )
    w = np.concatenate(wide(*[w[1] for w in weights]))
    assert y.dtype == jnp.bfloat16
    assert relative_error(y, normed(x, scale) @ w.T + wide(bias)[0][1]) < 2 * ROUNDING


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_are_not_rounded(kernels):
    x = normal(8, 256).astype(jnp.float16)
    w = weight(jnp.float16, 1, 128, 256)
    stream = stream_of(x, np.ones(256, jnp.float16))
    y = run(
        kernels.project, stream, (w,), np.zeros(1, np.int32), k_axis=2, eps=EPS, dtype=jnp.float32
    )
    assert y.dtype == jnp.float32
    assert relative_error(y, normed(x, np.ones(256)) @ wide(w[0])[0].T) < 1e-5


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu", "drelu", "silu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("m", "d", "h"), [(8, 192, 128), (64, 2048, 384)])
def test_dense_hidden_activation(kernels, m, d, h, activation, gated):
    x, scale = normal(m, d).astype(jnp.bfloat16), normal(d).astype(jnp.bfloat16)
    weights = tuple(weight(jnp.bfloat16, 2, h, d) for _ in range(1 + gated))
    stream = stream_of(x, scale)
    act = rectifier(activation, 0.5 if activation == "fatrelu" else 0.0)
    out = run(folder(kernels).token_product.hidden, stream, weights, LAYER, eps=EPS, rectifier=act)
    g, *up = (normed(x, scale) @ wide(w[1])[0].T for w in weights)
    functions = {
        "relu2": lambda z: np.maximum(z, 0) ** 2,
        "fatrelu": lambda z: np.where(z > 0.5, z, 0),
        "silu": lambda z: z / (1 + np.exp(-z)),
    }
    h = functions.get(activation, lambda z: np.maximum(z, 0))(g)
    for u in up:
        h = h * (np.maximum(u, 0) if activation == "drelu" else u)
    sure = np.abs(g - 0.5) > 0.02 if activation == "fatrelu" else 1  # whatever the rounding
    assert relative_error(wide(out)[0] * sure, h * sure) < 3 * ROUNDING


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("m", "k", "d"), SHAPES)
def test_adds_to_the_stream(kernels, m, k, d, biased):
    h, x = normal(m, k).astype(jnp.bfloat16), normal(m, d).astype(jnp.bfloat16)
    w, scale = weight(jnp.bfloat16, 2, k, d), normal(2, d).astype(jnp.bfloat16)
    bias = jnp.asarray(normal(2, d), jnp.bfloat16) if biased else None
    stream = run(kernels.add_product, h, w, LAYER, x, scale, bias=bias)
    expected = wide(x)[0] + wide(h)[0] @ wide(w[1])[0]
    if biased:
        expected += wide(bias[1])[0]
    assert relative_error(stream.x, expected) < ROUNDING
    assert_consistent(stream, scale[1])


def assert_consistent(stream, scale):
    """`scaled` and `squares` are those of `x` as it was rounded."""
    x, scaled, squares = wide(*stream)
    assert relative_error(scaled, x * wide(scale)[0]) < ROUNDING
    assert relative_error(squares.sum(axis=1), (x * x).sum(axis=1)) < 1e-5


def add_ffn(kernels, gate, stream, weights, counts, scale, hidden=None, *, batch):
    """Of a gate whose kernel has multiplied no tile, or those that `counts` say."""
    counts = jax.new_ref(counts)
    if hidden is None and weights.linear is not None:
        hidden = jnp.full(gate.shape, jnp.nan, gate.dtype)
    gate = Gate(gate, hidden)
    return kernels.add_ffn(gate, stream, weights, LAYER, counts, scale, batch=batch, eps=EPS)


def open_for_each(numbers, m, h):
    """Counts of two layers: of the second, so many for each of m tokens, no tile having voted."""
    counts = np.full(active_counts.zeros(2, m, h).shape, 9999, np.int32)
    tiles, numbers = np.arange(h // 64), np.broadcast_to(numbers, m).reshape(-1, 4, 1)
    of_tiles = numbers // len(tiles) + (tiles < numbers % len(tiles))
    assert (of_tiles < 128).all()
    counts[1, 0] = 0
    counts[1, 1:, active_counts.column(0) :] = (of_tiles << 8 * np.arange(4)[:, None]).sum(axis=1)
    return counts


def draw_tiles_that_are_there(counts, share):
    """Votes by which the gate's kernel has multiplied a share of the tiles, which this writes into
    `counts` of `open_for_each`. Returns whether each tile is among them."""
    against = votes.AGAINST + 3 * votes.HAS_MANY
    of_tiles = counts[1, 0, active_counts.column(0) :]
    is_there = seeds.rng().permutation(len(of_tiles)) < share * len(of_tiles)
    missing = [against, 3 * votes.HAS_SOME + votes.HAS_MANY, 4 * against]
    there = [2 * votes.HAS_SOME + 2 * votes.HAS_MANY, 4 * votes.HAS_MANY]
    choices = [seeds.rng().choice(numbers, len(of_tiles)) for numbers in (there, missing)]
    of_tiles[:] = np.where(is_there, *choices)
    return is_there


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("gated", [True, False])
# Rows one by one, as for the most that are few, and dense products.
@pytest.mark.parametrize("counted", ["few", "most", "a token has many", "many together"])
@pytest.mark.parametrize(
    ("m", "batch", "d", "h", "active"),
    [(8, 1, 1024, 5632, 0.01), (24, 17, 2048, 384, 1.0), (64, 64, 1024, 384, 0.1)],
)
def test_adds_a_sparse_block_to_the_stream(kernels, m, batch, d, h, active, counted, gated):
    x, after = normal(m, d).astype(jnp.bfloat16), normal(2, d).astype(jnp.bfloat16)
    weights = Weights(*(weight(jnp.bfloat16, 2, h, d) for _ in range(3)))
    used = weights if gated else Weights(None, weights.up, weights.down)
    gate = np.abs(normal(m, h)) * (seeds.rng().random((m, h)) < active)
    gate[0] = 0
    gate, scale = gate.astype(jnp.bfloat16), normal(d).astype(jnp.bfloat16)
    each = {"few": 3, "most": min(512, 8192 // m), "many together": 8192 // m + 1}
    numbers = np.full(m, each.get(counted, 1))
    if counted == "a token has many":
        numbers[m - 1] = 513
    counts = open_for_each(numbers, m, h)  # only speed depends on them
    stream = run(
        functools.partial(add_ffn, kernels, batch=batch),
        gate, stream_of(x, scale), used, counts, after,
    )  # fmt: skip
    up = normed(x, scale) @ wide(weights.up[1])[0].T if gated else 1.0
    expected = (wide(x)[0] + (wide(gate)[0] * up) @ wide(weights.down[1])[0])[:batch]
    stream = Stream(*(a[:batch] for a in stream))
    assert relative_error(stream.x, expected) < 2 * ROUNDING
    np.testing.assert_array_equal(np.asarray(stream.x[0]), np.asarray(x[0]))
    assert_consistent(stream, after[1])


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.3, 0.8, 1.0])
@pytest.mark.parametrize(("m", "d", "h"), [(8, 1024, 5632), (64, 2048, 384)])
def test_tiles_that_the_gate_has_multiplied_are_not_computed_again(m, d, h, share):
    x, after = normal(m, d).astype(jnp.bfloat16), normal(2, d).astype(jnp.bfloat16)
    weights = Weights(*(weight(jnp.bfloat16, 2, h, d) for _ in range(3)))
    gate = np.maximum(normal(m, h), 0).astype(jnp.bfloat16)
    exact = wide(gate)[0] * (normed(x, after[0]) @ wide(weights.up[1])[0].T)
    counts = open_for_each(513, m, h)
    of_tile = np.repeat(draw_tiles_that_are_there(counts, share), 64)
    weights.up[:, of_tile] = np.nan
    hidden = np.where(of_tile, exact, np.nan).astype(jnp.bfloat16)
    stream = run(
        functools.partial(add_ffn, HOPPER, batch=m),
        gate, stream_of(x, after[0]), weights, counts, after, hidden,
    )  # fmt: skip
    assert relative_error(stream.x, wide(x)[0] + exact @ wide(weights.down[1])[0]) < 2 * ROUNDING
    assert_consistent(stream, after[1])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("counted", [1, 513])  # rows one by one, dense products
def test_a_gate_of_minus_zero_is_not_ignored(kernels, counted):
    m, d, h = 8, 1024, 384
    weights = Weights(*(weight(jnp.bfloat16, 2, h, d) for _ in range(3)))
    weights.up[:, 5], weights.up[:, 7] = np.inf, np.nan
    gate = np.zeros((m, h), jnp.bfloat16)
    gate[3, 5] = -0.0
    counts = open_for_each(counted, m, h)
    x, scale = normal(m, d).astype(jnp.bfloat16), np.ones((2, d), jnp.bfloat16)
    stream = run(
        functools.partial(add_ffn, kernels, batch=m),
        gate, stream_of(x, scale[0]), weights, counts, scale,
    )  # fmt: skip
    is_nan = np.isnan(np.asarray(stream.x, np.float32))
    assert is_nan[3].all() and not np.delete(is_nan, 3, axis=0).any()


def test_lowers_without_a_gpu(lower):
    shape = jax.ShapeDtypeStruct
    for m in (8, 64):
        x, w = shape((m, 2048), jnp.bfloat16), shape((3, 5632, 2048), jnp.bfloat16)
        stream = Stream(x, x, shape((m, 128), jnp.float32))
        layer, scale = shape((1,), jnp.int32), shape((3, 2048), jnp.bfloat16)
        project = functools.partial(HOPPER.project, k_axis=2, eps=EPS)
        assert "token_project" in lower(project, stream, (w, w), layer)
        dense = functools.partial(hopper.token_product.hidden, eps=EPS, rectifier=None)
        assert "token_hidden_dense" in lower(dense, stream, (w, w), layer)
        h = shape((m, 5632), jnp.bfloat16)
        assert "token_add_product" in lower(HOPPER.add_product, h, w, layer, x, scale)
        ffn = functools.partial(add_ffn, HOPPER, batch=m)
        counts = jax.eval_shape(lambda m=m: active_counts.zeros(3, m, 5632))
        assert "token_add_ffn" in lower(ffn, h, stream, Weights(w, w, w), counts, scale)


@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_three_blocks_of_a_product_share_an_sm(lower, m):
    shape = jax.ShapeDtypeStruct
    x, w = shape((m, 2048), jnp.bfloat16), shape((3, 2048, 2048), jnp.bfloat16)
    stream, layer = Stream(x, x, shape((m, 128), jnp.float32)), shape((1,), jnp.int32)
    project = functools.partial(HOPPER.project, k_axis=1, eps=EPS)
    (qkv,) = launches(lower(project, stream, (w, w, w), layer)).values()
    assert SM_BYTES // (qkv.smem + 1024) == 4  # three would hold 92 of its 96 clusters
    scale = shape((3, 2048), jnp.bfloat16)
    (out,) = launches(lower(HOPPER.add_product, x, w, layer, x, scale)).values()
    assert SM_BYTES // (out.smem + 1024) == 3
