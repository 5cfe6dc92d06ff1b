"""The kernels in programs for a Hopper GPU: lowered without one, exported on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.conformance.cases import draw, gradients
from tests.devices import H100, abstract_gpu
from tests.equations import kernel_calls
from tests.errors import relative_error
from twell_jax import SparseMLP, sparse_ffn
from twell_jax.config import ModelConfig
from twell_jax.models.transformer import KVCache, Transformer, graphdef


def lowered(function, *operands, platform="cuda"):
    """The program of `function`, as text."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), operands)
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("m", "gated", "packing"),
    [
        (1, True, None),
        (64, False, "unions"),
        (65, True, "unions"),
        (1000, True, None),
        (1000, False, "twell"),
        (1000, False, "unions"),
    ],
)
def test_lowers_for_an_h100(m, gated, packing):
    function = functools.partial(sparse_ffn, implementation="mosaic", packing=packing)
    with jax.sharding.use_abstract_mesh(H100):
        assert "mosaic_gpu" in lowered(function, *draw(m, 512, 1408, gated=gated))


def test_kernels_are_in_the_program_where_the_table_says_so():
    def default(m, gated=True, **change):
        function = functools.partial(sparse_ffn, **change)
        return kernel_calls(function, *draw(m, 512, 1408, gated=gated))

    def gradient(*operands):
        return jax.grad(lambda *operands: jnp.sum(sparse_ffn(*operands)[0]))(*operands)

    with jax.sharding.use_abstract_mesh(H100):
        few_tokens, dense_block, unions = (default(m) for m in (64, 65, 2048))
        assert few_tokens == dense_block == default(2047) == 2 < unions
        x, *weights = draw(256, 512, 1408)
        assert kernel_calls(jax.vmap(lambda x: sparse_ffn(x[None], *weights)), x) == 0
        batch = jnp.stack(4 * [draw(2048, 512, 1408)[0]])
        assert kernel_calls(jax.vmap(lambda x: sparse_ffn(x, *weights)), batch) > 0
        assert default(1024, activation="silu") == default(1024, implementation="xla") == 0
        operands = draw(1024, 512, 1408)
        assert kernel_calls(gradient, *operands) == 0
        for kind in ("dense", "sparse"):
            ffn = functools.partial(sparse_ffn, implementation="mosaic", gradients=kind)
            found = kernel_calls(lambda *o, ffn=ffn: gradients(ffn, o, 1.0)[0], *operands)
            assert (found > 0) == (kind == "sparse")
        assert "mosaic_gpu" not in lowered(sparse_ffn, *operands, platform="cpu")
    with jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA H200", (1, 4))):
        # 512 and 2048 tokens on a device
        assert default(2048) == dense_block and default(8192) == unions


def test_a_whole_model_has_the_kernels_of_blocks_where_it_is_not_differentiated():
    config = ModelConfig(
        vocab_size=257, context=128, d_model=128, layers=2, heads=2, d_ff=256, dtype="bfloat16"
    )
    params = jax.eval_shape(lambda: nnx.state(Transformer(config, rngs=nnx.Rngs(0))))
    model = functools.partial(nnx.merge, graphdef(config))

    def loss(params, tokens):
        logits, stats = model(params)(tokens)
        return jnp.mean(logits) + jnp.mean(stats.l1)

    tokens = jax.ShapeDtypeStruct((11, 100), jnp.int32)
    cache = jax.eval_shape(lambda: KVCache.empty(config, 1, 8))
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    with jax.sharding.use_abstract_mesh(H100):
        assert kernel_calls(loss, params, tokens) > 0
        assert kernel_calls(lambda p, t, c: model(p).decode(t, c), params, one, cache) > 0
        assert kernel_calls(jax.grad(loss), params, tokens) == 2  # those of a layer's norms
    with jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA H200")):
        assert kernel_calls(loss, params, tokens) > 0


@pytest.mark.gpu
def test_jit_of_a_module_and_export_use_the_kernels():
    mlp = SparseMLP(512, 1408, dtype=jnp.bfloat16, implementation="mosaic", rngs=nnx.Rngs(0))
    graph, params = nnx.split(mlp)
    infer = jax.jit(lambda params, x: nnx.merge(graph, params)(x))
    x = jax.random.normal(jax.random.key(1), (2, 100, 512), jnp.bfloat16)
    assert "mosaic_gpu" in infer.lower(params, x).as_text()
    leaves, tree = jax.tree.flatten(params)
    flat = jax.jit(lambda leaves, x: infer(jax.tree.unflatten(tree, leaves), x))
    exported = jax.export.export(
        flat, disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    )(leaves, x)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(leaves, x), infer(params, x))
    mlp.implementation = "xla"
    assert relative_error(infer(params, x), mlp(x)) < 5e-3
