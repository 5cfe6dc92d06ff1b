"""What `explain` gives to kernels lowers for an H100, with the widths of real models."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from tests.conformance.cases import gradients
from tests.devices import H100
from twell_jax import Quantised, explain, sparse_ffn

WIDTHS = [  # D and H
    (128, 384), (576, 1536), (640, 2048), (768, 3072), (896, 4864), (960, 2560), (1024, 2816),
    (1152, 6912), (1280, 5120), (1536, 8960), (1792, 7168), (2048, 5632), (2048, 8192),
    (2304, 9216), (2560, 10240), (3072, 8192), (3584, 18944), (4096, 14336), (5120, 27648),
    (6144, 24576), (7168, 20480), (8192, 28672),
]  # fmt: skip
# What is asked for, and numbers of tokens on both sides of the limits of its kernels.
CALLS = {
    "few_tokens": ({}, (1, 8, 9, 16, 17, 32, 33, 64)),
    "dense_block": ({}, (65, 256, 257, 1023)),
    "twell": ({"packing": "twell"}, (65, 256, 1025)),
    "unions": ({"packing": "unions"}, (65, 256, 257, 1024)),
    "sparse gradients": ({"gradients": "sparse"}, (65, 1024)),
}
FORMS = ["gated", "plain", "8 bits"]
# With D = 3072 the share of a thread block is an odd multiple of its lanes, for up to 16 tokens.
QUICK = [
    ("few_tokens", "gated", 3072, 8192), ("dense_block", "plain", 896, 4864),
    ("twell", "plain", 2304, 9216), ("unions", "8 bits", 3584, 18944),
]  # fmt: skip
CASES = [
    (call, form, d, h)
    for d, h in WIDTHS
    for form in FORMS
    for call in CALLS
    if form != "8 bits" or (call not in ("dense_block", "sparse gradients") and d % 128 == 0)
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("call", "form", "d", "h"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_lowers_for_an_h100(call, form, d, h):
    options, numbers = CALLS[call]
    ffn = partial(sparse_ffn, implementation="mosaic", **options)
    function = partial(gradients if "gradients" in options else outputs, ffn)
    for m in numbers[::4] if (call, form, d, h) in QUICK else numbers:
        x, *weights = shapes(m, d, h, form)
        with jax.sharding.use_abstract_mesh(H100):
            served = explain(x, *weights, implementation="mosaic", **options).splitlines()[-1]
            assert served.startswith(f"  {call.replace('sparse gradients', 'unions')}, by mosaic")
            traced = jax.jit(function).trace([x, *weights], x)
            assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def outputs(ffn, operands, _):
    return ffn(*operands)


def shapes(m, d, h, form):
    """x and the weights."""
    x, w = (jax.ShapeDtypeStruct((n, d), jnp.bfloat16) for n in (m, h))
    narrow = w
    if form == "8 bits":
        values = jax.ShapeDtypeStruct((h, d), jnp.float8_e4m3fn)
        narrow = Quantised(values, jax.ShapeDtypeStruct((h, 1), jnp.float32))
    return x, None if form == "plain" else narrow, narrow, w
