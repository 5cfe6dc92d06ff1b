"""A step of decoding lowers for an H100 with the shapes of real models."""

import jax
import pytest

from tests.devices import H100
from tests.twell_jax.models.decode_steps import abstract, one_step
from twell_jax.models.quantised import COVERED

COMMON = {
    "layers": 2, "context": 4096, "dtype": "bfloat16", "param_dtype": "bfloat16",
    "decode_implementation": "mosaic",
}  # fmt: skip
MODELS = {  # vocabulary, d_model, heads, their features, key/value heads, d_ff
    "TinyLlama 1.1B": (32000, 2048, 32, 64, 4, 5632),
    "Llama 3.2 1B": (128256, 2048, 32, 64, 8, 8192),
    "Llama 3.2 3B": (128256, 3072, 24, 128, 8, 8192),
    "Llama 2 7B": (32000, 4096, 32, 128, 32, 11008),
    "Llama 3.1 8B": (128256, 4096, 32, 128, 8, 14336),
    "Llama 2 13B": (32000, 5120, 40, 128, 40, 13824),
    "Llama 3.1 70B": (128256, 8192, 64, 128, 8, 28672),
    "Mistral 7B": (32768, 4096, 32, 128, 8, 14336),
    "Mistral Small 24B": (131072, 5120, 32, 128, 8, 32768),
    "Mixtral 8x22B": (32768, 6144, 48, 128, 8, 16384),
    "Qwen2.5 32B": (152064, 5120, 40, 128, 8, 27648),
}
QUICK = "Llama 3.2 3B", 1, "relu", ()


@pytest.mark.parametrize(
    ("name", "batch", "activation", "quantise"),
    [
        case if case == QUICK else pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            *((name, batch, "relu", ()) for name in MODELS for batch in (1, 8, 17, 64)),
            *((name, 8, "silu", ()) for name in MODELS),
            *((name, 16, "relu", COVERED["fp8-all-but-down"]) for name in MODELS),
        ]
    ],
)
def test_decoding_lowers(name, batch, activation, quantise):
    vocab_size, d_model, heads, size, kv_heads, d_ff = MODELS[name]
    config, params = abstract(
        quantise, **COMMON, vocab_size=vocab_size, d_model=d_model, heads=heads, head_size=size,
        kv_heads=kv_heads, d_ff=d_ff, activation=activation,
    )  # fmt: skip
    step, cache = one_step(config, batch, config.context, quantise)
    with jax.sharding.use_abstract_mesh(H100):
        traced = jax.jit(step).trace(params, cache)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
