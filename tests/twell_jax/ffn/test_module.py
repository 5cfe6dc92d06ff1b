"""SparseMLP as anyone would use it: alone, in other models, in a Linen model, on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import seeds
from tests.twell_jax.ffn import by_hand
from twell_jax import SparseMLP, capture_stats, sparse_ffn
from twell_jax.ffn import LiveWidth, SownStats


def fresh_rngs():
    return nnx.Rngs(seeds.integer())


def draw(*shape):
    return seeds.rng().standard_normal(shape, np.float32)


def shapes(mlp):
    return {path[-1]: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(mlp, nnx.Param))}


def numpy_weights(mlp):
    flat = nnx.to_flat_state(nnx.state(mlp, nnx.Param))
    return {path[-1]: np.asarray(leaf[...], np.float64) for path, leaf in flat}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("use_bias", [True, False])
def test_parameters_are_neuron_major(gated, use_bias):
    make = functools.partial(SparseMLP, 8, 24, gated=gated, use_bias=use_bias)
    mlp = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    expected = {"w_up": (24, 8), "w_down": (24, 8)}
    if use_bias:
        expected |= {"b_up": (24,), "b_down": (8,)}
    if gated:
        expected["w_gate"] = (24, 8)
    if gated and use_bias:
        expected["b_gate"] = (24,)
    assert shapes(mlp) == expected


@pytest.mark.parametrize("gated", [True, False])
def test_output_is_the_formula(gated):
    mlp = SparseMLP(8, 24, gated=gated, use_bias=True, rngs=fresh_rngs())
    # Biases start at zero; here every one of them must matter.
    for path, leaf in nnx.to_flat_state(nnx.state(mlp, nnx.Param)):
        if path[-1].startswith("b_"):
            leaf[...] = draw(*leaf.shape)
    x = draw(3, 5, 8)
    y, stats = nnx.jit(lambda mlp: mlp(x, return_stats=True))(mlp)
    expected = by_hand.reference(numpy_weights(mlp) | {"x": x}, "relu")
    np.testing.assert_allclose(y, expected["y"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stats.l1, expected["l1"], rtol=1e-5)


def test_initial_weights_keep_the_scale_of_the_input():
    # LeCun: variance 1 / fan-in, d_model for gate and up, d_ff for down. The gates differ.
    weights = numpy_weights(SparseMLP(64, 256, rngs=nnx.Rngs(3)))
    for name, fan_in in {"w_gate": 64, "w_up": 64, "w_down": 256}.items():
        assert weights[name].std() == pytest.approx(fan_in**-0.5, rel=0.1), name
    assert not np.array_equal(weights["w_gate"], weights["w_up"])


def test_initialisers_are_called_with_the_shape_of_the_weight():
    def rows(_key, shape, dtype):
        return jnp.broadcast_to(jnp.arange(shape[0], dtype=dtype)[:, None], shape)

    mlp = SparseMLP(4, 6, up_init=rows, down_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(mlp.w_up[...][:, 0], np.arange(6))
    np.testing.assert_array_equal(mlp.w_gate[...][:, 0], np.arange(6))
    np.testing.assert_array_equal(mlp.w_down[...], np.ones((6, 4)))


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "input_dtype", "output_dtype"),
    [
        (None, "float32", "float32", "float32"),
        (None, "float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("float16", "bfloat16", "float32", "float16"),
        (None, "bfloat16", "float32", "float32"),
    ],
)
def test_dtypes(dtype, param_dtype, input_dtype, output_dtype):
    make = functools.partial(SparseMLP, dtype=dtype, param_dtype=param_dtype, use_bias=True)

    def run():
        mlp, x = make(4, 6, rngs=nnx.Rngs(0)), jnp.ones((2, 4), input_dtype)
        grads = nnx.grad(lambda mlp: mlp(x).astype(jnp.float32).sum())(mlp)
        return mlp(x), nnx.state(mlp), grads

    y, params, grads = jax.eval_shape(run)
    assert y.dtype == output_dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(param_dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(param_dtype)}


@pytest.mark.parametrize("gated", [True, False])
def test_trains_alone_and_becomes_sparse(gated):
    mlp = SparseMLP(8, 64, gated=gated, rngs=fresh_rngs())
    optimizer = nnx.Optimizer(mlp, optax.adam(1e-2), wrt=nnx.Param)
    # A constant feature, as RMS-normalised tokens have directions of: it can switch neurons off.
    x = draw(64, 8)
    x[:, 0] = 2.0
    target = np.roll(x, 1, axis=-1)

    @nnx.jit
    def step(mlp, optimizer):
        def loss(mlp):
            y, stats = mlp(x, return_stats=True)
            return jnp.mean((y - target) ** 2) + 0.03 * stats.l1, stats

        (value, stats), grads = nnx.value_and_grad(loss, has_aux=True)(mlp)
        optimizer.update(mlp, grads)
        return value, stats.nnz

    losses, nnz = zip(*(step(mlp, optimizer) for _ in range(60)), strict=True)
    assert losses[20] < 0.8 * losses[0]
    assert nnz[-1] < 0.8 * nnz[0]


def test_works_inside_a_linen_model():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(8)(x)
            y, stats = nnx.bridge.to_linen(SparseMLP, d_model=8, d_ff=24)(x, return_stats=True)
            return linen.Dense(1)(x + y), stats

    model, x = Model(), draw(5, 3)
    variables = jax.jit(model.init)(jax.random.key(1), x)

    def loss(params):
        y, stats = model.apply({**variables, "params": params}, x)
        return jnp.mean(y**2) + 0.1 * stats.l1, (y, stats)

    grads, (y, linen_stats) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    grads = linen.unbox(grads)
    found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(grads)}
    for name in ("w_gate", "w_up", "w_down"):
        (grad,) = [leaf for path, leaf in found.items() if name in path]
        assert grad.shape == (24, 8)
        assert np.any(grad)

    # and it is the same function of the same weights
    alone = jax.device_get(linen.unbox(variables["params"]))
    (module,) = [name for name in alone if "Dense" not in name]
    x1 = x @ alone["Dense_0"]["kernel"] + alone["Dense_0"]["bias"]
    y1, stats = jax.jit(sparse_ffn)(x1, **alone[module])
    expected = (x1 + y1) @ alone["Dense_1"]["kernel"] + alone["Dense_1"]["bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(linen_stats.l1, stats.l1, rtol=1e-6)


@pytest.mark.parametrize(
    ("rules", "matrix", "d_ff_bias", "d_model_bias"),
    [
        ((("embed", "x"), ("mlp", None)), P(None, "x"), P(None), P("x")),
        ((("embed", None), ("mlp", "x")), P("x", None), P("x"), P(None)),
    ],
    ids=["fsdp", "tensor"],
)
def test_logical_axes_map_to_the_mesh(rules, matrix, d_ff_bias, d_model_bias):
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices("cpu")[:8])
    abstract = nnx.eval_shape(lambda: SparseMLP(16, 24, use_bias=True, rngs=nnx.Rngs(0)))
    with nnx.logical_axis_rules(rules):
        shardings = nnx.get_named_sharding(nnx.state(abstract), mesh)
    specs = {path[-1]: leaf.get_value().spec for path, leaf in nnx.to_flat_state(shardings)}
    weights = dict.fromkeys(("w_gate", "w_up", "w_down"), matrix)
    biases = {"b_gate": d_ff_bias, "b_up": d_ff_bias, "b_down": d_model_bias}
    assert specs == weights | biases


def test_is_made_and_used_on_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Explicit,), devices=jax.devices("cpu")[:8])
    alone, x = SparseMLP(8, 24, rngs=nnx.Rngs(0)), draw(8, 8)
    with jax.set_mesh(mesh), nnx.logical_axis_rules((("embed", "x"), ("mlp", None))):
        mlp = SparseMLP(8, 24, rngs=nnx.Rngs(0))
        state = nnx.state(mlp)
        nnx.update(mlp, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
        placed = jax.device_put(x, NamedSharding(mesh, P("x")))
        y = nnx.jit(lambda mlp, x: mlp(x))(mlp, placed)
    np.testing.assert_allclose(y, nnx.jit(lambda mlp, x: mlp(x))(alone, x), rtol=1e-5, atol=1e-6)


def test_fewer_tokens_than_devices_are_served():
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,), devices=jax.devices("cpu")[:8])
    mlp, x = SparseMLP(8, 24, rngs=nnx.Rngs(0)), draw(3, 8)
    alone = nnx.jit(lambda mlp, x: mlp(x))(mlp, x)
    with jax.set_mesh(mesh):
        y = nnx.jit(lambda mlp, x: mlp(x))(mlp, x)
    np.testing.assert_allclose(y, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "x",
    [
        np.ones((3, 8)),
        np.ones((3, 8), int),
        np.ones((3, 8), bool),
        jnp.asarray(np.ones((3, 8), np.int8)),
        nnx.Param(jnp.asarray(np.ones((3, 8)))),
        nnx.Variable(jnp.asarray(np.ones((3, 8), int))),
        [[1] * 8] * 3,
    ],
    ids=["float64", "int64", "bool", "jax.Array of int8", "Param", "Variable", "list"],
)
def test_takes_the_inputs_that_a_linear_layer_takes(x, param_dtype):
    mlp = SparseMLP(8, 24, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    y = mlp(x)
    linear = functools.partial(nnx.Linear, param_dtype=param_dtype)
    assert y.dtype == nnx.eval_shape(lambda: linear(8, 24, rngs=nnx.Rngs(0))(x)).dtype
    np.testing.assert_array_equal(y, mlp(np.ones((3, 8), y.dtype)))


def test_wrong_width_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"x must be \[..., 8\].*got \[2, 5\]"):
        SparseMLP(8, 24, rngs=nnx.Rngs(0))(draw(2, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 0}, "^d_model must be a positive integer, got 0"),
        ({"d_ff": 24.0}, "^d_ff must be a positive integer, got 24.0"),
        ({"activation": "gelu"}, "^activation must be one of .*'gelu'"),
        ({"implementation": "cuda"}, "^implementation must be 'xla', 'mosaic' or None, got 'cuda'"),
        ({"packing": "csr"}, "^packing must be 'twell', 'unions' or None, got 'csr'"),
        ({"gradients": "some"}, "^gradients must be 'dense', 'sparse', .* or None, got 'some'"),
        ({"gradients": 0}, "^gradients must .*, a capacity above 0 and at most 1, .* got 0"),
        ({"dtype": "float64"}, "^dtype must be one of bfloat16, float16, float32, got float64"),
        ({"dtype": "bf16"}, "^dtype must be one of bfloat16, float16, float32, got bf16"),
        ({"param_dtype": "int32"}, "^param_dtype must be a floating-point dtype, got int32"),
        ({"param_dtype": "half-ish"}, "^param_dtype must be a floating-point dtype, got half-ish"),
    ],
)
def test_a_bad_argument_is_named_when_it_is_made(change, message):
    with pytest.raises(ValueError, match=message):
        SparseMLP(**({"d_model": 8, "d_ff": 24, "rngs": nnx.Rngs(0)} | change))


def sequential(rngs):
    """Two blocks in a model of somebody else."""
    return nnx.Sequential(
        SparseMLP(8, 24, rngs=rngs), nnx.LayerNorm(8, rngs=rngs), SparseMLP(8, 40, rngs=rngs)
    )


def test_a_model_returns_the_statistics_of_all_its_blocks():
    x = draw(5, 8)

    def by_hand(model):
        first, norm, second = model.layers
        hidden, stats = first(x, return_stats=True)
        y, stats_of_second = second(norm(hidden), return_stats=True)
        return y, stats, stats_of_second

    found = nnx.jit(lambda model: (capture_stats(model)(x), model(x), by_hand(model)))
    (y, stats), alone, (_, expected, expected_second) = found(sequential(fresh_rngs()))
    np.testing.assert_array_equal(y, alone)
    assert list(stats.modules) == ["layers/0", "layers/2"]
    for ours, theirs in zip(stats.modules.values(), (expected, expected_second), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    np.testing.assert_allclose(stats.l1, (expected.l1 + expected_second.l1) / 2, rtol=1e-6)
    np.testing.assert_allclose(stats.nnz, (expected.nnz + expected_second.nnz) / 2, rtol=1e-6)


def test_a_block_that_is_called_twice_counts_twice():
    block, x = SparseMLP(8, 24, rngs=fresh_rngs()), draw(3, 8)

    class Twice(nnx.Module):
        def __init__(self):
            self.block = block

        def __call__(self, x):
            return self.block(self.block(x))

    _, stats = capture_stats(Twice())(x)
    assert list(stats.modules) == ["block", "block#1"]


def test_nothing_is_kept_where_nobody_captures():
    mlp = SparseMLP(8, 24, rngs=nnx.Rngs(0))
    before = nnx.graphdef(mlp)
    for _ in range(2):
        mlp(draw(3, 8))
    assert nnx.graphdef(mlp) == before
    assert not jax.tree.leaves(nnx.state(mlp, SownStats))


def test_a_model_without_sparse_blocks_is_named():
    with pytest.raises(ValueError, match="called no SparseMLP"):
        nnx.eval_shape(lambda: capture_stats(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))(draw(3, 8)))


WIDTHS = np.array([0, 5, 24], np.int32)  # numbers of live neurons


def truncated(x, mlp, live, layer=...):
    """y in float64 from the weights of the live neurons."""
    weights = (mlp.w_gate, mlp.w_up, mlp.w_down)
    gate, up, down = (np.asarray(w[layer], np.float64)[:live] for w in weights)
    return (np.maximum(x @ gate.T, 0) * (x @ up.T)) @ down


def test_the_number_of_live_neurons_can_be_changed_without_compiling_anew():
    mlp, x = SparseMLP(8, 24, live=7, rngs=fresh_rngs()), draw(5, 8)
    compiled = []

    @nnx.jit
    def call(mlp, x):
        compiled.append(True)
        return mlp(x)

    for live in (7, 0, 24):
        mlp.live[...] = jnp.int32(live)
        np.testing.assert_allclose(call(mlp, x), truncated(x, mlp, live), rtol=1e-4, atol=1e-5)
    assert len(compiled) == 1


def test_layers_in_a_scan_have_their_own_number_of_live_neurons():
    make = nnx.vmap(lambda rngs: SparseMLP(8, 24, live=24, rngs=rngs))
    mlps, x = make(fresh_rngs().split(3)), draw(5, 8)
    assert mlps.live[...].shape == (3,)
    mlps.live[...] = jnp.asarray(WIDTHS)

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, mlp):
        return x + mlp(x)

    y = run(x, mlps)
    expected = x.astype(np.float64)
    for layer, live in enumerate(WIDTHS):
        expected = expected + truncated(expected, mlps, live, layer)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_an_optimizer_leaves_the_number_of_live_neurons_alone():
    mlp, x = SparseMLP(8, 24, live=7, rngs=fresh_rngs()), draw(5, 8)
    optimizer = nnx.Optimizer(mlp, optax.sgd(0.1), wrt=nnx.Param)
    before = jax.tree.map(np.array, nnx.state(mlp))
    optimizer.update(mlp, nnx.grad(lambda mlp: jnp.sum(mlp(x) ** 2))(mlp))
    assert [leaf.dtype for leaf in jax.tree.leaves(nnx.state(mlp, LiveWidth))] == [jnp.int32]
    assert mlp.live[...] == 7
    for name in ("w_gate", "w_up", "w_down"):
        new, old = np.asarray(getattr(mlp, name)), np.asarray(before[name])
        np.testing.assert_array_equal(new[7:], old[7:])
        assert not np.array_equal(new[:7], old[:7])


@pytest.mark.parametrize("live", [-1, 25, 2.0])
def test_what_is_no_number_of_live_neurons_is_named(live):
    with pytest.raises(ValueError, match=r"^live must be "):
        SparseMLP(8, 24, live=live, rngs=nnx.Rngs(0))
