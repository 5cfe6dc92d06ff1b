"""What a sliding window leaves of a mask, and how often cuDNN's attention is computed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo

from tests import seeds
from tests.devices import abstract_gpu
from tests.errors import relative_error
from tests.twell_jax.drawn import SMALL
from twell_jax.config import ModelConfig
from twell_jax.models import Transformer, attention
from twell_jax.models.attention import in_window, split_documents
from twell_jax.models.rope import rope_table


@pytest.mark.parametrize("window", [1, 3, 7])
def test_a_token_attends_to_itself_and_those_just_before(window):
    expected = [[0 <= t - s < window for s in range(7)] for t in range(7)]
    mask = in_window(None, 0, 2, 7, window)
    if window == 7:  # all of them
        assert mask is None
    else:
        assert mask.shape == (2, 1, 7, 7)
        np.testing.assert_array_equal(mask[1, 0], expected)
    # The last four of the seven, as they come after three in a cache with room for nine.
    stored = np.arange(9) <= np.arange(3, 7)[:, None]
    cached = in_window(np.stack([stored[None], stored[None]]), 3, 2, 4, window)
    np.testing.assert_array_equal(cached[0, 0, :, :7], expected[3:])
    assert not np.any(cached[..., 7:])


def test_a_window_ends_where_a_document_does():
    _, mask = split_documents(np.array([[5, 9, 5, 5, 5]]), document_end=9)
    found = in_window(mask, 0, 1, 5, 2)
    expected = ["10000", "11000", "00100", "00110", "00011"]
    np.testing.assert_array_equal(found[0, 0], [[int(bit) for bit in row] for row in expected])


def test_what_tokens_as_long_as_can_be_attend_to_fits_8_bits():
    module = attention.Attention(ModelConfig(**SMALL, attention_bias=True), rngs=nnx.Rngs(0))
    kernel = module.value.kernel[...]
    column = kernel[:, jnp.argmax(jnp.linalg.norm(kernel, axis=0))]
    longest = jnp.float32(40)
    # Equal tokens, so that averages are of equal values, along the longest column.
    x = jnp.tile(longest * column / jnp.linalg.norm(column), (1, 5, 1))
    bounds = module.bounds(longest)
    assert 1 <= bounds.attended / jnp.abs(module.value(x)).max() < 1.3
    inner = [layer.kernel[...] for layer in (module.query, module.key, module.value)]
    assert bounds.inner == jnp.abs(jnp.stack(inner)).max()
    assert bounds.out == jnp.abs(module.out.kernel[...]).max()
    rope = rope_table(jnp.arange(5)[None], module.config)
    y, _ = module(x, rope, None, bounds=bounds)
    expected, _ = module(x, rope, None)
    assert relative_error(y, expected) < 2.0**-4


def test_quantised_projections_have_no_bounds():
    module = attention.Attention(ModelConfig(**SMALL), rngs=nnx.Rngs(0))
    module.quantise(("query", "out"))
    assert module.bounds(jnp.float32(40)) is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "is_copied"), [(1, True), (9, False)])
def test_one_query_of_a_large_cache_is_attended_without_a_matrix_product(batch, is_copied, dtype):
    slots, heads, kv_heads, size = 600, 6, 2, 256
    rng = seeds.rng()
    q, k, v = (
        jnp.asarray(rng.standard_normal((batch, *shape, size)), dtype)
        for shape in ((1, heads), (slots, kv_heads), (slots, kv_heads))
    )
    lengths = rng.integers(1, slots, batch)
    holds = np.arange(slots) < lengths[:, None]
    expected = np.zeros((batch, 1, heads, size))
    for b, h in np.ndindex(batch, heads):
        of_head = [np.asarray(a[b, :, h // 3], np.float64)[: lengths[b]] for a in (k, v)]
        scores = of_head[0] @ np.asarray(q[b, 0, h], np.float64) / size**0.5
        p = np.exp(scores - scores.max())
        expected[b, 0, h] = p / p.sum() @ of_head[1]
    k = jnp.where(holds[:, :, None, None], k, jnp.nan)
    v = jnp.where(holds[:, :, None, None], v, 0)  # as `KVCache.read` has it
    program = jax.jit(attention._attend).lower(q, k, v, holds[:, None, None])
    assert ("dot_general" in program.as_text()) == is_copied
    found = program.compile()(q, k, v, holds[:, None, None])
    assert found.dtype == dtype
    # Products in bfloat16 round p, too.
    assert relative_error(found, expected) < (1e-5 if dtype == "float32" else 2**-7)


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


@pytest.mark.parametrize(
    ("size", "dtype", "served"),
    [(8, "bfloat16", True), (128, "float16", True), (136, "bfloat16", False),
     (12, "bfloat16", False), (64, "float32", False)],
)  # fmt: skip
def test_cudnn_serves_16_bit_heads_of_up_to_128_features(on_a_gpu, lower, size, dtype, served):
    heads = jax.ShapeDtypeStruct((2, 16, 2, size), dtype)
    text = lower(lambda q: attention._attend(q, q, q, None), heads)
    assert ("__cudnn$fmha" in text) == served


def test_cudnn_leaves_out_later_tokens_with_a_mask_of_documents_too(on_a_gpu, lower):
    heads = jax.ShapeDtypeStruct((2, 16, 2, 8), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((2, 1, 16, 16), jnp.bool_)
    text = lower(lambda q, mask: attention._attend(q, q, q, mask), heads, mask)
    assert "__cudnn$fmhaScaleBias" in text
    assert re.search(r'"?mask_type"?\W+"?CAUSAL', text.replace("\\22", '"'))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("remat", "forwards"), [("none", 1), ("dots", 1), ("block", 2)])
def test_only_remat_of_whole_blocks_computes_cudnns_forward_twice(
    remat, forwards, devices, on_a_gpu
):
    config = ModelConfig(
        vocab_size=64, context=16, d_model=32, layers=2, heads=2, d_ff=48, remat=remat
    )
    module = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(module)

    def loss(params, tokens):
        return nnx.merge(graph, params)(tokens)[0].sum()

    with jax.sharding.use_abstract_mesh(abstract_gpu(shape=(1, devices))):
        traced = jax.jit(jax.grad(loss)).trace(params, jax.ShapeDtypeStruct((2, 16), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    called = re.findall(r"@__cudnn\$fmha(\w+)", text)  # in the body of each pass over the layers
    assert called == ["Softmax"] * forwards + ["SoftmaxBackward"]
