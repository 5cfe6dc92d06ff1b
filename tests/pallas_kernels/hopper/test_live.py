"""A number of live neurons in each kernel that takes one: the others are as if their gates were 0.

What a kernel leaves out must not be what was in memory before.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import matmul
from pallas_kernels.hopper.unions import gate_union, union_relu
from pallas_kernels.kernels import HOPPER, REFERENCE
from pallas_kernels.weights import Weights
from tests.pallas_kernels.hopper import test_dense_rows as rows
from tests.pallas_kernels.hopper import test_gate_union as unions
from tests.pallas_kernels.hopper.decode.products import run
from tests.pallas_kernels.hopper.test_dense_rows import interpreted  # noqa: F401  # a fixture

KERNELS = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(HOPPER, id="hopper", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("live", [0, 1, 128, 129])
def test_unions_in_the_interpreter(live, monkeypatch, capsys):
    monkeypatch.setattr(union_relu, "union_relu", unions.union_relu_reference)
    monkeypatch.setattr(union_relu, "write_none", write_none_reference)
    monkeypatch.setattr(matmul, "sm_count", lambda: 2)
    x, w = unions.draw(300, 64 * 3, 384, 0.1, jnp.bfloat16)
    poisoned = w.at[live:].set(jnp.nan)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = unions_of_live(x, poisoned, jnp.full(1, live, jnp.int32))
    unions.assert_unions(out, x, w, live=live)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", unions.DTYPES)
@pytest.mark.parametrize(("m", "d", "h"), [(1, 128, 128), (257, 192, 384), (1000, 2048, 5632)])
def test_unions_on_the_gpu(m, d, h, dtype):
    x, w = unions.draw(m, d, h, 0.05, dtype)
    x = x.at[m // 2, 3].set(jnp.inf)
    for live in (0, 1, 63, 64, 127, 128, h // 2 + 5, h - 1, h, h + 300):
        given = w.at[live:].set(jnp.nan), jnp.full(1, live, jnp.int32)
        unions.assert_unions(run(unions_of_live, x, *given), x, w, live=live)


def write_none_reference(*refs):
    """What `write_none` does, for the interpreter."""
    for ref in refs:
        ref[...] = jnp.zeros_like(ref[...])


def unions_of_live(x, w, live):
    return gate_union.gate_union(x, w, live=live)


@pytest.mark.parametrize("live", [0, 65, 128])
def test_dense_rows_in_the_interpreter(interpreted, live):  # noqa: F811
    operands = dense_rows_operands(rows.CASES[2], live)
    with interpreted():
        rows.assert_matches(rows.run(HOPPER, *operands[0]), *operands[1])


@pytest.mark.parametrize("case", [rows.CASES[2], rows.CASES[3]])
@pytest.mark.parametrize("kernels", KERNELS)
def test_dense_rows(kernels, case):
    for live in (0, 1, 65, 128, 200):
        operands = dense_rows_operands(case, live)
        rows.assert_matches(rows.run(kernels, *operands[0]), *operands[1])


def dense_rows_operands(case, live):
    """The operands with NaN in the weights of further neurons, and those without these neurons."""
    heavy, weights, y = rows.draw(*case, True, jnp.bfloat16)
    poisoned = [w.copy() for w in weights.inner]
    for w in poisoned:
        w[live:] = np.nan
    cut = [np.where(np.arange(len(w))[:, None] < live, w, 0) for w in weights.inner]
    given = Weights(*poisoned, weights.down, np.full(1, live, np.int32))
    return (heavy, given, y), (heavy, Weights(*cut, weights.down), y)


def test_lowers_without_a_gpu(lower):
    shape, live = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((1,), jnp.int32)
    x, w = (shape((n, 2048), jnp.bfloat16) for n in (1000, 5632))
    assert "mosaic_gpu" in lower(unions_of_live, x, w, live)
    (heavy, weights, y), _ = dense_rows_operands(rows.CASES[2], 7)
    assert "hidden_kernel" in lower(rows.jitted(HOPPER), heavy, weights, y)


def test_the_reference_leaves_out_what_is_not_live():
    x, w = unions.draw(300, 128, 256, 0.1, jnp.bfloat16)
    out = REFERENCE.gate_union(x, w.at[70:].set(jnp.nan), live=jnp.full(1, 70, jnp.int32))
    unions.assert_unions(out, x, w, live=70)
