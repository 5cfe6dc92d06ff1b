"""Wherever a `SparseMLP` is put, the L1 of all layers reaches the loss, and so do its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from tests import seeds
from twell_jax import FFNStats, ModelStats, SparseMLP, capture_stats, collect_stats, sparse_ffn
from twell_jax.ffn.stats import NOT_MEASURED

LAYERS, D, H = 3, 8, 24
NAMES = ("w_gate", "w_up", "w_down")


class Stacked(nnx.Module):
    """All layers in one module, whose weights have a leading axis, under `nnx.scan`."""

    def __init__(self, is_remat):
        make = nnx.vmap(lambda rngs: SparseMLP(D, H, rngs=rngs))
        self.blocks = nnx.jit(nnx.split_rngs(splits=LAYERS)(make))(nnx.Rngs(0))
        self.is_remat = is_remat

    def __call__(self, x):
        def layer(x, block):
            return block(x)

        layer = nnx.remat(layer) if self.is_remat else layer
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


class Remat(nnx.Module):
    """Layers that are computed again in the backward pass."""

    def __init__(self):
        self.blocks = nnx.List([SparseMLP(D, H, rngs=nnx.Rngs(0)) for _ in range(LAYERS)])

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x


def sequential():
    return nnx.Sequential(*[SparseMLP(D, H, rngs=nnx.Rngs(0)) for _ in range(LAYERS)])


NNX_MODELS = {
    "sequential": sequential,
    "scan": functools.partial(Stacked, is_remat=False),
    "scan of remat": functools.partial(Stacked, is_remat=True),
    "remat": Remat,
}


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x, _=None):
        make = nnx.bridge.to_linen(SparseMLP, D, H, keep_stats=True, name="mlp")
        return make(x), None


class LinenModel(linen.Module):
    wrap: str

    @linen.compact
    def __call__(self, x):
        if self.wrap == "scan":
            axes = {"params": 0, "SownStats": 0}
            scan = functools.partial(linen.scan, variable_axes=axes, split_rngs={"params": True})
            return scan(LinenLayer, length=LAYERS)(name="layers")(x, None)[0]
        layer = linen.remat(LinenLayer) if self.wrap == "remat" else LinenLayer
        for i in range(LAYERS):
            x, _ = layer(name=f"layer{i}")(x)
        return x


@pytest.fixture
def weights():
    """Of all layers, `[LAYERS, H, D]`."""
    rng = seeds.rng()
    return {name: rng.standard_normal((LAYERS, H, D), np.float32) / 2 for name in NAMES}


@pytest.fixture
def x():
    return seeds.rng().standard_normal((5, D), np.float32)


def by_hand(weights, x):
    """The mean L1 of the layers, each of which returns its statistics."""
    total = 0.0
    for i in range(LAYERS):
        x, stats = sparse_ffn(x, *(weights[name][i] for name in NAMES))
        total += stats.l1 / LAYERS
    return total


def check(l1, grads, weights, x):
    expected, expected_grads = jax.jit(jax.value_and_grad(by_hand))(weights, x)
    np.testing.assert_allclose(l1, expected, rtol=1e-5)
    for name in NAMES:
        np.testing.assert_allclose(grads[name], expected_grads[name], rtol=1e-4, atol=1e-5)
        for layer in range(LAYERS - (name == "w_down")):  # nothing comes behind the last w_down
            assert np.any(grads[name][layer])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NNX_MODELS)
def test_in_an_nnx_model(name, weights, x):
    model = NNX_MODELS[name]()
    is_stacked = "scan" in name
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaf[...] = weights[path[-1]] if is_stacked else weights[path[-1]][path[-2]]

    @nnx.jit
    def step(model, x):
        return nnx.value_and_grad(lambda model: capture_stats(model)(x)[1].l1)(model)

    l1, state = step(model, x)
    grads = {weight: [] for weight in NAMES}
    for path, leaf in nnx.to_flat_state(state):  # in the order of the layers
        grads[path[-1]].append(leaf[...])
    check(l1, {n: jnp.stack(g).reshape(LAYERS, H, D) for n, g in grads.items()}, weights, x)


def linen_params(wrap, weights):
    if wrap == "scan":
        return {"layers": {"mlp": weights}}
    layers = [{"mlp": {name: w[i] for name, w in weights.items()}} for i in range(LAYERS)]
    return {f"layer{i}": layer for i, layer in enumerate(layers)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrap", ["nothing", "scan", "remat"])
def test_in_a_linen_model(wrap, weights, x):
    model, params = LinenModel(wrap), linen_params(wrap, weights)
    made = linen.unbox(jax.eval_shape(model.init, jax.random.key(0), x)["params"])
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)

    @jax.jit
    @jax.value_and_grad
    def step(params, x):
        _, updated = model.apply({"params": params}, x, mutable=["SownStats"])
        return collect_stats(updated["SownStats"]).l1

    l1, grads = step(params, x)
    leaves = [grads["layers"]["mlp"]] if wrap == "scan" else [g["mlp"] for g in grads.values()]
    stacked = {n: jnp.stack([g[n] for g in leaves]).reshape(LAYERS, H, D) for n in NAMES}
    check(l1, stacked, weights, x)


def test_statistics_in_linen_are_those_of_the_last_call_and_named_by_their_path(weights, x):
    model, variables = LinenModel("nothing"), {"params": linen_params("nothing", weights)}
    for scale in (1, 0):
        _, updated = model.apply(variables, scale * x, mutable=["SownStats"])
        stats = collect_stats(updated["SownStats"])
        assert list(stats.modules) == [f"layer{i}/mlp" for i in range(LAYERS)]
        assert (stats.l1 > 0) == (stats.nnz > 0) == bool(scale)
        variables |= updated


def test_a_stack_of_layers_counts_as_its_layers():
    class Model(nnx.Module):
        def __init__(self):
            self.stack, self.alone = Stacked(is_remat=False), SparseMLP(D, H, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.alone(self.stack(x))

    x = np.ones((2, D), np.float32)
    stats = nnx.jit(lambda model: capture_stats(model)(x)[1])(Model())
    alone, stack = (stats.modules[name] for name in ("alone", "stack/blocks"))
    np.testing.assert_allclose(stats.l1, (alone.l1 + stack.l1.sum()) / (1 + LAYERS), rtol=1e-6)
    np.testing.assert_allclose(stats.nnz, (alone.nnz + stack.nnz.sum()) / (1 + LAYERS), rtol=1e-6)


def stats_of(nnz, union, overflow, layers=()):
    """`FFNStats` of blocks of 20 neurons."""
    numbers = {"nnz": nnz, "union": union, "listed": 0.25, "overflow": overflow, "l1": 2.0}
    arrays = {name: jnp.broadcast_to(jnp.float32(n), layers) for name, n in numbers.items()}
    arrays |= {name: jnp.ones((*layers, 20), int) for name in ("fired", "tiles")}
    return FFNStats(max_nnz=jnp.full(layers, 7), **arrays)


def test_the_statistics_of_a_model_are_a_line_and_a_table():
    stack = stats_of(nnz=jnp.array([1.0, 2.0]), union=0.5, overflow=jnp.array([0, 1]), layers=(2,))
    stats = ModelStats({"first": stats_of(6.0, union=0.2, overflow=0), "stack/mlp": stack})
    means = {name: float(getattr(stats, name)) for name in ("nnz", "union", "listed", "overflow")}
    assert means == pytest.approx({"nnz": 3, "union": 0.4, "listed": 0.25, "overflow": 1 / 3})
    assert repr(stats) == (
        "ModelStats(3 blocks: nnz 3.0, zeros 85.0%, U 40.0%, listed 25.0%, overflow 33%, L1 2)"
    )
    assert stats.table().splitlines() == [
        "block         nnz  max nnz  zeros      U  listed  overflow",
        "first         6.0        7  70.0%  20.0%   25.0%        0%",
        "stack/mlp[0]  1.0        7  95.0%  50.0%   25.0%        0%",
        "stack/mlp[1]  2.0        7  90.0%  50.0%   25.0%      100%",
        "all           3.0        7  85.0%  40.0%   25.0%       33%",
    ]


def test_what_a_block_did_not_measure_is_not_a_number():
    modules = {"a": stats_of(1.0, NOT_MEASURED, 0), "b": stats_of(1.0, 0.5, 0)}
    stats = ModelStats(modules)
    assert stats.union == NOT_MEASURED and stats.listed == 0.25
    rows = stats.table().splitlines()[1:]
    assert [row.split()[4] for row in rows] == ["-", "50.0%", "-"]


def test_statistics_without_values_have_a_line_and_say_where_the_table_is():
    def traced(x):
        stats = ModelStats({"a": stats_of(x, 0.5, 0)})
        assert repr(stats).startswith("ModelStats(1 blocks, without values")
        return stats

    with pytest.raises(TypeError, match="return the ModelStats and print its table outside"):
        jax.eval_shape(traced, 1.0).table()


def test_a_collection_without_statistics_is_named():
    for collection in ({}, {"mlp": {"w_up": jnp.ones((2, 3))}}):  # the latter of parameters
        with pytest.raises(ValueError, match="called no SparseMLP"):
            collect_stats(collection)
