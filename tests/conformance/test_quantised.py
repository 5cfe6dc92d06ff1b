"""Kernels with 8-bit weights, against dense XLA and against the quantised operands in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantised import quantise, rounded
from tests.conformance.cases import by, draw, run, xla
from tests.devices import make_mesh
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.eight_bits import in_float64, lost

NAMES = ("gate", "up", "down")


def draw_8_bits(m, d, h, chosen, *, gated=True):
    """x and weights of `draw`, the chosen ones in 8 bits; nearly all is active for two tokens,
    nothing for one."""
    x, *weights = draw(m, d, h, gated=gated)
    x[[3, m // 2], -1] = -1
    x[m - 1] = 0
    return x, [
        quantise(w) if name in chosen and w is not None else w
        for name, w in zip(NAMES, weights, strict=True)
    ]


def in_wide(x, weights):
    """h and y in float64, without rounding but that of operands to 8 bits."""

    # Quotients of XLA's are not exact on GPUs, where ties may go the other way.
    with jax.default_device(jax.devices("cpu")[0]):
        x_8_bits = rounded(jnp.asarray(x))

    def times(w):
        return in_float64(x if isinstance(w, np.ndarray) else x_8_bits) @ in_float64(w).T

    gate, up, down = weights
    h = np.maximum(times(up), 0) if gate is None else np.maximum(times(gate), 0) * times(up)
    return h, h @ in_float64(down)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("chosen", "gated"),
    [
        pytest.param(("gate",), True, marks=pytest.mark.slow),
        (("gate", "up"), True),
        pytest.param(("up",), True, marks=pytest.mark.slow),
        (("up",), False),
    ],
)
@pytest.mark.parametrize(
    ("algorithm", "m"), [("unions", 700), ("twell", 100), ("few_tokens", 60), ("few_tokens", 5)]
)
def test_kernels_take_8_bit_weights(back_end, algorithm, m, chosen, gated):
    x, weights = draw_8_bits(m, 256, 384, chosen, gated=gated)
    h, exact = in_wide(x, weights)
    y, stats = jax.device_get(run(algorithm, x, *weights))
    assert relative_error(y, exact) < 2 * ROUNDING + lost(256)
    assert y.dtype == x.dtype and not y[-1].any()
    assert stats.l1 == pytest.approx(np.abs(h).sum(axis=1).mean(), rel=1e-2)
    assert stats.nnz == pytest.approx(np.count_nonzero(h, axis=1).mean(), rel=1e-2)
    dense, of_dense = jax.device_get(xla(x, *weights))
    assert relative_error(y, dense) < 3 * ROUNDING + lost(256)
    np.testing.assert_allclose(stats.nnz, of_dense.nnz, rtol=1e-2)
    assert np.mean(stats.fired != of_dense.fired) < 0.01


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("algorithm", "m"), [("unions", 300), ("twell", 100), ("few_tokens", 23)])
def test_what_is_not_finite_stays_in_its_token(back_end, algorithm, m):
    x, weights = draw_8_bits(m, 128, 256, ("gate", "up"))
    x[7, 5], x[m - 10, 3] = np.nan, np.inf
    y, _ = run(algorithm, x, *weights)
    is_finite = np.isfinite(np.asarray(y, np.float32)).all(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(~is_finite), [7, m - 10])


def test_gradients_are_refused(back_end):
    x, weights = draw_8_bits(300, 128, 256, ("gate",))
    with pytest.raises(ValueError, match="Quantised weights has no gradients; train arrays"):
        jax.grad(lambda x: by("unions")(x, *weights)[0].sum().astype(jnp.float32))(jnp.asarray(x))


def test_over_a_mesh_scales_go_with_their_neurons(reference_kernels):
    x, weights = draw_8_bits(4 * 100, 128, 512, ("gate", "up"))
    mesh = make_mesh((4, 2), ("data", "tensor"))
    with jax.set_mesh(mesh):
        placed = jax.device_put(weights, NamedSharding(mesh, P("tensor")))
        y, stats = jax.jit(by("unions"))(x, *placed)
    alone, of_one = run("unions", x, *weights)
    assert relative_error(y, alone) < 2 * ROUNDING
    np.testing.assert_allclose(stats.nnz, of_one.nnz, rtol=1e-6)
