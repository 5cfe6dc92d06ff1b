import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.unions.weight_grads import weight_grads
from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import GROUP_NEURONS, TILE_TOKENS
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.planned import list_shapes

make_lists = jax.jit(REFERENCE.neuron_lists, static_argnums=(1, 2))
slots_of = jax.jit(NeuronLists.slots)
DTYPES = [jnp.bfloat16, jnp.float16]
CASES = [  # M, D, H, density of the tokens in a list
    (1, 128, 128, 1),
    (300, 192, 384, 0.3),
    (700, 320, 256, 0.1),
    (300, 192, 384, 0),
    (520, 256, 128, 1),
]


def draw(m, d, h, density, n, dtype):
    """`(values, x, lists)` and the dense `[M, H]` of each of the values.

    The densities of the lists vary; unless all are full, the second is empty. Rows of x in no list
    are NaN, and padding names them; the values after the last list are NaN, too.
    """
    rng = seeds.rng()
    unlisted = rng.random(m) < 0.1 if density < 1 else np.zeros(m, bool)
    used = rng.random((h // GROUP_NEURONS, m)) < density * rng.uniform(
        0.1, 1.9, (h // GROUP_NEURONS, 1)
    )
    used &= ~unlisted
    used[1] &= density == 1
    dense = rng.standard_normal((n, m, h // GROUP_NEURONS, GROUP_NEURONS))
    dense *= (rng.random(dense.shape) < 0.3) & used.T[:, :, None]
    dense = dense.astype(dtype)
    counts = np.zeros((h // GROUP_NEURONS, -(-m // TILE_TOKENS) * TILE_TOKENS), np.uint8)
    counts[:, :m] = used
    room = sum(-(-row.sum() // 64) * 64 for row in used)
    lists, _ = make_lists(counts, m, counts.size + 128)  # the same for every density

    x = rng.standard_normal((m, d))
    poison = np.flatnonzero(~used.any(axis=0))
    x[poison] = np.nan
    slots = np.asarray(slots_of(lists, np.arange(m)))
    tokens = np.array(lists.tokens)
    values = np.zeros((n, len(tokens), GROUP_NEURONS), np.float32)
    values[:, room:] = np.nan
    is_padding = np.ones(len(tokens), bool)
    block, token = np.nonzero(slots < len(tokens))
    is_padding[slots[block, token]] = False
    values[:, slots[block, token]] = dense[:, token, block]
    if len(poison):
        tokens[is_padding] = rng.choice(poison, is_padding.sum())
    lists = dataclasses.replace(lists, tokens=tokens)
    return (tuple(values.astype(dtype)), x.astype(dtype), lists), dense.reshape(n, m, h)


def assert_matches(grads, dense, values, x, lists):
    assert len(grads) == len(values)
    x64 = np.nan_to_num(np.asarray(x, np.float64))
    for grad, h in zip(grads, dense, strict=True):
        ref = np.asarray(h, np.float64).T @ x64
        assert grad.dtype == x.dtype and grad.shape == ref.shape
        assert relative_error(grad, ref) <= ROUNDING


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "n"), [*((case, 2) for case in CASES), (CASES[1], 1)])
def test_reference(case, n):
    operands, dense = draw(*case, n, jnp.bfloat16)
    assert_matches(jax.jit(REFERENCE.weight_grads)(*operands), dense, *operands)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("case", "n"), [(CASES[2], 2), (CASES[4], 1)])
def test_interpreted(case, n, interpreted):
    operands, dense = draw(*case, n, jnp.bfloat16)
    with interpreted():
        assert_matches(jax.jit(weight_grads)(*operands), dense, *operands)


def shapes(m, d, h, capacity, n, dtype):
    values = (jax.ShapeDtypeStruct((capacity, GROUP_NEURONS), dtype),) * n
    return values, jax.ShapeDtypeStruct((m, d), dtype), list_shapes(m, h, capacity)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("shape", "n", "dtype"),
    [
        ((1, 128, 128, 64), 1, jnp.float16),
        ((1, 128, 128, 64), 2, jnp.bfloat16),
        ((16384, 2048, 5632, 2**19), 1, jnp.bfloat16),
        ((16384, 2048, 5632, 2**19), 2, jnp.float16),
        ((65, 8192, 65536, 2**21), 2, jnp.bfloat16),
    ],
)
def test_lowers_without_a_gpu(lower, shape, n, dtype):
    assert lower(weight_grads, *shapes(*shape, n, dtype)).count("@mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("case", [*CASES, (5000, 2048, 5632, 0.27), (1000, 8192, 1408, 0.2)])
def test_on_the_gpu(case, n, dtype):
    operands, dense = draw(*case, n, dtype)
    run = jax.jit(weight_grads)
    grads = run(*operands)
    assert_matches(grads, dense, *operands)
    for grad, again in zip(grads, run(*operands), strict=True):
        np.testing.assert_array_equal(grad.view(jnp.uint16), again.view(jnp.uint16))


def test_bad_operands_are_named():
    (values, x, lists), _ = draw(9, 128, 128, 1, 2, jnp.bfloat16)
    call = functools.partial(weight_grads, x=x, lists=lists)
    with pytest.raises(ValueError, match="one or two arrays, got 3"):
        call((*values, values[0]))
    with pytest.raises(ValueError, match=r"values\[1\] must be bfloat16 .*float16"):
        call((values[0], values[1].astype(jnp.float16)))
    with pytest.raises(ValueError, match=r"values\[0\] must be .*64\].*\[64, 64\]"):
        call((values[0][:64],))
    with pytest.raises(ValueError, match=r"D a multiple of 64 .*got \[128, 120\]"):
        weight_grads(values, x[:, :120], lists)
    with pytest.raises(ValueError, match="at least one row"):
        weight_grads(values, x[:0], lists)
