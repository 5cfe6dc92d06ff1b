"""Arguments of earlier versions are refused with what to write now."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from twell_jax import SparseMLP, convert, explain, sparse_ffn
from twell_jax.ffn import Windows

X, W = np.ones((5, 4), np.float32), np.ones((6, 4), np.float32)
OLD_NAMES = {
    "threshold": (0.1, r"is now part of activation: write activation=Rectifier\(threshold=0.1\)"),
    "gradient_capacity": (0.5, "is now part of gradients: write gradients=0.5 in place of .*"),
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


def test_calls_of_a_module_and_conversions_refuse_them_too():
    mlp = SparseMLP(4, 6, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"^gradient_capacity is now part of gradients"):
        mlp(X, gradients="sparse", gradient_capacity=0.5)
    with pytest.raises(TypeError, match=r"^threshold is now part of activation"):
        convert.replace_mlps(mlp, threshold=0.5)


def test_a_default_of_before_is_to_be_left_out():
    with pytest.raises(TypeError, match=r"^threshold is gone where it is 0: leave it out$"):
        sparse_ffn(X, W, W, W, activation="relu2", threshold=0.0)


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
