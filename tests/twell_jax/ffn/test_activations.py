"""Activations other than ReLU by dense XLA: outputs, statistics, gradients against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.errors import relative_error
from tests.twell_jax import drawn
from twell_jax import Rectifier, SparseMLP, sparse_ffn

THRESHOLD = 2.0
CASES = {  # activation, threshold, whether there is a gate
    "relu2": ("relu2", 0.0, True),
    "relu2, not gated": ("relu2", 0.0, False),
    "fatrelu": ("fatrelu", THRESHOLD, True),
    "fatrelu, not gated": ("fatrelu", THRESHOLD, False),
    "drelu": ("drelu", 0.0, True),
}
every_case = pytest.mark.parametrize("case", CASES)


def draw(case, integers=False):
    """{name: float32 array} of the operands, with biases; small integers are exact."""
    gated = CASES[case][2]
    shapes = {"x": (11, 6), "w_up": (17, 6), "w_down": (17, 6), "b_up": (17,), "b_down": (6,)}
    if gated:
        shapes |= {"w_gate": (17, 6), "b_gate": (17,)}
    rng = seeds.rng()
    values = {
        name: rng.integers(-1, 2, shape) if integers else rng.normal(size=shape)
        for name, shape in shapes.items()
    }
    return {name: np.asarray(value, np.float32) for name, value in values.items()}


def by_hand(case, operands, dy, dl1):
    """y, l1, what counts as active, and the gradient of sum(dy y) + dl1 l1, in float64."""
    activation, _, gated = CASES[case]
    a = {name: value.astype(np.float64) for name, value in operands.items()}
    up = a["x"] @ a["w_up"].T + a["b_up"]
    z = a["x"] @ a["w_gate"].T + a["b_gate"] if gated else up
    if activation == "relu2":
        g, slope = np.where(z > 0, z**2, 0), np.where(z > 0, 2 * z, 0)
    else:
        is_open = z > (THRESHOLD if activation == "fatrelu" else 0)
        g, slope = np.where(is_open, z, 0), is_open.astype(float)
    factor, of_factor = up, np.ones_like(up)
    if activation == "drelu":
        factor, of_factor = np.where(up > 0, up, 0), (up > 0).astype(float)
    h = g * factor if gated else g
    active = g > 0
    dh = dy @ a["w_down"].T + dl1 * np.sign(h) / len(h)
    dz = dh * slope * (factor if gated else 1)
    d_up = dh * g * of_factor if gated else dz
    grads = {"w_down": h.T @ dy, "b_down": dy.sum(0)}
    grads |= {"w_up": d_up.T @ a["x"], "b_up": d_up.sum(0), "x": d_up @ a["w_up"]}
    if gated:
        grads |= {"w_gate": dz.T @ a["x"], "b_gate": dz.sum(0)}
        grads["x"] = grads["x"] + dz @ a["w_gate"]
    return h @ a["w_down"] + a["b_down"], np.abs(h).sum(-1).mean(), active, grads


def options(case):
    activation, threshold, _ = CASES[case]
    return {"activation": Rectifier(threshold=threshold) if threshold else activation}


def call(case, operands):
    return sparse_ffn(**drawn.arguments(operands), **options(case))


def loss(case, operands, dy, dl1):
    y, stats = call(case, operands)
    return jnp.sum(y * dy) + dl1 * stats.l1, (y, stats)


gradient = jax.jit(jax.grad(loss, argnums=1, has_aux=True), static_argnums=0)


@pytest.mark.sampled(5)
@every_case
@pytest.mark.parametrize("integers", [False, True])  # of these some lie exactly on the threshold
def test_outputs_statistics_and_gradients_match_float64(case, integers):
    operands = draw(case, integers)
    dy = seeds.rng().normal(size=(11, 6)).astype(np.float32)
    dl1 = 0.0 if integers else 2.5  # |h| has no gradient where an up projection is 0
    grads, (y, stats) = gradient(case, operands, dy, dl1)
    expected, l1, active, expected_grads = by_hand(case, operands, dy.astype(np.float64), dl1)
    assert relative_error(y, expected) < 1e-5
    assert relative_error(stats.l1, l1) < 1e-5
    np.testing.assert_allclose(stats.nnz, active.sum(-1).mean(), rtol=1e-6)
    assert stats.max_nnz == active.sum(-1).max()
    np.testing.assert_array_equal(stats.fired, active.any(0))
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
def test_a_nan_is_not_hidden(case):
    operands = draw(case)
    operands["x"][3] = np.nan
    y, _ = call(case, operands)
    np.testing.assert_array_equal(np.isnan(y).all(-1), np.arange(11) == 3)


def test_the_module_computes_the_same():
    operands = draw("fatrelu")
    mlp = SparseMLP(6, 17, use_bias=True, rngs=nnx.Rngs(0), **options("fatrelu"))
    for name, value in operands.items():
        if name != "x":
            getattr(mlp, name).set_value(jnp.asarray(value))
    np.testing.assert_array_equal(mlp(operands["x"]), call("fatrelu", operands)[0])


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
