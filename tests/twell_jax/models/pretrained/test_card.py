"""README.md of an exported model: its front matter, and code that loads the model."""

import os
import re

import pytest
import yaml

from tests.packages import needed
from tests.twell_jax.models.pretrained.small import assert_same_parameters, change_config, make
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import card, hub, quantisation, save_pretrained

FORMS = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "bamboo": {"activation": "drelu", "sliding_window": 7},
}
EIGHT_BITS = ("gate", "up")


def parts(directory):
    """The front matter, the rest, and the blocks of code of a card."""
    text = (directory / "README.md").read_text()
    _, front, rest = text.split("---\n", 2)
    return yaml.safe_load(front), rest, re.findall(r"```python\n(.*?)```", rest, re.DOTALL)


def from_card(directory, text):
    (directory / "README.md").write_text(text)
    return card.origin(hub.Source(directory))


@pytest.mark.parametrize("form", [pytest.param("qwen3", marks=pytest.mark.slow), "llama", "bamboo"])
def test_the_first_code_loads_this_form(tmp_path, monkeypatch, form):
    model = make(**FORMS[form])
    save_pretrained(tmp_path / "my-model", model, ByteTokenizer())
    card.write(tmp_path / "my-model", None, {})
    front, text, code = parts(tmp_path / "my-model")
    has_class = form != "bamboo"
    assert front["library_name"] == ("transformers" if has_class else "twell-jax")
    assert front["pipeline_tag"] == "text-generation"
    assert front["tags"] == ["twell-jax", "activation-sparsity"]
    assert front.keys() == {"library_name", "pipeline_tag", "tags"}
    assert text.startswith("\n# my-model\n\n## Loading\n")
    assert ("has no class of the type `bamboo`" in text) != has_class
    assert "2 layers, d_model 16, d_ff 24, " in text and "context of 64 tokens." in text
    assert ["import transformers" in part for part in code] == [True, False][not has_class :]
    monkeypatch.chdir(tmp_path)
    made = {}
    exec(code[-1], made)
    assert_same_parameters(made["model"], model)


def test_the_name_of_a_directory_need_not_be_text(tmp_path, monkeypatch):
    directory, model = tmp_path / os.fsdecode(b"a\xff\n#b"), make()
    save_pretrained(directory, model, ByteTokenizer())
    card.write(directory, None, {})
    _, text, code = parts(directory)
    assert text.startswith("\n# a\\udcff #b\n\n## Loading\n")
    monkeypatch.chdir(tmp_path)
    made = {}
    exec(code[-1], made)
    assert_same_parameters(made["model"], model)


@pytest.mark.peers
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_transformers_runs_the_first_code(tmp_path, monkeypatch, in_8_bits):
    for package in ("torch", "transformers", *["compressed_tensors"] * in_8_bits):
        needed(package)
    model = make()
    model.quantise(EIGHT_BITS * in_8_bits)
    save_pretrained(tmp_path / "my-model", model, ByteTokenizer())
    card.write(tmp_path / "my-model", None, {})
    monkeypatch.chdir(tmp_path)
    made = {}
    exec(parts(tmp_path / "my-model")[2][0], made)
    assert type(made["model"]).__name__ == "LlamaForCausalLM"
    assert made["tokenizer"]("a").input_ids == [97]


def test_a_quantised_model_says_what_it_needs(tmp_path):
    save_pretrained(tmp_path / "a", make(activation="silu"), ByteTokenizer())
    quantisation.quantise_files(tmp_path / "a", tmp_path / "b", EIGHT_BITS, is_tied=True)
    for name in "ab":
        card.write(tmp_path / name, "org/small", {"base_model": "org/dense"})
    assert parts(tmp_path / "a")[0]["tags"] == ["twell-jax"]
    front, text, code = parts(tmp_path / "b")
    assert front["tags"] == ["twell-jax", "fp8", "compressed-tensors"]
    assert "need `pip install compressed-tensors`" in text
    assert "It began as [org/dense](https://huggingface.co/org/dense)." in text
    assert all('"org/small"' in part for part in code) and "directory" not in text


def test_models_in_the_publications_own_form_are_not_for_transformers(tmp_path):
    save_pretrained(tmp_path / "a", make(), ByteTokenizer())
    change_config(tmp_path / "a", model_type="llama_sparse_relu", hidden_act="silu")
    card.write(tmp_path / "a", None, {})
    front, _, code = parts(tmp_path / "a")
    assert front["library_name"] == "twell-jax" and len(code) == 1
    assert "activation-sparsity" in front["tags"]


def test_a_report_follows_the_code_that_loads_the_model(tmp_path):
    save_pretrained(tmp_path / "a", make(), ByteTokenizer())
    report = "# tiny: 漢字\n\nIt is small.\n\n## Result\n\n---\n\n| a |\n"
    card.write(tmp_path / "a", "org/tiny", {"license": "mit: 'x'"}, report)
    front, text, code = parts(tmp_path / "a")
    assert front["license"] == "mit: 'x'"
    assert text.startswith("\n# tiny: 漢字\n\n## Loading\n")
    assert text.endswith("```\n\nIt is small.\n\n## Result\n\n---\n\n| a |\n")
    assert len(code) == 2 and "layers" not in text


@pytest.mark.parametrize(
    ("front", "known"),
    [
        ("license: apache-2.0\ntags: [a]", {"license": "apache-2.0"}),
        ("license: other\nlicense_name: mine\nlicense_link: https://x.org/l",
         {"license": "other", "license_name": "mine", "license_link": "https://x.org/l"}),
        ("license: other\nlicense_link: LICENSE\nbase_model: org/b",
         {"license": "other", "base_model": "org/b",
          "license_link": "https://huggingface.co/org/b/blob/main/LICENSE"}),
        ("license: other\nlicense_link: LICENSE", {"license": "other"}),
        ("license: mit\nbase_model:\n- org/b", {"license": "mit", "base_model": "org/b"}),
        ("base_model: [3]", {}),
        ("license: [mit, x]\nbase_model: [a/b, c/d]", {}),
        ("license: 3\nbase_model: ../../etc", {}),
        (f"license: {'x' * 999}", {}),
        ("license: 'a", {}),
        ("[" * 400, {}),
        ("- license", {}),
        ("", {}),
    ],
)  # fmt: skip
def test_of_another_card_the_licence_is_taken_where_it_says_one(tmp_path, front, known):
    assert from_card(tmp_path, f"---\n{front}\n---\n# X\n") == known


def test_the_name_on_the_hub_is_the_base(tmp_path):
    assert from_card(tmp_path, "license: mit\n---\n") == {}
    assert card.origin(hub.Source(tmp_path / "none", "org/b")) == {"base_model": "org/b"}
    (tmp_path / "README.md").write_text("---\nbase_model: org/older\n---\n")
    assert card.origin(hub.Source(tmp_path, "org/b")) == {"base_model": "org/b"}
    (tmp_path / "README.md").write_bytes(b"\xff---")
    assert card.origin(hub.Source(tmp_path)) == {}
