"""Makes fixtures/: tiny models, with the logits that Hugging Face's transformers computes for them.

python tests/twell_jax/models/pretrained/make_fixture.py NAME...     # needs torch and transformers
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

FIXTURES = Path(__file__).parent / "fixtures"
SHAPE = {
    "vocab_size": 13, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.4,
    "hidden_act": "relu",
}  # fmt: skip
WIDE_HEADS = SHAPE | {
    "head_dim": 16, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
SCALED = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "llama": transformers.LlamaConfig(
        **SHAPE, num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e5
    ),
    "qwen2": transformers.Qwen2Config(
        **SHAPE, num_key_value_heads=1, tie_word_embeddings=False, rope_theta=1e6
    ),
    "llama_linear": transformers.LlamaConfig(
        **WIDE_HEADS, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    ),
    "llama_llama3": transformers.LlamaConfig(
        **WIDE_HEADS,
        rope_parameters=SCALED
        | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "llama_yarn": transformers.LlamaConfig(
        **WIDE_HEADS, rope_parameters=SCALED | {"rope_type": "yarn", "beta_fast": 4.0}
    ),
    "mistral": transformers.MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=4),
    "llama_mlp_bias": transformers.LlamaConfig(**SHAPE, mlp_bias=True),
    "arcee": transformers.ArceeConfig(**(SHAPE | {"hidden_act": "relu2"}), num_key_value_heads=1),
    "nemotron": transformers.NemotronConfig(**(WIDE_HEADS | {"hidden_act": "relu2"})),
    "qwen3": transformers.Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=6),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        torch.manual_seed(0)
        tokens = torch.randint(0, SHAPE["vocab_size"], (2, 9))
        config = MODELS[name]
        directory = FIXTURES / name
        shutil.rmtree(directory, ignore_errors=True)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms and biases, which start as ones and zeros
                    parameter += 0.5 * torch.randn_like(parameter)
            logits = model(tokens).logits
        model.save_pretrained(directory)
        np.savez_compressed(directory / "logits.npz", tokens=tokens, logits=logits)
