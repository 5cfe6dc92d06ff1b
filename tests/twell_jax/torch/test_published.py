"""Checkpoints as arXiv 2603.23198 released them, in JAX and, written anew, in transformers."""

import jax
import numpy as np
import pytest

from tests.errors import relative_error
from tests.packages import needed
from tests.twell_jax.models.pretrained.small import change_config, change_tensors, make
from twell_jax import export
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import from_pretrained, save_pretrained

torch = needed("torch")
transformers = needed("transformers")

from twell_jax.torch import replace_mlps  # noqa: E402

pytestmark = pytest.mark.peers


def transpose_down(tensors):
    for name in [name for name in tensors if name.endswith("down_proj.weight")]:
        tensors[name] = np.ascontiguousarray(tensors[name].T)


def without_bias_of_output(tensors):
    for name in [name for name in tensors if name.endswith("o_proj.bias")]:
        del tensors[name]


HYBRID = {"sparsity_use_hybrid_kernel": True}
VARIANTS = {  # the type, what the model has, what its config.json says, and what becomes of it
    "gated": ("llama_sparse_relu", {}, {}, None, "llama"),
    "hybrid": ("llama_sparse_relu", {}, HYBRID, transpose_down, "llama"),
    "hybrid, square": ("llama_sparse_relu", {"d_ff": 16}, HYBRID, transpose_down, "llama"),
    "no gate": (
        "llama_sparse_relu", {"gated": False}, {"sparsity_gated_mlp": False}, None, "arcee",
    ),
    "qwen2": (
        "qwen2_sparse_relu", {"attention_bias": True}, {}, without_bias_of_output, "llama",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_frameworks_compute_the_same_logits(tmp_path, variant):
    model_type, changes, config, change, becomes = VARIANTS[variant]
    released, plain = tmp_path / "released", tmp_path / "plain"
    save_pretrained(released, make(activation="relu", **changes), ByteTokenizer())
    change_tensors(released, change or (lambda tensors: None))
    change_config(released, model_type=model_type, hidden_act="silu", **config)
    tokens = np.arange(12).reshape(2, 6)
    expected = jax.jit(lambda model, tokens: model(tokens)[0])(from_pretrained(released), tokens)

    export.main([str(released), str(plain)])
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    assert model.config.model_type == becomes
    assert {block.activation for block in replace_mlps(model).values()} == {"relu"}
    with torch.no_grad():
        found = model(torch.tensor(tokens)).logits
    assert relative_error(found.numpy(), expected) < 1e-4
