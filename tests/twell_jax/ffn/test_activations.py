"""Activations other than ReLU by dense XLA: outputs, statistics, gradients against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.errors import relative_error
from tests.twell_jax.ffn.by_hand import (
    THRESHOLD,
    call,
    eager,
    gradient,
    make,
    reference,
    reference_gradient,
)
from twell_jax import Rectifier, SparseMLP, sparse_ffn

every_case = pytest.mark.parametrize(
    ("activation", "gated"),
    [("relu2", True), ("relu2", False), ("fatrelu", True), ("fatrelu", False), ("drelu", True)],
)


@pytest.mark.sampled(5)
@every_case
@pytest.mark.parametrize("integers", [False, True])  # of these some lie exactly on the threshold
def test_outputs_statistics_and_gradients_match_float64(activation, gated, integers):
    inputs = make((11,), 6, 17, "float32", gated=gated, bias=True, integers=integers)
    dy = seeds.rng().normal(size=(11, 6)).astype(np.float32)
    dl1 = 0.0 if integers else 2.5  # |h| has no gradient where an up projection is 0
    y, stats = call(inputs, activation=activation)
    expected = reference(inputs, activation)
    assert relative_error(y, expected["y"]) < 1e-5
    assert relative_error(stats.l1, expected["l1"]) < 1e-5
    np.testing.assert_allclose(stats.nnz, expected["nnz"], rtol=1e-6)
    assert stats.max_nnz == expected["max_nnz"]
    np.testing.assert_array_equal(stats.fired, expected["fired"])
    grads = gradient(inputs, dy, dl1, activation)
    expected_grads = reference_gradient(inputs, activation, dy, dl1)
    assert set(grads) == set(expected_grads)
    for name, grad in grads.items():
        assert relative_error(grad, expected_grads[name]) < 1e-5, name


def test_a_threshold_is_not_rounded_to_the_dtype():
    # The neighbours of 0.01 in bfloat16 lie on either side of it, the upper one at 0.01001.
    x = np.array([[0.009949], [0.010009765625]], jnp.bfloat16)
    one = np.ones((1, 1), jnp.bfloat16)
    y, _ = sparse_ffn(x, None, one, one, activation=Rectifier(threshold=0.01))
    assert y[0, 0] == 0 and y[1, 0] == x[1, 0]


def test_a_rectifier_computes_what_it_says():
    z, u = np.array([[-1.0], [0.3], [2.0]]), np.array([[1.0], [1.0], [-3.0]])
    x, gate, up = np.hstack([z, u]), np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    both = Rectifier(threshold=0.5, squared=True, both=True)
    y, stats = sparse_ffn(x, gate, up, up, activation=both)
    assert not np.any(y) and stats.nnz == 1 / 3  # of 4 and relu(-3)
    y, _ = sparse_ffn(-x, -gate, up, up, activation=both)
    np.testing.assert_array_equal(y[:, 1], [0, 0, 12])


@every_case
def test_a_nan_is_not_hidden(activation, gated):
    inputs = make((11,), 6, 17, "float32", gated=gated, bias=True)
    inputs["x"][3] = np.nan
    y, _ = call(inputs, activation=activation)
    np.testing.assert_array_equal(np.isnan(y).all(-1), np.arange(11) == 3)


def test_the_module_computes_the_same():
    inputs = make((11,), 6, 17, "float32", bias=True)
    activation = Rectifier(threshold=THRESHOLD)
    mlp = SparseMLP(6, 17, use_bias=True, rngs=nnx.Rngs(0), activation=activation)
    for name, value in inputs.items():
        if name != "x":
            getattr(mlp, name).set_value(jnp.asarray(value))
    np.testing.assert_array_equal(mlp(inputs["x"]), eager(inputs, activation="fatrelu")[0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"activation": "fatrelu"}, r"'fatrelu' .*: write activation=Rectifier\(threshold=0.01\)"),
        ({"activation": Rectifier(-1)}, "Rectifier needs a threshold of 0 or more, .*, got -1"),
        ({"activation": Rectifier(np.nan)}, "Rectifier needs a threshold .*, got nan"),
        ({"activation": Rectifier("a")}, "Rectifier needs a threshold .*, got 'a'"),
        (
            {"activation": Rectifier(both=True), "gated": False},
            r"'drelu' \(Rectifier\(both=True\)\) needs",
        ),
        (
            {"activation": "drelu", "gated": False},
            "'drelu' .*needs a gate.*; without one write 're",
        ),
    ],
)
def test_what_cannot_be_is_one_line(changes, says):
    with pytest.raises(ValueError, match=f"^activation {says}") as error:
        SparseMLP(6, 17, rngs=nnx.Rngs(0), **changes)
    assert "\n" not in str(error.value)
    gated = changes.pop("gated", True)
    x, w = np.ones((2, 6), np.float32), np.ones((17, 6), np.float32)
    with pytest.raises(ValueError, match=f"^activation {says}"):
        sparse_ffn(x, w if gated else None, w, w, **changes)
