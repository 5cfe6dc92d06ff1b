import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.common.primitives import interpreting
from pallas_kernels.hopper.decode.few_tokens import few_tokens_ffn
from pallas_kernels.hopper.decode.token_ffn import Cut
from pallas_kernels.weights import Weights
from tests.launches import held, launches
from tests.pallas_kernels.hopper.decode.blocks import assert_matches, dense, draw
from tests.pallas_kernels.hopper.decode.products import REFERENCE
from tests.poisoned import on_poisoned_memory


@jax.jit
def reference(x, *weights):
    return REFERENCE.few_tokens_ffn(x, Weights(*weights))


def shapes(m, d, h, dtype, gated=True):
    x, w = jax.ShapeDtypeStruct((m, d), dtype), jax.ShapeDtypeStruct((h, d), dtype)
    return x, Weights(w if gated else None, w, w)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("m", "d", "h", "dtype", "gated"),
    [
        (1, 2048, 5632, jnp.bfloat16, True),
        (7, 192, 384, jnp.float16, True),
        (33, 8192, 128, jnp.bfloat16, True),
        (8, 768, 5632, jnp.bfloat16, False),
    ],
)
def test_lowers_without_a_gpu(lower, m, d, h, dtype, gated):
    text = lower(few_tokens_ffn, *shapes(m, d, h, dtype, gated))
    assert "token_gate" in text and "token_ffn" in text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("m", [1, 3, 8])
def test_neither_x_nor_y_is_copied(lower, m):
    text = lower(lambda *a: few_tokens_ffn(*a)[0], *shapes(m, 2048, 5632, jnp.bfloat16))
    assert "token_ffn" in text
    assert not re.search(r"stablehlo\.(pad|slice)", text)


@pytest.mark.parametrize(
    ("m", "d", "h"),
    [
        pytest.param(1, 2048, 5632, marks=pytest.mark.slow),
        (8, 192, 640),
        pytest.param(8, 128, 65536, marks=pytest.mark.slow),
        pytest.param(17, 2048, 5632, marks=pytest.mark.slow),
        pytest.param(64, 128, 16384, marks=pytest.mark.slow),
    ],
)
def test_blocks_that_wait_for_each_other_are_on_the_gpu_together(lower, m, d, h):
    x, weights = shapes(m, d, h, jnp.bfloat16)
    launch = launches(lower(few_tokens_ffn, x, weights))["token_ffn"]
    stacked = jax.tree.map(lambda w: jax.ShapeDtypeStruct((1, *w.shape), w.dtype), weights)
    with interpreting(sms=132):
        cut = Cut.of(jax.ShapeDtypeStruct((m, h), x.dtype), x, stacked, m)
    assert launch.cluster == (8 if m <= 16 else 4)
    assert cut.dense_clusters <= held(launch)
    assert launch.blocks == launch.cluster * max(m, cut.dense_clusters)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_reference_matches_dense(gated, dtype):
    x, w_gate, w_up, w_down = draw(5, 192, 384, 0.05, dtype)
    operands = (x, w_gate if gated else None, w_up, w_down)
    assert_matches(reference(*operands), *operands)


def with_non_finite_rows(x):
    """x with an inf in token 1 and a NaN in token 2, in a column where weights have both signs."""
    x = x.copy()
    x[1, 3], x[2, 5] = np.inf, np.nan
    return x


def assert_non_finite_as_in_dense(out, x, w_gate, w_up, w_down):
    y, nnz, l1, _ = (np.asarray(a, np.float32) for a in out)
    with np.errstate(invalid="ignore"):
        y_ref, l1_ref = dense(x, w_gate, w_up, w_down)
    assert np.isnan(y_ref[1:3]).all() and np.isfinite(np.delete(y_ref, [1, 2], 0)).all()
    np.testing.assert_array_equal(np.isnan(y), np.isnan(y_ref))
    np.testing.assert_array_equal(l1[1:3], l1_ref[1:3])  # NaN, or inf in the non-gated form
    assert 0 < nnz[1] < nnz[2] == w_up.shape[0]


@pytest.mark.parametrize("gated", [True, False])
def test_reference_is_non_finite_where_dense_is(gated):
    x, w_gate, w_up, w_down = draw(5, 192, 384, 0.05, jnp.bfloat16)
    operands = (with_non_finite_rows(x), w_gate if gated else None, w_up, w_down)
    assert_non_finite_as_in_dense(reference(*operands), *operands)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=np.zeros((0, 192), jnp.bfloat16)), "M from 1 to 64"),
        (dict(x=np.zeros((65, 192), jnp.bfloat16)), "M from 1 to 64"),
        (dict(x=np.zeros((4, 384), jnp.bfloat16)), r"x must be bfloat16 \[4, 192\]"),
        (dict(x=np.zeros((4, 192), jnp.float32)), "x must be bfloat16"),
        (dict(w_gate=np.zeros((192, 384), jnp.bfloat16)), "w_gate must be"),
        (dict(w_up=np.zeros((384, 96), jnp.bfloat16)), r"w_up must be bfloat16 \[384, 192\]"),
        (dict(w_down=np.zeros((384, 96), jnp.bfloat16)), "w_down must be .* a multiple of 64"),
        (dict(w_down=np.zeros((192, 384), jnp.bfloat16)), "w_down must be"),
    ],
)
def test_bad_operands_are_named(change, message):
    w = np.zeros((384, 192), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        hopper(**dict(x=w[:4], w_gate=w, w_up=w, w_down=w) | change)


def hopper(x, w_gate, w_up, w_down):
    return few_tokens_ffn(x, Weights(w_gate, w_up, w_down))


def run(*operands):
    return on_poisoned_memory(hopper, *operands)


def draw_block(m, d, h, active, dtype, gated):
    """x and the weights; if all neurons are to be active, every one is."""
    x, w_gate, w_up, w_down = draw(m, d, h, active, dtype)
    if active == 1.0:
        w_gate[:, -1] = 60
    return (x, w_gate, w_up, w_down) if gated else (x, None, w_gate, w_down)


ON_THE_GPU = [  # M, D, H, the share of active neurons, dtype, gated
    (1, 128, 128, 0.05, jnp.bfloat16, True),
    (7, 192, 384, 0.05, jnp.float16, True),
    (1, 2048, 5632, 0.005, jnp.bfloat16, True),
    (8, 768, 5632, 0.005, jnp.float16, False),
    (9, 128, 65536, 0.005, jnp.bfloat16, True),
    (33, 1024, 5632, 0.1, jnp.bfloat16, False),
    (64, 2048, 5632, 0.005, jnp.bfloat16, True),
    (3, 8192, 5632, 0.005, jnp.float16, True),
    (8, 3072, 8192, 0.005, jnp.bfloat16, True),
    (16, 5120, 1408, 0.1, jnp.float16, False),
    (1, 6272, 5632, 0.005, jnp.bfloat16, True),
    (17, 4096, 384, 1.0, jnp.bfloat16, True),
    (17, 4096, 384, 1.0, jnp.float16, False),
    (1, 2048, 5632, 1.0, jnp.bfloat16, True),
    (64, 128, 65536, 1.0, jnp.bfloat16, True),
    (64, 8192, 640, 1.0, jnp.bfloat16, True),
    (1, 2048, 5632, 0.4, jnp.bfloat16, True),  # the blocks of some tiles agree, of others not
    (2, 2048, 5632, 0.3, jnp.float16, True),
    (33, 1024, 640, 0.12, jnp.bfloat16, True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_THE_GPU)
def test_matches_dense(case):
    *shape, gated = case
    operands = draw_block(*shape, gated)
    assert_matches(run(*operands), *operands)


@pytest.mark.gpu
def test_same_bits_every_time_and_none_for_a_silent_token():
    x, w_gate, w_up, w_down = draw(8, 2048, 5632, 0.01, jnp.bfloat16)
    w_gate[:, 0] = -1
    x[3] = np.arange(2048) == 0  # every gate is -1
    first = run(x, w_gate, w_up, w_down)
    for _ in range(3):
        for a, b in zip(first, run(x, w_gate, w_up, w_down), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    y, nnz, l1, _ = first
    assert not y[3].any() and nnz[3] == 0 and l1[3] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("m", "d"), [(4, 192), (33, 2048)])
def test_non_finite_where_dense_is(m, d, gated):
    x, w_gate, w_up, w_down = draw(m, d, 384, 0.05, jnp.bfloat16)
    operands = (with_non_finite_rows(x), w_gate if gated else None, w_up, w_down)
    assert_non_finite_as_in_dense(run(*operands), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [2, 8])
def test_layers_in_a_chain_wait_for_each_other(m):
    x, w_gate, w_up, w_down = draw(m, 2048, 5632, 0.005, jnp.bfloat16)
    weights = (w_gate, w_up, w_down / 32)

    def chain(x, layer):
        outs = [layer(x, *weights)[0]]
        for _ in range(3):
            outs.append(layer(outs[-1], *weights)[0])
        return outs

    together = jax.jit(functools.partial(chain, layer=hopper))(x)
    for a, b in zip(together, chain(x, run), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.gpu
def test_nan_reaches_its_token_and_no_other():
    x, w_gate, w_up, w_down = draw(4, 768, 5632, 0.005, jnp.bfloat16)
    w_gate[7] = -100 * np.eye(1, 768, 767)[0]
    w_up[7] = np.nan  # neuron 7 is never active
    x[2, 5] = np.nan
    y, nnz, l1, _ = (np.asarray(a, np.float32) for a in run(x, w_gate, w_up, w_down))
    assert np.isnan(y[2]).all() and np.isnan(l1[2]) and nnz[2] == 5632
    others = [0, 1, 3]
    assert np.isfinite(y[others]).all() and np.isfinite(l1[others]).all()
