"""Directories as other people's code writes them, and what it computes of them, in float64.

For architectures that transformers has no class of. The computation follows their published code
and reads their own names, so it shares nothing with what it tests.
"""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from tests import seeds

SHAPE = {
    "vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 1e3, "tie_word_embeddings": False,
}  # fmt: skip


def relu(z):
    return np.maximum(z, 0)


def fatrelu(z):
    return np.where(z > 0.3, z, 0)


MINICPM = {
    "model_type": "minicpm", "hidden_act": "relu", "scale_emb": 3, "scale_depth": 1.4,
    "dim_model_base": 8,
}  # fmt: skip
FATRELU = {"model_type": "sparsellama", "hidden_act": "fatrelu", "hidden_act_param": 0.3}
BAMBOO = {"model_type": "bamboo", "hidden_act": "relu", "sliding_window": 5}
MODELS = {  # what config.json says, and the hidden activation of the two products
    "minicpm": (MINICPM, lambda gate, up: relu(gate) * up),
    "minicpm, fatrelu": (MINICPM | FATRELU | {"model_type": "minicpm", "tie_word_embeddings": True},
                         lambda gate, up: fatrelu(gate) * up),
    "sparsellama": (FATRELU, lambda gate, up: fatrelu(gate) * up),
    "bamboo": (BAMBOO, lambda gate, up: relu(gate) * relu(up)),
}  # fmt: skip


def write(directory, **config):
    """A model of random weights; `config` is merged into `SHAPE` to make its config.json."""
    config, rng = SHAPE | config, seeds.rng()
    d, h = config["hidden_size"], config["intermediate_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (h, d), "mlp.up_proj": (h, d), "mlp.down_proj": (d, h),
    }  # fmt: skip
    shapes = {"model.embed_tokens": (config["vocab_size"], d), "model.norm": (d,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (config["vocab_size"], d)
    tensors = {
        f"{name}.weight": (0.4 * rng.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


def logits(directory, tokens, mlp):
    """The logits of one sequence; `mlp(gate, up)` makes the hidden activation of its products."""
    c = json.loads((directory / "config.json").read_text())
    w = {
        name: a.astype(np.float64) for name, a in load_file(directory / "model.safetensors").items()
    }
    length, size = len(tokens), c["hidden_size"] // c["num_attention_heads"]

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + c["rms_norm_eps"]) * scale

    def turn(x):  # [length, heads, size]: features i and i + size / 2 are a complex number
        half = size // 2
        speed = c["rope_theta"] ** (-2 * np.arange(half) / size)
        turned = x[..., :half] + 1j * x[..., half:]
        turned = turned * np.exp(1j * np.outer(np.arange(length), speed))[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    def attend(q, k, v):
        q, k, v = (a.reshape(length, -1, size) for a in (q, k, v))
        q, k = turn(q), turn(k)
        k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(size)
        distance = np.arange(length)[:, None] - np.arange(length)
        seen = (distance >= 0) & (distance < (c.get("sliding_window") or length))
        weights = np.where(seen, np.exp(scores), 0)
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hts,shd->thd", weights, v).reshape(length, -1)

    residual = c.get("scale_depth", c["num_hidden_layers"] ** 0.5) / c["num_hidden_layers"] ** 0.5
    x = w["model.embed_tokens.weight"][tokens] * c.get("scale_emb", 1)
    for i in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        here = {n.removeprefix(prefix): a.T for n, a in w.items() if n.startswith(prefix)}
        normed = norm(x, here["input_layernorm.weight"])
        qkv = (normed @ here[f"self_attn.{name}_proj.weight"] for name in "qkv")
        x = x + residual * (attend(*qkv) @ here["self_attn.o_proj.weight"])
        normed = norm(x, here["post_attention_layernorm.weight"])
        gate, up = (normed @ here[f"mlp.{name}_proj.weight"] for name in ("gate", "up"))
        x = x + residual * (mlp(gate, up) @ here["mlp.down_proj.weight"])
    x = norm(x, w["model.norm.weight"]) / (
        c["hidden_size"] / c.get("dim_model_base", c["hidden_size"])
    )
    return x @ w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"].T
