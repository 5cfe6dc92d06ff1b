"""Arguments of earlier versions are refused with what to write now."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from twell_jax import CannotServe, SparseMLP, convert, explain, sparse_ffn
from twell_jax.ffn import Windows

X, W = np.ones((5, 4), np.float32), np.ones((6, 4), np.float32)
OLD_NAMES = {
    "threshold": (0.1, r"is now part of activation: write activation=Rectifier\(threshold=0.1\)"),
    "gradient_capacity": (0.5, "is gone where .*: leave it out, else write gradients=0.5"),
    "expected_nnz": (29, "is gone, .*: leave it out"),
    "b_gate": (W[:, 0], r"is now part of biases: write biases=Biases\(gate=...\)"),
    "b_up": (W[:, 0], r"is now part of biases: write biases=Biases\(up=...\)"),
    "b_down": (W[0], r"is now part of biases: write biases=Biases\(down=...\)"),
}


@pytest.mark.parametrize("function", [sparse_ffn, explain])
@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_is_refused_with_the_new_one(name, function):
    value, message = OLD_NAMES[name]
    with pytest.raises(TypeError, match=f"^{name} {message}$"):
        function(X, W, W, W, **{name: value})


@pytest.mark.parametrize("name", ["threshold", "gradient_capacity", "expected_nnz"])
def test_a_module_refuses_the_names_that_it_had(name):
    value, message = OLD_NAMES[name]
    with pytest.raises(TypeError, match=f"^{name} {message}$"):
        SparseMLP(4, 6, rngs=nnx.Rngs(0), **{name: value})


@pytest.mark.parametrize("capacity", [2**-20, 1, 1.0, np.float32(1)])
def test_the_largest_capacity_is_1(capacity):
    assert SparseMLP(4, 6, gradients=capacity, rngs=nnx.Rngs(0)).gradients == capacity
    for other in (0, -capacity, 1.001 / capacity, True):
        with pytest.raises(ValueError, match="a capacity above 0 and at most 1, or None, got"):
            SparseMLP(4, 6, gradients=other, rngs=nnx.Rngs(0))


def test_calls_of_a_module_and_conversions_refuse_them_too():
    mlp = SparseMLP(4, 6, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"^gradient_capacity is now part of gradients"):
        mlp(X, gradients="sparse", gradient_capacity=0.5)
    with pytest.raises(
        TypeError, match=r"^gradient_capacity .*leave .*, else write gradients=0.5$"
    ):
        mlp(X, gradient_capacity=0.5)  # those of the module may be sparse
    with pytest.raises(TypeError, match=r"^threshold is now part of activation"):
        convert.replace_mlps(mlp, threshold=0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threshold": 0.0}, "is gone where it is 0: leave it out"),
        ({"threshold": 0.0, "activation": "relu"}, "says nothing of .*='relu': leave it out"),
        ({"threshold": 0.1, "activation": "relu2"}, "says nothing of .*='relu2': leave it out"),
        ({"threshold": 0.0, "activation": "drelu"}, "says nothing of .*='drelu': leave it out"),
        (
            {"threshold": 0.1, "activation": "fatrelu"},
            r"is now part of activation: write activation=Rectifier\(threshold=0.1\)",
        ),
        ({"threshold": 0, "activation": "fatrelu"}, "is .* must be a number above 0, got 0"),
        ({"threshold": -1}, "is .* must be a number above 0, got -1"),
        ({"threshold": np.ones(2)}, r"is .* must be a number above 0, got array\(.*\)"),
        (
            {"gradient_capacity": 0.5, "gradients": "sparse"},
            "is now part of gradients: write gradients=0.5 in place of 'sparse'",
        ),
        ({"gradient_capacity": 1.0, "gradients": "dense"}, "says .*='dense': leave it out"),
        ({"gradient_capacity": None}, "is gone where it is None: leave it out"),
        (
            {"gradient_capacity": 0, "gradients": "sparse"},
            "is now part of gradients, as a number above 0 and at most 1, got 0",
        ),
    ],
)
def test_the_advice_keeps_what_is_computed(given, message):
    name = next(iter(given))
    with pytest.raises(TypeError, match=f"^{name} {message}$"):
        sparse_ffn(X, W, W, W, **given)


def test_all_old_names_are_reported_in_one_line():
    with pytest.raises(TypeError, match=r"^threshold .*; gradient_capacity .*; expected_nnz .*$"):
        sparse_ffn(X, W, W, W, expected_nnz=3, gradient_capacity=1.0, threshold=0.1)


def test_a_model_of_shapes_can_be_explained():
    mlp = nnx.eval_shape(lambda: SparseMLP(4, 6, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((5, 4), jnp.float32)
    assert "dense, by xla" in explain(x, mlp.w_gate, mlp.w_up, mlp.w_down)


@pytest.mark.parametrize(
    ("x", "windows", "message"),
    [
        (X, 3, "windows must be Windows or None, got int"),
        (X[0], Windows(jnp.int32(0)), r"windows need x \[..., T, D\], .* got \[4\]"),
        (
            X,
            Windows(jnp.int32(0), jnp.zeros(4, jnp.int32)),
            r"documents must be \[5\], .* got \[4\]",
        ),
    ],
)
def test_windows_that_cannot_be_are_named(x, windows, message):
    with pytest.raises(ValueError, match=message):
        sparse_ffn(x, W, W, W, windows=windows)


def test_gradients_of_another_type_are_refused():
    with pytest.raises(ValueError, match="gradients must be 'dense', 'sparse', a capacity"):
        sparse_ffn(X, W, W, W, gradients=np.ones(2))


SPARSE = {"gradients": "sparse"}
LASSO = SPARSE | {"windows": Windows(jnp.int32(0))}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("staged", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize(
    "options", [{}, SPARSE, LASSO, {"implementation": "mosaic"}, {"matmul_dtype": "float8"}]
)
def test_types_need_not_be_promoted(reference_kernels, options, staged):
    x, w = jnp.ones((300, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)

    def loss(x, w):
        y, stats = staged(lambda *operands: sparse_ffn(*operands, **options))(x, w, w, w)
        more = 0 if stats.lasso is None else stats.lasso
        return jnp.sum(y, dtype=jnp.float32) + stats.l1 + more

    with jax.numpy_dtype_promotion("strict"):
        grads = jax.grad(loss, argnums=(0, 1))(x, w)
        assert jax.config.jax_numpy_dtype_promotion == "strict"
    for grad, expected in zip(grads, jax.grad(loss, argnums=(0, 1))(x, w), strict=True):
        np.testing.assert_array_equal(grad, expected)


def test_with_64_bits_xla_computes(reference_kernels):
    x, w = jnp.ones((1024, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    with jax.enable_x64(True):
        assert "jax_enable_x64" in str(explain(x, w, w, w))
        assert sparse_ffn(x, w, w, w)[0].dtype == jnp.bfloat16
        with pytest.raises(CannotServe, match="no kernels for jax_enable_x64"):
            sparse_ffn(x, w, w, w, implementation="mosaic")
    jax.eval_shape(functools.partial(sparse_ffn, implementation="mosaic"), x, w, w, w)
