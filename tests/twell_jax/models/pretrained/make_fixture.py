"""Makes fixtures/: tiny models, with the logits that Hugging Face's transformers computes for them.

python tests/twell_jax/models/pretrained/make_fixture.py     # needs torch and transformers
"""

import shutil
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
MODELS = {
    "llama": transformers.LlamaConfig(
        **SHAPE, num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e5
    ),
    "qwen2": transformers.Qwen2Config(
        **SHAPE, num_key_value_heads=1, tie_word_embeddings=False, rope_theta=1e6
    ),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, 9))
    for name, config in MODELS.items():
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
