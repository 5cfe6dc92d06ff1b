"""Models as transformers has them: their configurations, and what it computes of some weights.

`make_logits` records the latter, so that tests can compare with it where it is not installed.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RECORDED = Path(__file__).parent / "recorded"  # .json has the models, .npz their logits
TOLERANCE = 2.0**-17  # of logits: 128 roundings of float32. Ours differed by at most 22.
SHAPE = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.3,
    "hidden_act": "relu", "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
RELU2 = {"hidden_act": "relu2"}
THEIRS = {  # the class of the config, and what it is given beside SHAPE
    "llama": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5}}),
    "llama, grouped, untied, biases, SiLU": (
        "Llama",
        {"hidden_act": "silu", "num_key_value_heads": 2, "attention_bias": True, "head_dim": 12},
    ),
    "llama, biases of the blocks, relu2": ("Llama", RELU2 | {"mlp_bias": True}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2, multi-query, tied": ("Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 12}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
    "mistral, no window, SiLU": (
        "Mistral", {"hidden_act": "silu", "num_key_value_heads": 1, "sliding_window": None}
    ),
    "arcee": ("Arcee", RELU2 | {"num_key_value_heads": 2}),
    "arcee, biases": ("Arcee", {"mlp_bias": True, "attention_bias": True}),
    "nemotron": ("Nemotron", RELU2 | {"num_key_value_heads": 2, "head_dim": 16}),
    "nemotron, a quarter rotated": (
        "Nemotron",
        {
            "head_dim": 16, "num_key_value_heads": 4, "norm_eps": 1e-3,
            "rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.25},
        },
    ),
}  # fmt: skip
OF_32 = {"original_max_position_embeddings": 32}
for rope in (
    {"rope_type": "linear"},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | OF_32,
    {"rope_type": "yarn", "beta_fast": 4.0} | OF_32,
):
    scaled = {"rope_theta": 100.0, "factor": 4.0} | rope
    given = {"head_dim": 16, "rope_parameters": scaled}
    THEIRS[f"llama, {rope['rope_type']}"] = ("Llama", given)


def numbers(name, shape):
    """Float32 from [-1, 1) that follow from the name and differ by multiples of 2^-15.

    They are bytes of a hash: the streams of NumPy and torch may change from version to version.
    """
    drawn = hashlib.shake_256(name.encode()).digest(2 * int(np.prod(shape)))
    return (np.frombuffer(drawn, "<i2").astype(np.float32) / 2**15).reshape(shape)


def tokens(name):
    """Two sequences for a model, longer than its window if it has one."""
    return np.floor((numbers(name, (2, 9)) + 1) / 2 * SHAPE["vocab_size"]).astype(np.int32)


def write(directory, name, config, shapes):
    """Writes config.json, and a tensor for each shape; scales of norms are around 1."""
    tensors = {}
    for tensor, shape in shapes.items():
        drawn = numbers(f"{name}: {tensor}", shape)
        is_scale = len(shape) == 1 and tensor.endswith(".weight")
        tensors[tensor] = drawn / 2 if len(shape) == 2 else drawn + is_scale
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
