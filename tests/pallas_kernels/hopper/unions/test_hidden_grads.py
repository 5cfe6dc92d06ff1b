"""hidden_grads on what union_up returns, and the gradient for x by union_down."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.unions.hidden_grads import hidden_grads
from pallas_kernels.hopper.unions.union_down import union_down
from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import GROUP_NEURONS, TILE_TOKENS
from pallas_kernels.rectifiers import RELU
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.planned import list_shapes, plan_shapes, planned
from tests.pallas_kernels.rectified import EVERYTHING, SQUARED, linear_of

DTYPES = [jnp.bfloat16, jnp.float16]
L1_GRAD = 0.3

make_lists = jax.jit(REFERENCE.neuron_lists, static_argnums=(1, 2))
slots_of = jax.jit(NeuronLists.slots)
union_up = jax.jit(REFERENCE.union_up, static_argnames=("rectifier", "with_gate"))

CASES = [  # M, D, H, density
    (1, 128, 128, 0.1),
    (300, 192, 256, 0.02),
    (300, 192, 256, 0),
    (300, 192, 256, 1),
]
FEW = (300, 192, 256, 0.005)  # of which the interpreter stores one by one to the lists


def draw(m, d, h, density, gated, dtype, act=RELU):
    """`(dy, w_down, h, plan, lists, weights that x meets)` and the dense factors of h."""
    rng = seeds.rng()
    z = rng.uniform(0.1, 3, (m, h)).astype(np.float32)
    z = np.where(rng.random((m, h)) < density, z, -z)
    arrays = rng.standard_normal((m, d)), rng.standard_normal((m, d))
    weights = rng.standard_normal((3, h, d)) / d**0.5
    x, dy, w_gate, w_up, w_down = (a.astype(dtype) for a in (*arrays, *weights))
    gate, counts, plan, heavy = planned(z, x)
    lists, _ = make_lists(counts, m, counts.size + 64)
    hidden, _ = union_up(x, gate, w_up if gated else None, plan, act, with_gate=True)
    dense = [np.maximum(z, 0).astype(dtype).astype(np.float64)]
    dense[0][heavy] = 0  # they leave the unions
    if gated:
        up = np.asarray(x, np.float64) @ np.asarray(w_up, np.float64).T
        dense.append(up.astype(dtype).astype(np.float64))
    weights = (w_gate, w_up) if gated else (w_up,)
    return (dy, w_down, hidden, plan, lists, weights), dense


def run(grads, down, dy, w_down, hidden, plan, lists, weights):
    @jax.jit
    def run(dy, w_down, hidden, plan, lists, weights):
        ref = jax.new_ref(hidden)
        entries = grads(dy, w_down, ref, jnp.full(1, L1_GRAD, jnp.float32), plan, lists)
        return entries, down(ref[...], weights, plan, dy.shape[0])

    return run(dy, w_down, hidden, plan, lists, weights)


def draw_extra(plan, m, dtype):
    """What the gradient for h has besides: in blocks, 0 outside the unions, and `[M, H]`."""
    tile, neurons, in_union = jax.device_get(jax.jit(tile_union.Plan.item_neurons)(plan))
    tiles, h = plan.neurons.shape
    dense = seeds.rng().standard_normal((tiles, TILE_TOKENS, h)).astype(dtype)
    blocks = [
        np.where(is_in[:, None], dense[t[0] % tiles, :, n % h], 0).astype(dtype)
        for t, n, is_in in zip(tile, neurons, in_union, strict=True)
    ]
    return jnp.stack(blocks), dense.reshape(-1, h)[:m].astype(np.float64)


def dense_grads(dense, dy, w_down, act=RELU, extra=0.0):
    """h, dz and, in the gated form, du, each `[M, H]`."""
    gate, *up = dense
    linear = linear_of(act, up[0]) if up else 1
    h = gate * linear
    dh = np.asarray(dy, np.float64) @ np.asarray(w_down, np.float64).T + L1_GRAD * np.sign(h)
    dh += extra
    slope = 2 * gate**0.5 if act.squared else gate != 0
    passes = (up[0] > 0) | (not act.both) if up else 1
    return h, dh * linear * slope, *(dh * gate * passes for _ in up)


def assert_close(out, ref):
    assert relative_error(out, ref) <= 3 * ROUNDING  # of a factor of h, of its gradient, of dx


def assert_matches(out, dense, dy, w_down, _, plan, lists, weights, act=RELU, extra=0.0):
    entries, dx = out
    grads = dense_grads(dense, dy, w_down, act, extra)
    pairs = zip(grads[1:], weights, strict=True)
    assert_close(dx[: len(dy)], sum(g @ np.asarray(w, np.float64) for g, w in pairs))
    if lists is None:
        assert entries == ()
        return
    slots = np.asarray(slots_of(lists, np.arange(len(dy))))
    lists, entries = jax.device_get((lists, entries))
    block, token = np.nonzero(slots < lists.tokens.size)
    for entry, grad in zip(entries, grads, strict=True):
        assert entry.dtype == dy.dtype
        end = int(lists.starts[-1] + -(-lists.lengths[-1] // 64) * 64)
        listed = np.zeros((end, GROUP_NEURONS))
        listed[slots[block, token]] = grad.reshape(len(dy), -1, GROUP_NEURONS)[token, block]
        assert_close(entry[:end], listed)


def elsewhere(grads):
    """`hidden_grads` that leaves h as it is, and its gradients in what is read afterwards."""

    def call(dy, w_down, h_ref, *others):
        before, poisoned = h_ref[...], jax.new_ref(jnp.full(h_ref.shape, jnp.nan, h_ref.dtype))
        entries = grads(dy, w_down, before, *others, into=poisoned)
        h_ref[...] = poisoned[...]
        return entries

    return call


def without_lists(dy, w_down, hidden, plan, lists, weights):
    return dy, w_down, hidden, plan, None, weights


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("case", "gated"), [*((case, True) for case in CASES), (CASES[1], False)])
def test_reference(case, gated):
    operands, dense = draw(*case, gated, jnp.bfloat16)
    out = run(REFERENCE.hidden_grads, REFERENCE.union_down, *operands)
    assert_matches(out, dense, *operands)


def test_reference_without_lists_and_elsewhere():
    operands, dense = draw(*CASES[1], True, jnp.bfloat16)
    for of_case in (operands, without_lists(*operands)):
        out = run(elsewhere(REFERENCE.hidden_grads), REFERENCE.union_down, *of_case)
        assert_matches(out, dense, *of_case)


def test_reference_with_an_extra_gradient():
    (dy, w_down, hidden, plan, *rest), dense = draw(*CASES[1], True, jnp.bfloat16)
    blocks, extra = draw_extra(plan, len(dy), dy.dtype)
    operands = dy, w_down, hidden, plan, *rest
    grads = functools.partial(REFERENCE.hidden_grads, extra=blocks)
    out = run(grads, REFERENCE.union_down, *operands)
    assert_matches(out, dense, *operands, extra=extra)


@pytest.mark.parametrize(
    ("case", "gated", "act", "down", "with_extra"),
    [  # test_union_ffn.py: union_down with a single weight
        pytest.param(FEW, True, EVERYTHING, union_down, False, marks=pytest.mark.slow),
        ((20, 192, 128, 1), False, SQUARED, REFERENCE.union_down, True),
        pytest.param(FEW, True, RELU, REFERENCE.union_down, True, marks=pytest.mark.slow),
        pytest.param(FEW, False, RELU, REFERENCE.union_down, True, marks=pytest.mark.slow),
    ],
)
def test_interpreted(case, gated, act, down, with_extra, interpreted):
    operands, dense = draw(*case, gated, jnp.bfloat16, act)
    dy, _, _, plan, *_ = operands
    blocks, extra = draw_extra(plan, len(dy), dy.dtype) if with_extra else (None, 0.0)
    grads = functools.partial(hidden_grads, rectifier=act, extra=blocks)
    with interpreted(sms=1):  # which carries the ring's step from one job to the next
        out = run(grads, down, *operands)
    assert_matches(out, dense, *operands, act=act, extra=extra)


@pytest.mark.parametrize("act", [RELU, SQUARED])
def test_interpreted_without_lists_and_elsewhere(act, interpreted):
    operands, dense = draw(20, 192, 128, 1, act is RELU, jnp.bfloat16, act)
    operands = without_lists(*operands)
    grads = elsewhere(functools.partial(hidden_grads, rectifier=act))
    with interpreted(sms=1):
        out = run(grads, REFERENCE.union_down, *operands)
    assert_matches(out, dense, *operands, act=act)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("shape", "gated", "dtype", "act", "with_extra"),
    [
        ((1, 128, 128), True, jnp.float16, EVERYTHING, False),
        ((1001, 2048, 5632), False, jnp.float16, SQUARED, True),
        ((65, 8192, 65536), True, jnp.bfloat16, RELU, False),
        ((65, 8192, 65536), True, jnp.bfloat16, EVERYTHING, True),
    ],
)
def test_lowers_without_a_gpu(lower, shape, gated, dtype, act, with_extra):
    m, d, h = shape
    w, x = jax.ShapeDtypeStruct((h, d), dtype), jax.ShapeDtypeStruct((m, d), dtype)
    hidden = jax.ShapeDtypeStruct((7, 256 if gated else 128, TILE_TOKENS), dtype)
    plan, lists = plan_shapes(m, h, items=7), list_shapes(m, h, capacity=6400)
    extra = jnp.zeros((7, 128, TILE_TOKENS), dtype) if with_extra else None
    grads = functools.partial(hidden_grads, rectifier=act, extra=extra)
    call = functools.partial(run, grads, union_down)
    text = lower(call, x, w, hidden, plan, lists, (w, w) if gated else (w,))
    assert text.count("@mosaic_gpu") == 3
    text = lower(call, *without_lists(x, w, hidden, plan, lists, (w, w) if gated else (w,)))
    assert text.count("@mosaic_gpu") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", [*CASES, (1001, 2048, 5632, 0.003), (300, 8192, 1408, 0.01)])
def test_on_the_gpu(case, gated, dtype):
    operands, dense = draw(*case, gated, dtype)
    for of_case in (operands, without_lists(*operands)):
        for grads in (hidden_grads, elsewhere(hidden_grads)):
            assert_matches(run(grads, union_down, *of_case), dense, *of_case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", [*CASES, (1001, 2048, 5632, 0.003)])
def test_with_an_extra_gradient_on_the_gpu(case, gated, dtype):
    operands, dense = draw(*case, gated, dtype)
    dy, _, _, plan, *_ = operands
    blocks, extra = draw_extra(plan, len(dy), dtype)
    out = run(functools.partial(hidden_grads, extra=blocks), union_down, *operands)
    assert_matches(out, dense, *operands, extra=extra)


def test_bad_operands_are_named():
    (dy, w_down, hidden, plan, lists, _), _ = draw(*CASES[0], True, jnp.bfloat16)
    l1_grad = np.zeros(1, np.float32)
    call = functools.partial(hidden_grads, dy, w_down, plan=plan, lists=lists)
    with pytest.raises(ValueError, match=r"h_ref must be .*128 or 256.*64, 256"):
        call(jax.new_ref(hidden[:, :64]), l1_grad)
    with pytest.raises(ValueError, match=r"l1_grad must be float32 \[1\].*\[2\]"):
        call(jax.new_ref(hidden), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"extra must be bfloat16 \[1, 128, 256\].*\[1, 64, 256\]"):
        call(jax.new_ref(hidden), l1_grad, extra=hidden[:, :64])
    with pytest.raises(ValueError, match=r"plan.neurons must be .*\[2, 128\].*\[1, 128\]"):
        hidden_grads(np.tile(dy, (300, 1)), w_down, jax.new_ref(hidden), l1_grad, plan, lists)
