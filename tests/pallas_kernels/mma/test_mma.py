"""Hopper's kernels by `mma.sync`, with TMA or without, each with operands and references of its own
tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.hopper.common import engine
from pallas_kernels.hopper.decode.token_ffn import Cut
from pallas_kernels.kernels import AMPERE, HOPPER, MMA, REFERENCE
from pallas_kernels.layouts.tile_union import TILE_TOKENS
from pallas_kernels.quantised import E4M3
from pallas_kernels.rectifiers import RELU
from pallas_kernels.weights import Weights
from tests.devices import abstract_gpu
from tests.equations import kernel_calls
from tests.launches import launches, modules
from tests.pallas_kernels.eight_bits import scaled
from tests.pallas_kernels.hopper.decode import test_few_tokens as few
from tests.pallas_kernels.hopper.decode import test_interpreted as decode
from tests.pallas_kernels.hopper.dense import test_dense_block as prompt
from tests.pallas_kernels.hopper.dense import test_dense_rows as rows
from tests.pallas_kernels.hopper.twell import test_gate_pack as pack
from tests.pallas_kernels.hopper.unions import test_gate_union as gate
from tests.pallas_kernels.hopper.unions import test_hidden_grads as hidden
from tests.pallas_kernels.hopper.unions import test_union_ffn as ffn
from tests.pallas_kernels.hopper.unions import test_weight_grads as weights
from tests.poisoned import on_poisoned_memory
from twell_jax import sparse_ffn
from twell_jax.ffn import dispatch, mosaic

DTYPES = [jnp.bfloat16, jnp.float16]
SHARED_BYTES = 99 * 1024  # that a thread block may have on an RTX GPU
by_both = pytest.mark.parametrize("kernels", [MMA, AMPERE], ids=["mma", "ampere"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [*DTYPES, E4M3])
@by_both
def test_gate_union_interpreted(kernels, dtype, interpreted):
    x, w = gate.draw(300, 384, 256, 0.1, dtype)
    x, w = scaled(x, w) if dtype == E4M3 else (x, w)
    with interpreted(sms=1):
        out = kernels.gate_union(x, w, dtype=jnp.bfloat16 if dtype == E4M3 else dtype)
    gate.assert_unions(out, x, w)


@pytest.mark.sampled(1)
@by_both
def test_gate_pack_interpreted(kernels, interpreted):
    x, w, g = pack.draw(130, 320, 384, 0.1, jnp.bfloat16)
    with interpreted(sms=1):
        pack.assert_packs(kernels.gate_pack(x, w), g)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gated", [True, False])
@by_both
def test_unions_interpreted(kernels, gated, interpreted):
    operands, g = ffn.draw(270, 192, 128, 0.05, gated, jnp.bfloat16)
    with interpreted(sms=2):
        ffn.assert_matches(ffn.run(kernels.union_up, kernels.union_down, *operands), g, *operands)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("with_extra", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@by_both
def test_hidden_grads_interpreted(kernels, gated, with_extra, interpreted):
    """With `extra`, a part takes two stages of a ring of three."""
    operands, dense = hidden.draw(20, 192, 128, 1, gated, jnp.bfloat16)
    dy, _, _, plan, *_ = operands
    blocks, extra = hidden.draw_extra(plan, len(dy), dy.dtype) if with_extra else (None, 0.0)
    with interpreted(sms=1):
        out = hidden.run(
            functools.partial(kernels.hidden_grads, extra=blocks), REFERENCE.union_down, *operands
        )
    hidden.assert_matches(out, dense, *operands, extra=extra)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [1, 2])
@by_both
def test_weight_grads_interpreted(kernels, n, interpreted):
    operands, dense = weights.draw(300, 192, 256, 0.3, n, jnp.bfloat16)
    with interpreted():
        weights.assert_matches(jax.jit(kernels.weight_grads)(*operands), dense, *operands)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", rows.CASES[:4])
@by_both
def test_dense_rows_interpreted(kernels, case, interpreted):
    operands = rows.draw(*case, True, jnp.bfloat16)
    with interpreted(sms=2):
        out = rows.run(kernels, *operands, keep=rows.KEPT)
    rows.assert_matches(out, *operands)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "gated"), [(3, True), (19, False)])
def test_few_tokens_interpreted(m, gated, interpreted):
    decode.assert_block(MMA.few_tokens_ffn, interpreted, m, 192, 128, gated)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", prompt.CASES[:2])
@by_both
def test_prompts_interpreted(kernels, case, gated, interpreted):
    operands = prompt.draw(*case, gated=gated)
    with interpreted():
        prompt.assert_matches(kernels.dense_block(*operands), *operands)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("tokens", "kernel", "algorithm"),
    [
        (4096, "hidden_grads", "unions"),
        (4096, "hidden_grads", "float8"),
        (4096, "fused_ffn", "twell"),
        (1, "token_ffn", "few_tokens"),
        (17, "token_ffn", "few_tokens"),
        (64, "token_ffn", "few_tokens"),
        (65, "dense_block_up", "dense_block"),
        (1023, "dense_block_down", "dense_block"),
    ],
)
@pytest.mark.parametrize(("d", "h"), [(128, 128), (2048, 5632), (8192, 65536), (4160, 65408)])
def test_kernels_fit_into_99_kb_and_need_no_wgmma(d, h, tokens, kernel, algorithm, gated):
    """Of both passes, by unions with their gates in 8 bits or not, and of the other algorithms."""
    x, w = (jax.ShapeDtypeStruct((n, d), jnp.bfloat16) for n in (tokens, h))
    block = Weights(w if gated else None, w, w)
    if kernel == "hidden_grads":
        call = gradients(mosaic.sparse_gradients(MMA, RELU, 1.0, None, algorithm == "float8"))
    else:
        call = functools.partial(forward, MMA, algorithm)
    with jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA RTX PRO 6000", (1,), ("x",))):
        text = jax.jit(call).trace(x, block).lower(lowering_platforms=("cuda",)).as_text()
    assert "mma.sync" in text and "wgmma" not in text
    found = launches(text)
    assert kernel in found
    assert max(launch.smem for launch in found.values()) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("arch", "algorithm", "gated", "both_passes"),
    [
        ((8, 0), "unions", True, False),
        ((9, 0), "twell", True, False),  # measured there, it must not gain by what others lack
        *(pytest.param((8, 0), "unions", g, True, marks=pytest.mark.slow) for g in (True, False)),
    ],
)
def test_without_tma_kernels_need_nothing_of_hopper(
    arch, algorithm, gated, both_passes, monkeypatch
):
    monkeypatch.setattr(utils, "_infer_arch", lambda: arch)
    x, w = (jax.ShapeDtypeStruct((n, 2048), jnp.bfloat16) for n in (4096, 5632))
    block = Weights(w if gated else None, w, w)
    call = functools.partial(forward, AMPERE, algorithm)
    if both_passes:
        call = gradients(mosaic.sparse_gradients(AMPERE, RELU, 1.0, None, False))
    with jax.sharding.use_abstract_mesh(abstract_gpu(shape=(1,), axes=("x",))):
        text = jax.jit(call).trace(x, block).lower(lowering_platforms=("cuda",)).as_text()
    assert "mma.sync" in text and "cp.async.cg" in text
    for later in "wgmma", "cp.async.bulk", "griddepcontrol", "setmaxnreg":
        assert later not in text
    if arch < (9, 0):  # else barriers of Pallas have such fences
        assert "cluster" not in text and "fence.proxy" not in text
    assert max(launch.smem for launch in launches(text).values()) <= SHARED_BYTES


def test_no_engine_decides_for_another(monkeypatch):
    """JAX keeps what it has traced of a function."""
    monkeypatch.setattr(utils, "_infer_arch", lambda: (9, 0))
    w = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    waits = {}
    for kernels in AMPERE, HOPPER, AMPERE, MMA:
        call = jax.jit(functools.partial(forward, kernels, "twell"))
        with jax.sharding.use_abstract_mesh(abstract_gpu(shape=(1,), axes=("x",))):
            traced = call.trace(jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), Weights(w, w, w))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        found = {name: text.count(b"griddepcontrol.wait") for name, text in modules(text).items()}
        assert waits.setdefault(kernels.name, found) == found
    assert waits["MMA"] == waits["Hopper"] and waits["Hopper"]["hidden_kernel"] == 1
    assert not any(waits["Ampere"].values())


def forward(kernels, algorithm, x, weights):
    return mosaic.dense_gradients(kernels, RELU, algorithm, None)(x, weights, None)


def gradients(block):
    def call(x, weights):
        y, vjp, _ = jax.vjp(lambda x, w: block(x, w, None), x, weights, has_aux=True)
        return vjp(y)

    return call


def test_cards_that_nobody_measured_stay_dense():
    x, w = (jax.ShapeDtypeStruct((n, 256), jnp.bfloat16) for n in (4096, 512))
    with jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA RTX PRO 6000", (1,), ("x",))):
        kernels, why = dispatch.back_end(w)
        assert kernels is MMA and why is None and dispatch.recorded_back_end(w) is None
        assert kernel_calls(sparse_ffn, x, w, w, w) == 0
        assert kernel_calls(functools.partial(sparse_ffn, implementation="mosaic"), x, w, w, w)


def test_the_environment_names_a_back_end(monkeypatch):
    w = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(abstract_gpu(shape=(1,), axes=("x",))):
        assert dispatch.back_end(w)[0] is not MMA
        monkeypatch.setenv("TWELL_JAX_BACK_END", "MMA")
        assert dispatch.back_end(w) == (MMA, None)
    monkeypatch.setenv("TWELL_JAX_BACK_END", "mma")
    with pytest.raises(ValueError, match="must be one of Hopper, MMA, Ampere, got 'mm"):
        dispatch.back_end(w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, E4M3])
@pytest.mark.parametrize("density", [0.005, 0.25, 1])
@pytest.mark.parametrize(
    ("m", "d", "h"), [(1, 128, 128), (257, 384, 384), (65, 8192, 128), (1000, 2048, 5632)]
)
@by_both
def test_every_bit_of_a_gate_on_the_gpu(kernels, m, d, h, density, dtype):
    x, w = gate.draw(m, d, h, density, dtype)
    x, w = scaled(x, w) if dtype == E4M3 else (x, w)
    of = jnp.dtype(jnp.bfloat16 if dtype == E4M3 else dtype)
    gate.assert_unions(jax.jit(functools.partial(kernels.gate_union, dtype=of))(x, w), x, w)
    packed = jax.jit(functools.partial(kernels.gate_pack, dtype=of))(x, w)
    pack.assert_packs(packed, pack.dense_gate(x, w))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", [*ffn.CASES, ffn.WHOLE_TILES, *ffn.LARGE])
@by_both
def test_unions_on_the_gpu(kernels, case, gated, dtype):
    operands, g = ffn.draw(*case, gated, dtype)
    ffn.assert_matches(ffn.run(kernels.union_up, kernels.union_down, *operands), g, *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("with_extra", [True, False])
@pytest.mark.parametrize("case", [*hidden.CASES, (1001, 2048, 5632, 0.003)])
@by_both
def test_hidden_grads_on_the_gpu(kernels, case, with_extra, gated, dtype):
    operands, dense = hidden.draw(*case, gated, dtype)
    dy, _, _, plan, *_ = operands
    blocks, extra = hidden.draw_extra(plan, len(dy), dy.dtype) if with_extra else (None, 0.0)
    grads = functools.partial(kernels.hidden_grads, extra=blocks)
    out = hidden.run(grads, kernels.union_down, *operands)
    hidden.assert_matches(out, dense, *operands, extra=extra)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("case", [*weights.CASES, (3000, 2048, 1408, 0.1)])
@by_both
def test_weight_grads_on_the_gpu(kernels, case, n, dtype):
    operands, dense = weights.draw(*case, n, dtype)
    weights.assert_matches(jax.jit(kernels.weight_grads)(*operands), dense, *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", [*rows.CASES, (1000, 2048, 5632, 64), (1000, 2048, 5632, 999)])
@by_both
def test_dense_rows_on_the_gpu(kernels, case, gated, dtype):
    operands = rows.draw(*case, gated, dtype)
    rows.assert_matches(rows.run(kernels, *operands, keep=rows.KEPT), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "names"), rows.EIGHT_BITS)
@by_both
def test_dense_rows_in_8_bits_on_the_gpu(kernels, case, names):
    operands = rows.draw_8_bits(*case, names)
    rows.assert_matches(rows.run(kernels, *operands), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("case", few.ON_THE_GPU)
def test_few_tokens_on_the_gpu(case):
    *shape, gated = case
    operands = few.draw_block(*shape, gated)

    def run(x, *block):
        return MMA.few_tokens_ffn(x, Weights(*block))

    few.assert_matches(on_poisoned_memory(run, *operands), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("active", [0.005, 1.0])
def test_two_subclusters_serve_a_token_where_memory_is_short_on_the_gpu(active):
    """With less memory than any card has, as such layers are large."""
    short = dataclasses.replace(engine.MMA, sm_bytes=64 << 10)
    case = 17, 128, 65536, active, jnp.bfloat16, True
    operands = few.draw_block(*case)

    def run(x, *block):
        return HOPPER.few_tokens_ffn(x, Weights(*block))

    x, *block = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands)
    stacked = Weights(*(w.update(shape=(1, *w.shape)) for w in block))
    gate = jax.ShapeDtypeStruct((24, 65536), x.dtype)
    for how, subclusters in ((engine.MMA, 1), (short, 2)):
        with engine.using(how):
            assert Cut.of(gate, x, stacked, 17).subclusters == subclusters
    few.assert_matches(on_poisoned_memory(engine.by(short, run), *operands), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", [*prompt.CASES, *prompt.LARGE])
@by_both
def test_prompts_on_the_gpu(kernels, case, gated, dtype):
    operands = prompt.draw(*case, gated=gated, dtype=dtype)
    prompt.assert_matches(jax.jit(kernels.dense_block)(*operands), *operands)


@pytest.mark.gpu
@by_both
def test_what_lies_outside_of_a_tile_is_not_read_on_the_gpu(kernels):
    """A token that is not finite leaves all others as they are."""
    x, w = gate.draw(TILE_TOKENS + 70, 192, 384, 0.01, jnp.bfloat16)
    x = x.at[3, 5].set(jnp.nan).at[200, 1].set(jnp.inf)
    gate.assert_unions(jax.jit(kernels.gate_union)(x, w), x, w)
    assert np.isnan(np.asarray(x, np.float32)).sum() == 1
