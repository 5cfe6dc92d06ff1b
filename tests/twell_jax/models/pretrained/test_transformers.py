"""Parity with Hugging Face's transformers (extra "peers")."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as hf
from flax import nnx

from tests import seeds
from tests.errors import relative_error
from tests.packages import needed
from tests.twell_jax import drawn
from tests.twell_jax.models.pretrained import theirs
from tests.twell_jax.models.pretrained.theirs import SHAPE, THEIRS
from twell_jax.data import tokenizers
from twell_jax.data.tokenizers import ByteTokenizer, SubwordTokenizer
from twell_jax.inference import GREEDY, generate
from twell_jax.models.pretrained import from_pretrained, save_pretrained

torch = needed("torch")
transformers = needed("transformers")
from tests.twell_jax.models.pretrained import make_logits  # noqa: E402 (it needs both)

pytestmark = pytest.mark.peers

UNGATED = {"gated": False, "activation": "relu2"}
OURS = {
    "default": {},
    "grouped, untied": {"kv_heads": 2, "tie_embeddings": False, "rope_theta": 1e6},
    "biases, wide heads": {"attention_bias": True, "head_size": 12},
    "biases of the blocks, relu2": {"mlp_bias": True, "activation": "relu2"},
    "llama3": {"rope_theta": 100.0,
               "rope_scaling": {"type": "llama3", "factor": 4, "original_context": 32}},
    "yarn": {"rope_theta": 100.0,
             "rope_scaling": {"type": "yarn", "factor": 4, "original_context": 16}},
    "mistral": {"sliding_window": 5, "kv_heads": 2, "activation": "silu"},
    "qwen2": {"attention_bias": True, "kv_heads": 2, "head_size": 12},
    "qwen3": {"qk_norm": True, "kv_heads": 2, "head_size": 12, "attention_bias": True},
    "arcee": UNGATED | {"mlp_bias": True, "attention_bias": True, "tie_embeddings": False},
    "arcee, live": UNGATED | {"live_width": True, "mlp_bias": True},
    "nemotron": UNGATED | {"norm": "layer", "rotary_fraction": 0.5, "kv_heads": 2},
    "nemotron, all rotated, biases": UNGATED | {"norm": "layer", "mlp_bias": True,
                                                "attention_bias": True, "rope_theta": 1e3},
}  # fmt: skip
TEXT = "for é in 漢字: don't  stop<|endoftext|> . !\n\t we'LL 123" * 20


def prompts():
    draw = seeds.rng()
    return [draw.integers(0, 67, length).tolist() for length in (3, 11, 1, 7)]


def perturb(peer):
    """Norm scales and biases start as ones and zeros; here they must matter."""
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.ndim == 1:
                parameter += 0.5 * torch.randn_like(parameter)
    return peer.eval()


def assert_agree(model, peer):
    tokens = seeds.rng().integers(0, 67, (3, 17))
    with torch.no_grad():
        expected = peer(torch.tensor(tokens)).logits.numpy()
    logits, _ = model(jnp.asarray(tokens))
    assert np.linalg.norm(logits - expected) < 1e-4 * np.linalg.norm(expected)

    batch = prompts()
    width = max(map(len, batch))
    left_padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
    peer.generation_config.eos_token_id = None  # all sequences go on to the end
    with torch.no_grad():
        expected = peer.generate(
            left_padded, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0
        )[:, width:]
    steps = list(generate(model, batch, max_tokens=20, sampling=GREEDY))
    np.testing.assert_array_equal(np.stack(steps, axis=1), expected)


@pytest.mark.parametrize("name", THEIRS)
def test_what_is_recorded_is_what_transformers_computes(tmp_path, name):
    recorded = json.loads(theirs.RECORDED.with_suffix(".json").read_text())
    model, logits = make_logits.recorded_of(name, tmp_path)
    assert {tensor: list(shape) for tensor, shape in model["shapes"].items()} == (
        recorded["models"][name]["shapes"]
    )
    before = np.load(theirs.RECORDED.with_suffix(".npz"))[name]
    assert relative_error(logits, before) < theirs.TOLERANCE


@pytest.mark.parametrize("name", THEIRS)
def test_a_model_of_transformers_is_loaded(tmp_path, name):
    torch.manual_seed(seeds.integer())
    kind, given = THEIRS[name]
    config = getattr(transformers, f"{kind}Config")(**SHAPE | given)
    peer = perturb(transformers.AutoModelForCausalLM.from_config(config))
    peer.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_agree(from_pretrained(tmp_path), peer)


@pytest.mark.parametrize("name", OURS)
def test_a_model_of_ours_is_loaded_by_transformers(tmp_path, name):
    model = drawn.transformer(
        vocab_size=300, context=64, d_model=32, layers=2, heads=4, d_ff=40, dtype="float32",
        init_scale=0.3, **OURS[name],
    )  # fmt: skip
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        is_absent = name == "qwen2" and path[-2:] == ("out", "bias")
        if path[-1] in ("scale", "bias", "b_gate", "b_up", "b_down") and not is_absent:
            leaf[...] += 0.5 * seeds.rng().standard_normal(leaf.shape)
    tokenizer = qwen2_tokenizer() if name == "qwen2" else ByteTokenizer()
    save_pretrained(tmp_path, model, tokenizer, max_shard_bytes=30000)
    peer, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    kind = name.split(",")[0]
    assert peer.config.model_type == (kind if kind in THEIRS else "llama")
    assert type(peer).__name__.lower() == f"{peer.config.model_type}forcausallm"
    assert not any(info.values())
    assert_agree(model, peer)


def qwen2_tokenizer():
    """A small tokenizer that splits texts as those of Qwen2 do."""
    backend = transformers.Qwen2Tokenizer().backend_tokenizer
    backend.train_from_iterator(
        [TEXT],
        hf.trainers.BpeTrainer(
            vocab_size=290,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return SubwordTokenizer(backend, "<|endoftext|>")


TOKENIZERS = {
    "byte": ByteTokenizer,
    "bpe": lambda: tokenizers.train_bpe([TEXT], 290),
    "qwen2": qwen2_tokenizer,
}
FORMS = {
    "llama": {}, "mistral": {"sliding_window": 5}, "arcee": {"gated": False},
    "qwen2": {"attention_bias": True}, "qwen3": {"qk_norm": True},
    "nemotron": {"gated": False, "norm": "layer"},
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_the_tokenizer_is_loaded_by_transformers(tmp_path, kind, form):
    tokenizer = TOKENIZERS[kind]()
    model = drawn.transformer(
        vocab_size=290, context=64, d_model=8, layers=1, heads=1, d_ff=8, **FORMS[form]
    )
    save_pretrained(tmp_path, model, tokenizer)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode([TEXT])[0].tolist()
    assert peer(TEXT).input_ids == ids
    special = tokenizer.encode([TEXT], special_tokens=True)[0].tolist()
    assert peer(TEXT, split_special_tokens=False).input_ids == special != ids
    assert peer.decode(ids) == TEXT
    assert peer.eos_token_id == tokenizer.eot_id
    model_type = json.loads((tmp_path / "config.json").read_text())["model_type"]
    # transformers gives each Qwen2 the splitting of its tokenizer; no other model is one, then.
    assert model_type == ("llama" if form == "qwen2" and kind != "qwen2" else form)
