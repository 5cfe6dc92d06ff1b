import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.common.primitives import interpreting
from pallas_kernels.hopper.dense import dense_block as block
from pallas_kernels.kernels import REFERENCE
from pallas_kernels.rectifiers import RELU
from pallas_kernels.weights import Weights
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.rectified import ABOVE_TWO, EVERYTHING, SQUARED, gate_of, linear_of

dense_block = jax.jit(block.dense_block, static_argnums=2)
either_form = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


CASES = [(1, 128, 128), (130, 192, 384), (257, 320, 640)]
LARGE = [
    (65, 8192, 128),
    (127, 512, 1408),
    (128, 128, 65536),
    (256, 1024, 2816),
    (512, 2048, 5632),
    (1023, 2048, 5632),
    (640, 4096, 11008),
]


def draw(m, d, h, *, gated=True, dtype=jnp.bfloat16):
    """x and the weights, of NumPy; of every seventh token no neuron is active, of the next all."""
    rng = seeds.rng()
    x, activated, linear, down = (rng.standard_normal(s) for s in ((m, d), *3 * [(h, d)]))
    x[:, -1], activated[:, -1] = 0, 9 * d**0.5
    x[5::7, -1], x[6::7, -1] = 1, -1
    x, *weights = (a.astype(dtype) for a in (x, *(w / d**0.5 for w in (activated, linear, down))))
    return x, Weights(*weights) if gated else Weights(None, weights[0], weights[2])


def assert_matches(out, x, weights, act=RELU):
    y, h = (np.asarray(a) for a in out)
    assert y.dtype == h.dtype == x.dtype
    product, *second = (x.astype(np.float64) @ w.astype(np.float64).T for w in weights.inner)
    gate = expected = gate_of(act, np.maximum(product, 0), x.dtype)
    for u in second:
        expected = gate * linear_of(act, u)
    # A square is of what was rounded, so it doubles the error; all are rounded to 16 bits at last.
    assert relative_error(h, expected) < (4 if act.squared else 2) * ROUNDING
    y_of_h = h.astype(np.float64) @ weights.down.astype(np.float64)
    assert relative_error(y, y_of_h) < ROUNDING
    active = np.signbit(h) | (h != 0)
    # The sum decides on which side of the threshold a gate falls that is within its rounding.
    size = np.linalg.norm(x.astype(np.float64), axis=1)[:, None]
    near = np.abs(product - act.threshold) < 1e-5 * size + act.threshold * ROUNDING
    if act.squared:  # a square may underflow
        near |= np.abs(gate) < 1e-7
    np.testing.assert_array_equal(active | near, (gate != 0) | near)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("m", "d", "h", "dtype", "act"),
    [
        (65, 128, 128, jnp.bfloat16, RELU),
        (512, 2048, 5632, jnp.bfloat16, EVERYTHING),
        (1023, 4096, 11008, jnp.float16, RELU),
        (300, 8192, 65536, jnp.bfloat16, RELU),
    ],
)
@either_form
def test_lowers_without_a_gpu(lower, m, d, h, dtype, act, gated):
    act = act if gated else RELU
    x, w = jax.ShapeDtypeStruct((m, d), dtype), jax.ShapeDtypeStruct((h, d), dtype)
    weights = Weights(w if gated else None, w, w)
    text = lower(functools.partial(block.dense_block, rectifier=act), x, weights)
    assert text.count("@mosaic_gpu") == 2


@pytest.mark.parametrize("sms", [4, 132, 144])
@pytest.mark.parametrize("shape", [(128, 128), (2816, 1024), (5632, 2048), (11008, 4096)])
def test_tiles_cover_the_matrices(sms, shape):
    h, d = shape
    for row_blocks in range(1, 9):
        with interpreting(sms=sms):
            ups = [block._up_schedule(row_blocks, h, d, matrices).columns for matrices in (1, 2)]
            down = block._down_schedule(row_blocks, h, d)
        for matrices, columns in enumerate(ups, 1):
            assert columns % 8 == 0 == h % columns and matrices * columns <= 256
        assert d % down.columns == 0 and h % (64 * down.parts) == 0


@pytest.mark.parametrize(("m", "d", "h"), CASES)
@pytest.mark.parametrize("act", [RELU, SQUARED, ABOVE_TWO, EVERYTHING])
def test_reference(m, d, h, act):
    x, weights = draw(m, d, h)
    assert_matches(
        jax.jit(REFERENCE.dense_block, static_argnums=2)(x, weights, act), x, weights, act
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("m", "d", "h"), [CASES[0], CASES[1], pytest.param(*CASES[2], marks=pytest.mark.slow)]
)
@either_form
def test_pipeline_in_the_interpreter(m, d, h, gated, interpreted):
    x, weights = draw(m, d, h, gated=gated)
    with interpreted():
        assert_matches(block.dense_block(x, weights), x, weights)


@pytest.mark.slow
def test_parts_of_the_sum_in_the_interpreter(interpreted):
    x, weights = draw(100, 192, 384)
    with interpreted(sms=8):
        assert block._down_schedule(1, 384, 192).parts > 1
        assert_matches(block.dense_block(x, weights), x, weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"live": np.zeros(1, np.int32)}, "weights.live must be None"),
        (
            {"down": np.zeros((256, 128), np.float32)},
            r"a weight must be .*\[128, 128\].*\[256, 128",
        ),
        ({"gate": np.zeros((128, 96), np.float32)}, r"D a multiple of 64.*\[128, 96\]"),
    ],
)
def test_bad_weights_are_named(change, message):
    x, weights = draw(4, 128, 128, dtype=np.float32)
    x, weights, change = (
        jax.tree.map(
            lambda a: jnp.asarray(a, jnp.int32 if a.dtype == np.int32 else jnp.bfloat16), a
        )
        for a in (x, weights, change)
    )
    with pytest.raises(ValueError, match=message):
        block.dense_block(x, dataclasses.replace(weights, **change))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("m", "d", "h"), [*CASES, *LARGE])
@either_form
def test_on_the_gpu(m, d, h, gated, dtype):
    x, weights = draw(m, d, h, gated=gated, dtype=dtype)
    assert_matches(dense_block(x, weights, RELU), x, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("act", [SQUARED, ABOVE_TWO, EVERYTHING])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_rectifiers_on_the_gpu(act, gated):
    act = act if gated else dataclasses.replace(act, both=False)
    x, weights = draw(300, 512, 1408, gated=gated)
    assert_matches(dense_block(x, weights, act), x, weights, act)
