"""A number of live neurons, by every back end, against blocks that have no other neurons."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantised import quantise
from tests import seeds
from tests.conformance import activations
from tests.conformance.cases import ALGORITHMS, draw, either_form, gradients, sparse
from tests.devices import make_mesh, place
from tests.errors import ROUNDING, relative_error
from twell_jax import CannotServe, explain, sparse_ffn
from twell_jax.ffn import dispatch
from twell_jax.ffn.residuals import dense_is_faster

SERVE = pytest.mark.parametrize("algorithm", ["xla", "few_tokens", "unions"])
H = 512
LIVE = [0, 1, 127, 128, 300, H]  # none, around a tile, within a group of 64, all


WITH_XLA = ALGORITHMS | {"xla": ({"implementation": "xla"}, 40)}


def run(algorithm, operands, live):
    return _compiled(dispatch.BACK_ENDS, algorithm)(operands, jnp.int32(live))


@functools.cache
def _compiled(back_ends, algorithm):
    ffn = functools.partial(sparse_ffn, **WITH_XLA[algorithm][0])
    return jax.jit(lambda operands, live: ffn(*operands, live=live))


def poisoned(operands, live):
    """The operands with NaN in the weights that decide whether further neurons are active."""
    x, w_gate, w_up, w_down = (None if a is None else np.array(a) for a in operands)
    for w in (w_gate, w_up):
        if w is not None:
            w[live:] = np.nan
    return x, w_gate, w_up, w_down


def truncated(operands, live):
    """y, nnz, l1 and fired in float64, of a block that has the live neurons alone."""
    x, *weights = (None if a is None else a.astype(np.float64) for a in operands)
    w_gate, w_up, w_down = (None if w is None else w[:live] for w in weights)
    dtype = operands[0].dtype
    gate = np.maximum(x @ (w_up if w_gate is None else w_gate).T, 0).astype(dtype)
    gate = gate.astype(np.float64)
    h = gate if w_gate is None else gate * (x @ w_up.T)
    fired = np.zeros(len(operands[-1]), bool)
    fired[:live] = (gate != 0).any(axis=0)
    return h @ w_down, (gate != 0).sum(axis=1), np.abs(h).sum(axis=1).mean(), fired


@pytest.mark.sampled(2)
@SERVE
@either_form
def test_further_neurons_never_fire(back_end, algorithm, gated):
    operands = draw(WITH_XLA[algorithm][1], 128, H, gated=gated, threshold=1.0)
    operands[0][3::50, -1] = -1  # heavy rows
    for live in LIVE:  # one compiled program
        y, stats = run(algorithm, poisoned(operands, live), live)
        y_ref, nnz, l1, fired = truncated(operands, live)
        assert relative_error(y, y_ref) < 5e-3 if live else not np.any(y)
        np.testing.assert_allclose(stats.nnz, nnz.mean(), rtol=1e-3)
        np.testing.assert_allclose(stats.l1, l1, rtol=5e-3)
        assert not stats.fired[live:].any()
        assert np.mean(stats.fired == fired) > 0.98
        assert abs(int(stats.max_nnz) - nnz.max()) <= 2


@SERVE
def test_a_token_that_is_not_finite_stays_alone(back_end, algorithm):
    operands = draw(WITH_XLA[algorithm][1], 128, H)
    clean, _ = run(algorithm, operands, 200)
    operands[0][2, 5] = np.nan
    for live, is_nan in ((200, True), (0, False)):
        y, _ = run(algorithm, operands, live)
        assert np.isnan(y[2]).all() == is_nan and np.isnan(y[2]).any() == is_nan
        if live:
            np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(clean, 2, 0))


def grads(ffn, operands, dy, live):
    return gradients(functools.partial(ffn, live=live), operands, dy)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("gated", "capacity", "threshold", "some"),
    [
        (True, 1.0, 2.2, 130),
        (True, 1.0, 1.0, 450),  # dense products for the weights are faster
        # Too little capacity: dense gradients.
        pytest.param(False, 0.01, 2.2, 130, marks=pytest.mark.slow),
    ],
)
def test_gradients(back_end, gated, capacity, threshold, some):
    operands = draw(500, 128, H, gated=gated, threshold=threshold)
    operands[0][3::100, -1] = -1
    dy = seeds.rng().standard_normal(operands[0].shape).astype(np.float32)
    by_kernels = functools.partial(sparse_ffn, **sparse(capacity))
    dense = functools.partial(sparse_ffn, implementation="xla")
    ours, xla = (jax.jit(functools.partial(grads, f)) for f in (by_kernels, dense))
    compiled_reference = jax.jit(functools.partial(gradients, dense))
    for live in (0, some):
        out, (_, stats) = ours(operands, dy, live)
        assert dense_is_faster(stats.listed) == (threshold < 2 and live > 0)
        cut = [operands[0], *(None if w is None else w[:live] for w in operands[1:])]
        assert stats.overflow == (capacity < 1 and live > 0)
        for array in jax.tree.leaves(out[1:]):
            assert not np.any(array[live:])
        if not live:
            assert not np.any(out[0])
            continue
        with jax.default_matmul_precision("highest"):
            wide = [None if a is None else a.astype(np.float32) for a in cut]
            reference, _ = compiled_reference(wide, dy)
        by_xla, _ = xla(operands, dy, live)
        for array, other, ref in zip(*map(jax.tree.leaves, (out, by_xla, reference)), strict=True):
            limit = max(3 * ROUNDING, 1.1 * relative_error(other[: len(ref)], ref))
            assert relative_error(array[: len(ref)], ref) < limit
            assert relative_error(other[: len(ref)], ref) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "capacity"),
    [
        ("drelu", 1.0),
        # Where the pattern does not fit, gradients are dense: by XLA, as in `test_gradients`.
        pytest.param("drelu", 0.01, marks=pytest.mark.slow),
        pytest.param("relu2", 1.0, marks=pytest.mark.slow),
        pytest.param("fatrelu", 1.0, marks=pytest.mark.slow),
    ],
)
def test_other_activations_and_their_gradients(back_end, activation, capacity):
    operands = draw(300, 128, H)
    dy = seeds.rng().standard_normal(operands[0].shape).astype(np.float32)
    act = activations.options(activation)
    cut = [operands[0], *(w[:130] for w in operands[1:])]
    y_ref, _, _, wide = activations.by_hand(activation, *cut, dy=dy)
    ffn = functools.partial(sparse_ffn, **sparse(capacity), **act)
    out, (y, stats) = jax.jit(functools.partial(grads, ffn))(poisoned(operands, 130), dy, 130)
    assert stats.overflow == (capacity < 1) and not stats.fired[130:].any()
    assert relative_error(y, y_ref) < 2e-2
    for array, ref in zip(out[1:], wide[1:], strict=True):
        assert not np.any(array[130:])
        assert relative_error(array[:130], ref) < 3e-2


def test_weights_of_8_bits():
    x, *weights = draw(40, 128, H)
    axes = (-1, -1, -2)
    in_8_bits = jax.jit(quantise, static_argnums=1)
    whole = [in_8_bits(w, axis) for w, axis in zip(weights, axes, strict=True)]
    y, stats = run("xla", [x, *whole], 130)
    zeros = [np.where(np.arange(H)[:, None] < 130, w, 0) for w in weights[:2]]
    shut = [in_8_bits(w, -1) for w in zeros]
    expected, of_zeros = jax.jit(sparse_ffn)(x, *shut, whole[2])
    np.testing.assert_array_equal(y, expected)
    assert stats.nnz == of_zeros.nnz > 0 and not stats.fired[130:].any()


def test_stacked_layers_in_a_loop_have_their_own(back_end):
    layers = [draw(300, 128, H) for _ in range(4)]
    live = np.array([0, 70, 256, H], np.int32)
    stacked = [np.stack(arrays) for arrays in zip(*layers, strict=True)]
    ffn = functools.partial(sparse_ffn, **sparse(1.0))

    def loss(stacked, live):
        def layer(total, operands):
            *operands, live = operands
            y, stats = ffn(*operands, live=live)
            return total + jnp.sum(y.astype(jnp.float32) ** 2) + stats.l1, (y, stats)

        return jax.lax.scan(layer, 0.0, (*stacked, live))

    call = jax.jit(jax.grad(loss, has_aux=True))
    grads, (ys, stats) = jax.device_get(call(stacked, live))
    for i, operands in enumerate(layers):
        y_ref, nnz, _, _ = truncated(operands, live[i])
        assert relative_error(ys[i], y_ref) < 5e-3 if live[i] else not np.any(ys[i])
        np.testing.assert_allclose(stats.nnz[i], nnz.mean(), rtol=1e-3)
        for grad in grads[1:]:
            assert not np.any(grad[i, live[i] :])
            assert np.any(grad[i, : live[i]]) == (live[i] > 0)


@pytest.mark.slow
def test_devices_that_share_the_neurons(reference_kernels):
    mesh = make_mesh((2, 2), ("data", "tensor"))
    operands, live = draw(512, 128, H), 300  # within the second half
    dy = seeds.rng().standard_normal(operands[0].shape).astype(np.float32)
    dense = functools.partial(grads, functools.partial(sparse_ffn, implementation="xla"))
    reference, (y_ref, expected) = jax.jit(dense)(operands, dy, live)
    ffn = functools.partial(sparse_ffn, **sparse(1.0))
    with jax.set_mesh(mesh):
        *placed, dy = place(mesh, [*operands, dy], [P("data"), *3 * [P("tensor")], P("data")])
        out, (y, stats) = jax.jit(functools.partial(grads, ffn))(placed, dy, live)
    assert relative_error(y, y_ref) < 1e-2
    np.testing.assert_allclose(stats.nnz, expected.nnz, rtol=1e-3)
    np.testing.assert_array_equal(stats.fired[live:], False)
    for ours, ref in zip(*map(jax.tree.leaves, (out, reference)), strict=True):
        assert relative_error(ours, ref) < 2e-2


def test_each_of_a_mapped_batch_has_its_own(reference_kernels):
    x, *weights = draw(3 * 70, 128, H)
    x, live = x.reshape(3, 70, 128), jnp.array([3, 0, 400])

    def mapped(**options):
        call = jax.vmap(lambda x, live: sparse_ffn(x, *weights, live=live, **options))
        return jax.jit(call)(x, live)

    (y, stats), (y_ref, stats_ref) = mapped(packing="unions"), mapped(implementation="xla")
    assert relative_error(y, y_ref) < 1e-2
    np.testing.assert_array_equal(stats.fired, stats_ref.fired)


def test_twell_says_that_it_does_not_serve_them(reference_kernels):
    operands = draw(100, 128, H)
    with pytest.raises(
        CannotServe, match=r"^packing='twell' cannot serve: its kernels compute all .*"
    ):
        sparse_ffn(*operands, packing="twell", live=7)
    said = explain(*operands, implementation="mosaic", live=7)
    assert "not twell: its kernels compute all neurons" in said and "  unions, by mosaic" in said


@pytest.mark.parametrize(
    ("live", "message"),
    [
        (-1, f"^live must be from 0 to {H}, got -1$"),
        (H + 1, f"^live must be from 0 to {H}, got {H + 1}$"),
        (2.0, r"^live must be one integer, got float64 \[\]$"),
        (jnp.ones(3, jnp.int32), r"^live must be one integer, got int32 \[3\]$"),
    ],
)
def test_what_is_no_number_of_neurons_is_named(live, message):
    operands = draw(4, 128, H)
    for call in (sparse_ffn, explain):
        with pytest.raises(ValueError, match=message):
            call(*operands, live=live)


@pytest.mark.parametrize(("beyond", "same"), [(H + 200, H), (-5, 0)])
@SERVE
def test_a_number_on_the_device_beyond_the_neurons(back_end, algorithm, beyond, same):
    operands = draw(WITH_XLA[algorithm][1], 128, H)
    ours, expected = run(algorithm, operands, beyond), run(algorithm, operands, same)
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
