"""`sparse_ffn(implementation="mosaic")`: the kernels on a GPU, else their pure-JAX twins."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from tests.twell_jax.ffn.cases import COLUMNS, TOKENS, both_forms, draw, error, gradients, xla
from twell_jax import SparseMLP, sparse_ffn
from twell_jax.config import ModelConfig
from twell_jax.ffn.api import CannotServe
from twell_jax.models.transformer import KVCache, Transformer, graphdef

mosaic = functools.partial(sparse_ffn, implementation="mosaic")


def abstract_gpu(name, devices=1):
    device = AbstractDevice(device_kind=name, num_cores=132, platform="gpu")
    return AbstractMesh(
        (1, devices), ("data", "fsdp"), 2 * (AxisType.Auto,), abstract_device=device
    )


H100 = abstract_gpu("NVIDIA H100 80GB HBM3")


def reference(x, w_gate, w_up, w_down):
    """y, nnz [M] and sum |h| [M] in float64 behind the gate as rounded to the dtype."""
    dtype = x.dtype
    x, w_gate, w_up, w_down = (None if a is None else np.asarray(a, np.float64) for a in
                               (x, w_gate, w_up, w_down))  # fmt: skip
    g = np.maximum(x @ (w_up if w_gate is None else w_gate).T, 0)
    g = np.asarray(jnp.asarray(g, dtype), np.float64)
    h = g if w_gate is None else g * (x @ w_up.T)
    return h @ w_down, np.sum(g != 0, axis=1), np.sum(np.abs(h), axis=1)


def assert_exact(operands, implementation="mosaic"):
    y, stats = jax.jit(functools.partial(sparse_ffn, implementation=implementation))(*operands)
    y_ref, nnz, l1 = reference(*operands)
    assert y.dtype == operands[0].dtype
    assert error(y, y_ref) < 5e-3
    # A gate within rounding of zero may fall on either side of it.
    np.testing.assert_allclose(stats.nnz, nnz.mean(), rtol=1e-3)
    np.testing.assert_allclose(stats.l1, l1.mean(), rtol=5e-3)
    assert abs(int(stats.max_nnz) - nnz.max()) <= 2
    return y, stats


@both_forms
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("m", "heavy"), [(5, 1), (100, 0), (100, 1), (300, 300), (600, 7), (2100, 520)]
)
def test_any_number_of_heavy_rows(twins, m, heavy, gated, form):
    operands = draw(m, 128, 768, gated=gated)
    operands[0] = operands[0].at[:heavy, -1].set(-1)
    _, stats = assert_exact(operands, form)
    np.testing.assert_array_equal(stats.fired, xla(*operands)[1].fired)


def test_statistics_that_nobody_asks_for_are_not_computed(twins):
    def asks_for(output):
        operands = draw(100, 128, 896)
        compiled = jax.jit(lambda *operands: output(mosaic(*operands))).lower(*operands).compile()
        return "pred[896]" in compiled.as_text()  # which neurons fired

    assert asks_for(lambda result: result) and not asks_for(lambda result: result[0])


def test_all_zero(twins):
    x, w_gate, w_up, w_down = draw(100, 128, 768, threshold=1000)
    y, stats = mosaic(x, w_gate, w_up, w_down)
    assert not np.any(y) and stats.nnz == 0 and stats.l1 == 0 and not np.any(stats.fired)


@pytest.mark.parametrize("gated", [True, False])
def test_over_a_mesh_weights_are_gathered_once_and_tokens_stay(twins, gated):
    operands = draw(8 * 100, 128, 256, gated=gated)
    operands[0] = operands[0].at[5, -1].set(-1)
    mesh = jax.make_mesh((4, 2), TOKENS[0], 2 * (AxisType.Auto,), devices=jax.devices("cpu")[:8])
    with jax.set_mesh(mesh):
        x, *weights = (
            None if a is None else jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip(operands, [TOKENS, *3 * [COLUMNS]], strict=True)
        )
        compiled = jax.jit(mosaic).lower(x, *weights).compile()
        y, stats = compiled(x, *weights)
        with pytest.raises(CannotServe, match="801 tokens do not divide over 8 devices"):
            mosaic(jnp.zeros((801, 128), x.dtype), *operands[1:])
    collectives = re.findall(r" (all-gather|all-to-all|collective-permute)\(", compiled.as_text())
    assert collectives == ["all-gather"] * (3 if gated else 2)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, TOKENS), y.ndim)
    y_alone, alone = xla(*operands)
    assert error(y, y_alone) < 5e-3
    for ours, theirs in zip(*map(jax.tree.leaves, (stats, alone)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=5e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "silu"}, "must be relu"),
        ({"b_down": jnp.zeros(128, jnp.bfloat16)}, "no biases"),
        ({"dtype": jnp.float32}, "bfloat16 or float16"),
        ({"d": 96}, "D a multiple of 64"),
        ({"h": 200}, "H a multiple of 128"),
    ],
)
def test_says_why_it_cannot_serve(twins, change, reason):
    shape = {"d": 128, "h": 256, "dtype": jnp.bfloat16} | {
        k: change.pop(k) for k in ("d", "h", "dtype") if k in change
    }
    operands = draw(4, **shape)
    with pytest.raises(ValueError, match=reason):
        mosaic(*operands, **change)
    sparse_ffn(*operands, **change)  # the default serves


def test_says_that_neurons_do_not_divide(twins):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), 2 * (AxisType.Auto,))
    with (
        jax.set_mesh(mesh),
        pytest.raises(CannotServe, match="768 neurons are no multiple of 128 on each of 4 devices"),
    ):
        mosaic(*draw(100, 128, 768))


def test_says_that_there_is_no_hopper_gpu():
    with (
        jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA A100-SXM4-80GB")),
        pytest.raises(CannotServe, match="needs a Hopper GPU, got NVIDIA A100"),
    ):
        mosaic(*draw(4, 128, 256))
    if jax.devices()[0].platform != "cpu":
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="needs a Hopper GPU, got cpu"):
        mosaic(*draw(4, 128, 256))


def test_environment_forces_a_choice(monkeypatch):
    monkeypatch.setenv("TWELL_JAX_IMPLEMENTATION", "mosaic")
    operands = draw(4, 128, 200)
    with pytest.raises(ValueError, match=r"TWELL_JAX_IMPLEMENTATION.*cannot serve"):
        sparse_ffn(*operands)
    xla(*operands)  # a named implementation is not overridden
    monkeypatch.setenv("TWELL_JAX_IMPLEMENTATION", "fast")
    with pytest.raises(ValueError, match=r"TWELL_JAX_IMPLEMENTATION.*'fast'"):
        sparse_ffn(*operands)


def kernels(function, *operands, platform="cuda"):
    """How often the lowered `function` calls a Mosaic kernel."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), operands)
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,))
    return lowered.as_text().count("mosaic_gpu")


@pytest.mark.parametrize(
    ("m", "gated"), [(1, True), (64, False), (65, True), (1000, True), (1000, False)]
)
@pytest.mark.parametrize("implementation", ["mosaic", "twell", "unions"])
def test_lowers_for_an_h100(m, gated, implementation):
    function = functools.partial(sparse_ffn, implementation=implementation)
    with jax.sharding.use_abstract_mesh(H100):
        assert kernels(function, *draw(m, 512, 1408, gated=gated)) > 0


def test_by_default_the_kernels_serve_where_they_win():
    def default(m, gated=True, **change):
        return kernels(functools.partial(sparse_ffn, **change), *draw(m, 512, 1408, gated=gated))

    def gradient(*operands):
        return jax.grad(lambda *operands: jnp.sum(sparse_ffn(*operands)[0]))(*operands)

    with jax.sharding.use_abstract_mesh(H100):
        assert default(1) > 0 and default(64) > 0 and default(1024) > 0
        assert default(65) == default(1023) == 0
        for m, most in ((1, 0.05), (32, 0.05), (33, 0.02), (64, 0.02), (1024, 1.0)):
            nnz = int(most * 1408)
            assert default(m, expected_nnz=nnz) > 0
            assert default(m, expected_nnz=min(1408, nnz + 1)) == 0 or most == 1.0
        assert default(512, expected_nnz=10) == 0
        assert default(64, gated=False) > 0 and default(1024, gated=False, expected_nnz=14) > 0
        assert default(1024, gated=False) == default(1024, gated=False, expected_nnz=15) == 0
        assert default(512, gated=False, expected_nnz=10) == 0
        x, *weights = draw(256, 512, 1408)
        assert kernels(jax.vmap(lambda x: sparse_ffn(x[None], *weights)), x) == 0
        batch = jnp.stack(4 * [draw(1024, 512, 1408)[0]])
        assert kernels(jax.vmap(lambda x: sparse_ffn(x, *weights)), batch) > 0
        assert default(1024, activation="silu") == default(1024, implementation="xla") == 0
        assert kernels(gradient, *draw(1024, 512, 1408)) == 0
        assert kernels(lambda *o: gradients("mosaic", o, 1.0), *draw(1024, 512, 1408)) > 0
        assert kernels(sparse_ffn, *draw(1024, 512, 1408), platform="cpu") == 0
    with jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA A100-SXM4-80GB")):
        assert default(1024) == 0
    with jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA H20")):
        assert default(1024) > 0
    with jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA H200", devices=4)):
        assert default(1024) == 0 and default(4096) > 0


def test_a_whole_model_lowers_with_the_kernels_where_it_is_not_differentiated():
    config = ModelConfig(
        vocab_size=257,
        context=128,
        d_model=128,
        layers=2,
        heads=2,
        d_ff=256,
        dtype="bfloat16",
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
        assert kernels(loss, params, tokens) > 0
        assert kernels(lambda p, t, c: model(p).decode(t, c), params, one, cache) > 0
        assert kernels(jax.grad(loss), params, tokens) == 0
    with jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA H200")):
        assert kernels(loss, params, tokens) > 0


gpu = pytest.mark.gpu


@gpu
@both_forms
@pytest.mark.parametrize("every", [16384, 1024, 100])
def test_heavy_rows_at_full_size(every, form):
    operands = draw(16384, 2048, 5632, threshold=2.57)
    operands[0] = operands[0].at[7::every, -1].set(-1)
    assert_exact(operands, form)


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("last_feature", [1, 0, -1])
@pytest.mark.parametrize(
    ("m", "form"),
    [(1, None), (33, None), (65, "twell"), (1000, "twell"), (65, "unions"), (1000, "unions")],
)
def test_sparse_half_and_dense_rows(m, form, last_feature, gated, dtype):
    operands = draw(m, 512, 1408, gated=gated, dtype=dtype)
    operands[0] = operands[0].at[:, -1].set(last_feature)
    assert_exact(operands, form or "mosaic")


@gpu
@pytest.mark.parametrize(
    ("d", "h"),
    [
        (128, 65536),
        (192, 384),
        (512, 5632),
        (768, 128),
        (1024, 1408),
        (2048, 5632),
        (4096, 384),
        (8192, 640),
    ],
)
@pytest.mark.parametrize(("m", "form"), [(3, "mosaic"), (130, "twell"), (600, "unions")])
def test_shapes(m, form, d, h):
    operands = draw(m, d, h)
    operands[0] = operands[0].at[0, -1].set(-1)
    assert_exact(operands, form)


@gpu
@pytest.mark.parametrize("m", [4, 200])
def test_counts_at_and_above_capacity(m):
    x, w_gate, w_up, w_down = draw(m, 256, 512)
    x = x.at[:, -1].set(0).at[:, :2].set(0).at[0, 0].set(1).at[1, 1].set(1)
    w_gate = w_gate.at[:, :].set(0).at[:31, 0].set(1).at[256:288, 1].set(1)
    y, stats = assert_exact([x, w_gate, w_up, w_down])
    assert int(stats.max_nnz) == 32 and np.sum(stats.fired) == 31 + 32
    assert not np.any(y[2:])


def assert_poison_spreads_as_in_the_dense_computation(m, form, feature, poison):
    operands = draw(m, 512, 1408)
    operands[0] = operands[0].at[1, feature].set(poison)
    y, stats = jax.jit(functools.partial(sparse_ffn, implementation=form))(*operands)
    dense, dense_stats = jax.jit(xla)(*operands)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(dense))
    rest = np.arange(m) != 1
    exact, _ = jax.jit(xla)(*(a.astype(jnp.float32) for a in operands))
    assert error(y[rest], exact[rest]) < 5e-3
    assert not np.isfinite(stats.l1) and not np.isfinite(dense_stats.l1)


POISON = [
    (feature, poison)
    for feature in (5, -1)  # the last one opens (-inf) or shuts (inf) all gates at once
    for poison in (np.nan, np.inf, -np.inf)
]


@pytest.mark.parametrize(("m", "form"), [(4, "mosaic"), (100, "twell"), (100, "unions")])
@pytest.mark.parametrize(("feature", "poison"), POISON)
def test_poison_around_the_kernels(twins, m, form, feature, poison):
    assert_poison_spreads_as_in_the_dense_computation(m, form, feature, poison)


@gpu
@pytest.mark.parametrize(("m", "form"), [(4, "mosaic"), (200, "twell"), (400, "unions")])
@pytest.mark.parametrize(("feature", "poison"), POISON)
def test_poison_on_the_gpu(m, form, feature, poison):
    assert_poison_spreads_as_in_the_dense_computation(m, form, feature, poison)


@gpu
@both_forms
def test_all_zero_on_the_gpu(form):
    operands = draw(300, 512, 1408, threshold=1000)
    y, stats = jax.jit(functools.partial(sparse_ffn, implementation=form))(*operands)
    assert not np.any(y) and stats.nnz == 0


@gpu
def test_jit_of_a_module_and_export_use_the_kernels():
    mlp = SparseMLP(512, 1408, dtype=jnp.bfloat16, implementation="mosaic", rngs=nnx.Rngs(0))
    graph, params = nnx.split(mlp)
    infer = jax.jit(lambda params, x: nnx.merge(graph, params)(x)[0])
    x = jax.random.normal(jax.random.key(1), (2, 100, 512), jnp.bfloat16)
    lowered = infer.lower(params, x)
    assert "mosaic_gpu" in lowered.as_text()
    leaves, tree = jax.tree.flatten(params)
    flat = jax.jit(lambda leaves, x: infer(jax.tree.unflatten(tree, leaves), x))
    exported = jax.export.export(
        flat, disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    )(leaves, x)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(leaves, x), infer(params, x))
    mlp.implementation = "xla"
    assert error(infer(params, x), mlp(x)[0]) < 5e-3
