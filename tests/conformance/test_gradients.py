"""Gradients by every back end: dense ones behind either packing, sparse ones behind unions."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests import seeds
from tests.conformance.cases import (
    COLUMNS,
    TOKENS,
    by,
    draw,
    draw_exact,
    either_form,
    every_packing,
    gradients,
    in_float32,
    sparse,
    xla,
)
from tests.conformance.patterns import PATTERNS, SHAPE, draw_pattern, way_and_heavy_tokens
from tests.devices import make_mesh, place
from tests.errors import ROUNDING, relative_error
from tests.pattern_shares import fired_tiles, shares
from twell_jax import config, sparse_ffn
from twell_jax.ffn import RESIDUALS, dispatch
from twell_jax.ffn.residuals import Way
from twell_jax.models import sharding
from twell_jax.train.trainer import Trainer

dense_gradients = jax.jit(functools.partial(gradients, xla))


def sparse_gradients(capacity):
    """Those of the back end that serves; no program is traced twice."""
    return _sparse_gradients(dispatch.BACK_ENDS, capacity)


@functools.cache
def _sparse_gradients(back_ends, capacity):
    ffn = functools.partial(sparse_ffn, **sparse(capacity))
    return jax.jit(functools.partial(gradients, ffn))


@pytest.mark.sampled(1)
@every_packing
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_vmap_and_gradients_equal_the_dense_ones(back_end, algorithm, kind):
    if (algorithm, kind) == ("twell", "sparse"):
        pytest.skip("TwELL has dense gradients only")
    x, *weights = draw(2 * 70, 128, 384)
    x = x.reshape(2, 70, 128)

    def loss(ffn, x, weights):
        y, stats = ffn(x, *weights)
        return jnp.sum(jnp.square(y.astype(jnp.float32))) + 0.1 * stats.l1

    def forward(ffn, x, weights):
        y, stats = ffn(x, *weights)
        if algorithm == "twell":  # which does not measure these
            stats = dataclasses.replace(stats, union=0, listed=0, tiles=0)
        return y, stats

    def mapped(ffn):
        rematerialised = jax.checkpoint(functools.partial(loss, ffn))
        functions = functools.partial(forward, ffn), jax.grad(rematerialised, argnums=(0, 1))
        return [jax.jit(jax.vmap(f, in_axes=(0, None)))(x, weights) for f in functions]

    if kind == "sparse":
        kernels = functools.partial(sparse_ffn, **sparse(1.0))
    else:
        kernels = by(algorithm, gradients="dense")
    for ours, dense in zip(*map(jax.tree.leaves, map(mapped, (kernels, xla))), strict=True):
        assert ours.shape == dense.shape and ours.dtype == dense.dtype
        assert relative_error(ours, dense) < 1e-2


def test_what_the_forward_keeps_is_all_that_the_backward_needs(reference_kernels):
    x, *weights = draw(70, 128, 384)
    kept = jax.checkpoint_policies.save_only_these_names(RESIDUALS)

    @functools.partial(jax.checkpoint, policy=kept)
    def loss(a):
        y, _ = sparse_ffn(jnp.sin(a), *weights, **sparse())
        return jnp.sum(y.astype(jnp.float32))

    assert str(jax.make_jaxpr(jax.grad(loss))(x)).count(" sin ") == 1


def assert_exact_gradients(operands, capacity=0.5):
    """Sparse ones, with all outputs, against dense ones in float32; twice the same bits.

    Returns the overflow.
    """
    dtype = operands[0].dtype
    dy = seeds.rng().standard_normal(operands[0].shape).astype(dtype).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        *reference, expected = unzip(dense_gradients(in_float32(operands), dy))
    ours = sparse_gradients(capacity)
    (*out, stats), (*again, _) = unzip(ours(operands, dy)), unzip(ours(operands, dy))
    *own, _ = unzip(dense_gradients(operands, dy))
    leaves = map(jax.tree.leaves, (out, again, reference, own))
    for array, same, ref, dense in zip(*leaves, strict=True):
        assert array.dtype == dtype and array.shape == ref.shape
        # Gates, h, dh and the result are rounded, as in XLA's own computation. Where sums cancel,
        # its error is the measure.
        assert relative_error(array, ref) < max(3 * ROUNDING, relative_error(dense, ref))
        np.testing.assert_array_equal(array, same)
    for name in ("l1", "nnz"):
        np.testing.assert_allclose(getattr(stats, name), getattr(expected, name), rtol=1e-2)
    assert np.mean(np.equal(stats.fired, expected.fired)) > 0.98
    return stats.overflow


def unzip(out):
    grads, (y, stats) = out
    return grads, y, stats


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("pattern", "gated"),
    [  # one form for each capacity, so that the quick cases share two compiled programs
        *((pattern, capacity == 1) for pattern, (_, _, capacity, _) in PATTERNS.items()),
        *(
            pytest.param(pattern, capacity < 1, marks=pytest.mark.slow)
            for pattern, (_, _, capacity, _) in PATTERNS.items()
        ),
    ],
)
def test_sparse_gradients(back_end, pattern, gated):
    operands, capacity, way = draw_pattern(pattern, gated)
    assert assert_exact_gradients(operands, capacity) == (way == Way.RECOMPUTE)


def forward_for_gradients(operands, capacity=None):
    """The stats of a forward that a sparse backward would follow."""
    ffn = functools.partial(sparse_ffn, **sparse(capacity))

    @jax.jit
    def forward(operands):
        _, _, stats = jax.vjp(ffn, *operands, has_aux=True)
        return stats

    return forward(operands)


@pytest.mark.parametrize("alike", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sparse_gradients_fit_into_the_larger_share(back_end, alike):
    operands, active = draw_exact(*SHAPE, density=0.05 if alike else 0.002)
    if alike:  # 25 neurons, in most groups: the lists then need more capacity than the unions
        operands[0][...], active[...] = operands[0][0], active[0]
    union, listed = shares(active)
    assert (listed > union) == alike
    lacking = 1 if alike else 0.5  # unions that lack less than a tile may fit: it is then heavy
    needed = max(union, listed)
    for capacity, overflow in ((needed + 1e-4, 0), (lacking * needed - 1e-4, 1)):
        stats = forward_for_gradients(operands, capacity)
        assert stats.overflow == overflow
        np.testing.assert_allclose((stats.union, stats.listed), shares(active), rtol=1e-6)


def test_the_default_capacity_is_enough_for_any_finite_pattern(reference_kernels):
    stats = forward_for_gradients(draw(*SHAPE, threshold=-8))
    assert stats.union == 1 and stats.overflow == 0


@pytest.mark.parametrize("feature", [5, -1])  # the last shuts all gates of the token
def test_sparse_gradients_hide_no_token_that_is_not_finite(back_end, feature):
    operands = draw(*SHAPE)
    operands[0][7, feature] = np.inf
    dy = np.ones_like(operands[0], np.float32)
    ours, _, stats = unzip(sparse_gradients(1.0)(operands, dy))
    dense, *_ = unzip(dense_gradients(operands, dy))
    for array, reference in zip(*map(jax.tree.leaves, (ours, dense)), strict=True):
        assert not np.any(np.isfinite(array) & ~np.isfinite(reference))
    assert np.isfinite(np.delete(ours[0], 7, axis=0)).all()  # the other tokens' own gradients
    assert stats.overflow == 1


def compile_over(mesh, operands, tokens, weights):
    """Asserts that sparse gradients and outputs over the mesh are dense float32 ones on one device.

    `tokens` and `weights` say how the operands lie on it. Returns the text of what was compiled.
    """
    dy = seeds.rng().standard_normal(operands[0].shape).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        *reference, expected = unzip(dense_gradients(in_float32(operands), dy))
    with jax.set_mesh(mesh):
        *placed, dy = place(mesh, [*operands, dy], [tokens, *3 * [weights], tokens])
        compiled = sparse_gradients(1.0).lower(placed, dy).compile()
        *out, stats = unzip(compiled(placed, dy))
    for array, ref in zip(*map(jax.tree.leaves, (out, reference)), strict=True):
        assert relative_error(array, ref) < 1e-2
    # The mean over devices, each of which has its own tokens and neurons.
    parts = active_by_device(mesh, operands)
    union, listed = np.mean([shares(part) for of_tokens in parts for part in of_tokens], axis=0)
    tiles = sum(np.concatenate([*map(fired_tiles, of_tokens)]) for of_tokens in parts)
    expected = dataclasses.replace(expected, union=union, listed=listed, tiles=tiles)
    for array, ref in zip(*map(jax.tree.leaves, (stats, expected)), strict=True):
        np.testing.assert_allclose(array, ref, rtol=1e-2)
    return compiled.as_text()


def active_by_device(mesh, operands):
    """For the tokens of each device, for the neurons of each: which are active."""
    x, *gates_first = in_float32([a for a in operands if a is not None])
    active = x @ gates_first[0].T > 0
    parts = [
        math.prod(size for axis, size in mesh.shape.items() if (axis == "tensor") == is_neurons)
        for is_neurons in (False, True)
    ]
    return [np.split(some, parts[1], axis=1) for some in np.split(active, parts[0])]


@pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
def test_sparse_gradients_over_a_mesh(reference_kernels, axis_type):
    mesh = make_mesh((2, 2), TOKENS[0], axis_type=axis_type)
    compile_over(mesh, draw(*SHAPE), TOKENS, COLUMNS)


@pytest.mark.parametrize(
    ("axes", "shape", "gated"),
    [
        # Of "data" first, test_live has one.
        (("tensor", "data"), (2, 2), True),
        pytest.param(("tensor",), (4,), False, marks=pytest.mark.slow),
    ],
)
def test_tensor_parallelism_adds_up_once_each_way(reference_kernels, axes, shape, gated):
    operands = draw(*SHAPE, gated=gated)
    operands[0][5, -1] = -1
    mesh, data = make_mesh(shape, axes), "data" in axes
    text = compile_over(mesh, operands, P("data") if data else P(), P("tensor"))
    collectives = re.findall(r"= (.*) (all-\w+|reduce-scatter|collective-\w+)\(", text)
    assert {kind for _, kind in collectives} == {"all-reduce"}
    rows = re.findall(r"\[(\d+),128\]", " ".join(shapes for shapes, _ in collectives))
    y_and_dx, dw = 2 * [350 if data else 700], (3 if gated else 2) * [256] if data else []
    assert sorted(map(int, rows)) == sorted(y_and_dx + dw)


@pytest.mark.slow
@pytest.mark.parametrize("lasso_share", [0.0, 0.5])
def test_layers_train_with_sparse_gradients(reference_kernels, lasso_share):
    devices, fsdp = 4, 2
    run = config.from_dict(
        {
            "run_dir": "unused",
            "steps": 10,
            "batch_tokens": 2048 * devices,
            "micro_batch": 16,
            "lasso_share": lasso_share,
            "lasso_window": 24,
            "mesh": {"fsdp": fsdp},
            "model": {
                "vocab_size": 61, "context": 64, "d_model": 128, "layers": 3, "heads": 2,
                "d_ff": 256, "dtype": "bfloat16",
            },
        }
    )  # fmt: skip
    mesh = sharding.make_mesh(run.mesh.shape(devices), jax.devices("cpu")[:devices])
    trainer = Trainer(run, 60, mesh)
    tokens = seeds.rng().integers(0, 61, (32 * devices, 65)).astype(np.int32)
    with jax.set_mesh(mesh):
        operands = trainer.put_batch(tokens), 1e-3
        state, dense = trainer.step(trainer.init(), *operands)
        sparse_state, sparse = trainer.step_with((1.0, "sparse", None))(trainer.init(), *operands)
    np.testing.assert_array_equal(sparse.overflow, 0)
    for name in ("ce", "l1", "nnz", "grad_norm", *(["lasso"] if lasso_share else [])):
        np.testing.assert_allclose(getattr(sparse, name), getattr(dense, name), rtol=1e-2)
    # After one step Adam's first moment is the gradient, but for a factor.
    moments = (optax.tree.get(s.opt_state, "mu") for s in (sparse_state, state))
    for ours, theirs in zip(*map(jax.tree.leaves, moments), strict=True):
        assert relative_error(ours, theirs) < 0.1


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@either_form
@pytest.mark.parametrize(
    ("m", "every", "threshold"),
    [(600, 100, 2.8), (600, 1000, 2.0), (1001, 50, 2.8), (300, 1000, 8), (300, 1000, -8)],
)
def test_sparse_gradients_on_the_gpu(m, every, threshold, gated, dtype):
    operands = draw(m, 512, 1408, gated=gated, dtype=dtype, threshold=threshold)
    operands[0][3::every, -1] = -1
    assert_exact_gradients(operands)


@gpu
@pytest.mark.parametrize(
    ("threshold", "capacity", "every", "way"),
    [
        (2.57, 1.0, 1024, Way.SPARSE_AND_FEW),
        (2.57, 1.0, 100, Way.SPARSE_AND_HEAVY),
        (1.5, 0.5, 1024, Way.RECOMPUTE),
        (1.5, 1.0, 1024, Way.DENSE),
    ],
)
def test_sparse_gradients_at_full_size(threshold, capacity, every, way):
    operands = draw(16384, 2048, 5632, threshold=threshold)
    operands[0][7::every, -1] = -1
    assert way_and_heavy_tokens(operands, capacity)[0] == way
    assert_exact_gradients(operands, capacity)


@pytest.mark.sampled(1)
@every_packing
def test_layers_in_a_loop(back_end, algorithm):
    """There operands are slices, and results parts, of larger arrays."""
    kind = "sparse" if algorithm == "unions" else "dense"
    shape = (600, 512, 1408) if jax.default_backend() == "gpu" else (300, 128, 512)
    x, *weights = map(np.stack, zip(*(draw(*shape, threshold=2.8) for _ in range(3)), strict=True))
    x[:, 3::100, -1] = -1
    operands, dy = [x, *weights], seeds.rng().standard_normal(x.shape).astype(x.dtype)

    def loop(ffn):
        def layer(total, operands):
            *operands, dy = operands
            y, stats = ffn(*operands)
            return total + jnp.sum((y * dy).astype(jnp.float32)) + stats.l1, (y, stats)

        def loss(operands, dy):
            return jax.lax.scan(layer, 0.0, (*operands, dy))

        return jax.jit(jax.grad(loss, has_aux=True))

    with jax.default_matmul_precision("highest"):
        *reference, expected = unzip(loop(xla)(in_float32(operands), dy.astype(np.float32)))
    *out, stats = unzip(loop(by(algorithm, gradients=kind))(operands, dy))
    np.testing.assert_array_equal(stats.overflow, 0)
    np.testing.assert_allclose(stats.nnz, expected.nnz, rtol=1e-2)
    np.testing.assert_allclose(stats.l1, expected.l1, rtol=1e-2)
    for ours, ref in zip(*map(jax.tree.leaves, (out, reference)), strict=True):
        for layer, ref_layer in zip(np.asarray(ours), np.asarray(ref), strict=True):
            assert relative_error(layer, ref_layer) < 5e-2  # a lost result is 1


@gpu
@either_form
@pytest.mark.parametrize(("axis", "weights"), [("data", P()), ("tensor", P("tensor"))])
def test_over_two_gpus(axis, weights, gated):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    operands = draw(600, 512, 1536, gated=gated)
    operands[0][5, -1] = -1
    tokens = P("data") if axis == "data" else P()
    mesh = make_mesh((2,), (axis,), platform="gpu")
    text = compile_over(mesh, operands, tokens, weights)
    assert "mosaic_gpu" in text
