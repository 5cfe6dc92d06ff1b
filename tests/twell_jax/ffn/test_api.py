"""sparse_ffn against float64 numpy, under JAX's transformations, and in its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import seeds
from tests.errors import relative_error
from tests.twell_jax.ffn.by_hand import (
    call,
    eager,
    gradient,
    loss,
    make,
    reference,
    reference_gradient,
)
from twell_jax import Biases, sparse_ffn

DTYPES = ["float32", "bfloat16", "float16"]
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("gated", [False, True])
def test_output_and_l1_match_float64(gated, activation, dtype):
    inputs = make((5, 7), 13, 37, dtype, gated=gated, bias=True)
    y, stats = call(inputs, activation=activation)
    expected = reference(inputs, activation)
    assert y.dtype == dtype
    assert relative_error(y, expected["y"]) < TOLERANCE[dtype]
    assert stats.l1.dtype == jnp.float32
    assert relative_error(stats.l1, expected["l1"]) < TOLERANCE[dtype]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("lead", "dtype"),
    [((), "float32"), ((6,), "float32"), *(((2, 3, 4), dtype) for dtype in DTYPES)],
)
@pytest.mark.parametrize("gated", [False, True])
def test_small_integers_are_exact_for_any_leading_dimensions(lead, gated, dtype):
    # Products of these are exact in every dtype, and exact zeros occur before the ReLU.
    inputs = make(lead, 3, 5, dtype, gated=gated, bias=True, integers=True)
    y, stats = call(inputs)
    expected = reference(inputs, "relu")
    np.testing.assert_array_equal(np.asarray(y, np.float64), expected["y"])
    np.testing.assert_array_equal(stats.fired, expected["fired"])
    assert stats.max_nnz == expected["max_nnz"]
    np.testing.assert_allclose(stats.nnz, expected["nnz"], rtol=1e-6)
    np.testing.assert_allclose(stats.l1, expected["l1"], rtol=1e-6)
    dtypes = [stat.dtype for stat in (stats.l1, stats.nnz, stats.max_nnz, stats.fired)]
    assert dtypes == [jnp.float32, jnp.float32, jnp.int32, jnp.bool]


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_match_float64(gated, activation):
    inputs = make((11,), 6, 17, "float32", gated=gated, bias=True)
    dy = seeds.rng().normal(size=(11, 6)).astype(np.float32)
    grads = gradient(inputs, dy, 2.5, activation)
    expected = reference_gradient(inputs, activation, dy, 2.5)
    assert set(grads) == set(expected)
    for name, grad in grads.items():
        assert relative_error(grad, expected[name]) < 1e-5, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_in_half_precision(dtype):
    inputs = make((11,), 6, 17, dtype)
    dy = seeds.rng().normal(size=(11, 6)).astype(jnp.dtype(dtype)).astype(np.float32)
    grads = gradient(inputs, dy, 0.5)
    expected = reference_gradient(inputs, "relu", dy, 0.5)
    for name, grad in grads.items():
        assert grad.dtype == dtype
        assert relative_error(grad, expected[name]) < 4 * TOLERANCE[dtype], name


def test_gradients_under_checkpoint():
    inputs = make((11,), 6, 17, "float32", bias=True)
    dy = seeds.rng().normal(size=(11, 6)).astype(np.float32)
    grads = jax.jit(jax.grad(jax.checkpoint(loss)))(inputs, dy, 1.5)
    expected = reference_gradient(inputs, "relu", dy, 1.5)
    for name, grad in grads.items():
        assert relative_error(grad, expected[name]) < 1e-5, name


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_the_default_device_may_be_a_platform(implementation):
    inputs = make((5,), 4, 9, "float32")
    with jax.default_device("cpu"):
        _, stats = call(inputs, implementation=implementation)
    assert stats.max_nnz == reference(inputs, "relu")["max_nnz"]


def test_vmap_is_a_loop():
    # Over experts: every one has weights and tokens of its own.
    experts = [make((4,), 6, 17, "float32") for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *experts)
    dy = seeds.rng().normal(size=(4, 6)).astype(np.float32)
    y, stats = jax.vmap(call)(stacked)
    grads = jax.vmap(gradient, in_axes=(0, None, None))(stacked, dy, 1.5)
    for i, inputs in enumerate(experts):
        expected = reference(inputs, "relu")
        assert relative_error(y[i], expected["y"]) < 1e-5
        assert stats.max_nnz[i] == expected["max_nnz"]
        np.testing.assert_array_equal(stats.fired[i], expected["fired"])
        for name, value in reference_gradient(inputs, "relu", dy, 1.5).items():
            assert relative_error(grads[name][i], value) < 1e-5, name


def make_mesh(axis_type):
    return jax.make_mesh((8,), ("x",), (axis_type,), devices=jax.devices("cpu")[:8])


def test_shard_map_over_tokens_equals_one_device():
    mesh = make_mesh(AxisType.Auto)
    inputs = make((16,), 8, 24, "float32")
    x, weights = inputs.pop("x"), inputs
    dy = seeds.rng().normal(size=(16, 8)).astype(np.float32)

    def local(x, weights):
        y, stats = call({"x": x, **weights})
        return y, jax.lax.pmean(stats.l1, "x"), jax.lax.pmax(stats.max_nnz, "x")

    @jax.jit
    def sharded_loss(x, weights):
        spread = jax.shard_map(
            local, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P(), P())
        )
        y, l1, max_nnz = spread(x, weights)
        return jnp.sum(y * dy) + 1.5 * l1, (y, l1, max_nnz)

    gradient = jax.grad(sharded_loss, argnums=(0, 1), has_aux=True)
    (dx, dweights), (y, l1, max_nnz) = gradient(x, weights)
    expected = reference({"x": x, **weights}, "relu")
    assert relative_error(y, expected["y"]) < 1e-5
    assert relative_error(l1, expected["l1"]) < 1e-5
    assert max_nnz == expected["max_nnz"]
    for name, value in reference_gradient({"x": x, **weights}, "relu", dy, 1.5).items():
        assert relative_error({"x": dx, **dweights}[name], value) < 1e-5, name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("axis_type", "weight_spec"),
    [
        (AxisType.Auto, P(None, "x")),
        (AxisType.Auto, P("x")),
        (AxisType.Explicit, P()),
        (AxisType.Explicit, P(None, "x")),
        (AxisType.Explicit, P("x")),
    ],
    ids=["fsdp", "tensor", "data, explicit", "fsdp, explicit", "tensor, explicit"],
)
def test_sharded_jit_equals_one_device(axis_type, weight_spec):
    mesh = make_mesh(axis_type)
    inputs = make((16,), 8, 24, "float32")
    dy = seeds.rng().normal(size=(16, 8)).astype(np.float32)
    specs = {name: weight_spec for name in inputs} | {"x": P("x")}
    placed = {n: jax.device_put(v, NamedSharding(mesh, specs[n])) for n, v in inputs.items()}
    with jax.set_mesh(mesh):
        y, stats = call(placed)
        grads = gradient(placed, dy, 1.5)
    expected = reference(inputs, "relu")
    assert relative_error(y, expected["y"]) < 1e-5
    assert relative_error(stats.l1, expected["l1"]) < 1e-5
    assert stats.max_nnz == expected["max_nnz"]
    np.testing.assert_array_equal(stats.fired, expected["fired"])
    for name, value in reference_gradient(inputs, "relu", dy, 1.5).items():
        assert relative_error(grads[name], value) < 1e-5, name
    if axis_type == AxisType.Explicit:
        assert y.sharding.is_equivalent_to(placed["x"].sharding, y.ndim)
        for name, grad in grads.items():
            assert grad.sharding.is_equivalent_to(placed[name].sharding, grad.ndim), name


def test_the_mesh_of_operands_need_not_be_set_if_only_tokens_are_split():
    mesh = make_mesh(AxisType.Explicit)
    inputs = make((16,), 8, 24, "float32")
    placed = {n: jax.device_put(v, NamedSharding(mesh, P())) for n, v in inputs.items()}
    placed["x"] = jax.device_put(inputs["x"], NamedSharding(mesh, P("x")))
    y, _ = call(placed)
    assert relative_error(y, reference(inputs, "relu")["y"]) < 1e-5
    placed["w_up"] = jax.device_put(inputs["w_up"], NamedSharding(mesh, P("x")))
    with pytest.raises(ValueError, match=r"sharded as P\('x', None\).*inside jax.set_mesh"):
        eager(placed)


def cancelling(n, dtype):
    """A shuffled vector whose sum, n - 4, is lost if partial sums are kept in 16 bits."""
    big = {"bfloat16": 2.0**15, "float16": 60000.0}[dtype]
    vector = np.array([big, big, -big, -big] + [1.0] * (n - 4))
    return seeds.rng().permutation(vector)


def first_column(values, dtype):
    """A square matrix with `values` in its first column and zeros elsewhere."""
    matrix = np.zeros((len(values), len(values)), jnp.dtype(dtype))
    matrix[:, 0] = values
    return matrix


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("jit", "dtype"), [(True, "bfloat16"), (True, "float16"), (False, "bfloat16")]
)
def test_sums_accumulate_in_float32(dtype, jit):
    def weighted_sum(inputs, weights):
        return jnp.sum(eager(inputs)[0] * weights)

    n, transform = 260, jax.jit if jit else lambda f: f
    f, gradient = transform(eager), transform(jax.grad(weighted_sum))
    ones, one = np.ones(n), np.arange(n) == 0
    spread = cancelling(n, dtype)
    # over D, in the up projection: every hidden unit is 256
    inputs = {"x": np.ones((n, n)), "w_up": np.tile(spread, (n, 1)), "w_down": np.eye(n)}
    y, stats = f({name: values.astype(jnp.dtype(dtype)) for name, values in inputs.items()})
    np.testing.assert_array_equal(np.asarray(y, np.float32), 256.0)
    assert stats.l1 == 256.0 * n  # beyond float16 and finer than bfloat16
    # over H, in the down projection
    inputs = {"x": one, "w_up": ones, "w_down": spread}
    y, _ = f({name: first_column(values, dtype) for name, values in inputs.items()})
    assert y[0, 0] == 256.0
    # over tokens, in the gradient of the weights
    inputs = {"x": ones, "w_up": one, "w_down": one}
    inputs = {name: first_column(values, dtype) for name, values in inputs.items()}
    grads = gradient(inputs, first_column(spread, "float32"))
    assert grads["w_up"][0, 0] == grads["w_down"][0, 0] == 256.0


@pytest.mark.parametrize("jit", [False, True])
def test_what_rounds_to_zero_is_zero(jit):
    # 1e-5 * 1e-5 is below float16: the stored activation is zero, so it does not count.
    tiny, one = np.full((1, 1), 1e-5, np.float16), np.ones((1, 1), np.float16)
    f = call if jit else eager
    for inputs in (
        {"x": tiny, "w_up": tiny, "w_down": one},
        {"x": tiny, "w_gate": tiny, "w_up": one, "w_down": one},
    ):
        _, stats = f(inputs)
        assert (stats.nnz, stats.max_nnz, stats.l1) == (0, 0, 0)
        assert not stats.fired.any()


def test_all_zero_and_all_dense():
    x, w = np.ones((5, 4), np.float32), np.ones((9, 4), np.float32)
    dense = {"x": x, "w_gate": w, "w_up": w, "w_down": w}
    y, stats = call(dense)
    assert (stats.nnz, stats.max_nnz) == (9, 9)
    assert np.all(stats.fired)
    closed = dense | {"w_gate": -w}
    y, stats = call(closed)
    assert not np.any(y)
    assert (stats.l1, stats.nnz, stats.max_nnz) == (0, 0, 0)
    assert not np.any(stats.fired)
    assert not any(np.any(grad) for grad in gradient(closed, x, 1.0).values())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "w_gate", "w_up", "w_down"])
def test_non_finite_values_propagate_as_in_the_formula(where, bad):
    inputs = make((5,), 4, 9, "float32")
    inputs[where][2, 1] = bad
    y, stats = call(inputs)
    with np.errstate(invalid="ignore"):
        expected = reference(inputs, "relu")
    np.testing.assert_allclose(y, expected["y"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stats.l1, expected["l1"], rtol=1e-4)
    assert stats.max_nnz == expected["max_nnz"]


W, X = np.ones((6, 4), np.float32), np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_gate": W.T}, r"^w_gate must be \[6, 4\].*got \[4, 6\]"),
        ({"w_up": W.T}, r"^w_up must be \[6, 4\].*got \[4, 6\]"),
        ({"w_down": W.T}, r"^w_down must be .*got \[4, 6\]"),
        ({"w_down": W[0]}, r"^w_down must be .*got \[4\]"),
        ({"w_down": W[0, 0]}, r"^w_down must be .*got \[\]"),
        ({"w_up": W[:5]}, r"^w_up must be \[6, 4\].*got \[5, 4\]"),
        (
            {"x": X[:, :3]},
            r"^x must be \[..., 4\] \(weights are \[H, D\], .* here \[6, 4\]\), got \[3, 3\]",
        ),
        ({"x": X[:, :3], "w_up": W.T}, r"^w_down must be .*D=3 by x"),
        ({"biases": Biases(up=W[0])}, r"^biases.up must be \[6\].*got \[4\]"),
        ({"biases": Biases(gate=W[0])}, r"^biases.gate must be \[6\].*got \[4\]"),
        ({"biases": Biases(down=W[:, 0])}, r"^biases.down must be \[4\].*got \[6\]"),
        ({"w_up": W.astype(jnp.bfloat16)}, "^w_up must have the dtype of x, float32, got bfloat16"),
        ({"biases": Biases(down=np.ones(4, np.int32))}, "^biases.down must have the dtype of x"),
        ({"x": X.astype(np.int32)}, "^x must be one of bfloat16, float16, float32, got int32"),
        ({"x": None}, "^x is required, got None"),
        ({"x": X[:0]}, r"^x must be .*at least one token, got \[0, 4\]"),
        ({"x": X[0, 0]}, r"^x must be .*got \[\]"),
        ({"w_gate": None, "biases": Biases(W[:, 0])}, "^biases.gate was given, but .*no w_gate"),
        ({"biases": (W[0],)}, r"^biases must be Biases\(gate, up, down\) or None, got tuple"),
        ({"activation": "gelu"}, "^activation must be one of .*'gelu'"),
        ({"implementation": "cuda"}, "^implementation must be 'xla', 'mosaic' or None, got 'cuda'"),
        ({"packing": "csr"}, "^packing must be 'twell', 'unions' or None, got 'csr'"),
        ({"gradients": "some"}, "^gradients must be 'dense', 'sparse', .* or None, got 'some'"),
        ({"gradients": 0}, "^gradients must .*, a capacity above 0 and at most 1, .* got 0"),
        ({"gradients": 1.5}, "^gradients must be .* got 1.5"),
        ({"gradients": float("nan")}, "^gradients must be .* got nan"),
        ({"gradients": True}, "^gradients must be .* got True"),
    ],
)
def test_errors_name_the_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        sparse_ffn(**({"x": X, "w_gate": W, "w_up": W, "w_down": W} | changes))


def test_operands_may_be_jax_arrays_and_params():
    inputs = make((5,), 4, 9, "float32", bias=True)
    expected, _ = eager(inputs)
    for convert in (jnp.asarray, nnx.Param):
        y, _ = eager({name: convert(jnp.asarray(value)) for name, value in inputs.items()})
        np.testing.assert_array_equal(y, expected)
