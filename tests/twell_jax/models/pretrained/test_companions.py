"""What a saved model keeps of the one that it was made of: small files, and how long it reads."""

import json
import os

import pytest
import tokenizers as hf

from tests import hub as local_hub
from tests.commands import call, succeeded
from tests.packages import needed
from tests.twell_jax.models.pretrained.small import (
    assert_same_parameters,
    change_config,
    config_of,
    make,
)
from twell_jax.data import tokenizers
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import PretrainedError, from_pretrained, save_pretrained
from twell_jax.models.pretrained import tokenizer as pretrained_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|endoftext|>"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "some text, <|turn|>"}]
SPECIAL = {"bos_token_id": 271, "eos_token_id": [272, 0], "pad_token_id": 0}


@pytest.fixture(scope="module")
def instructed(tmp_path_factory):
    """Somebody's model for chats, as its author publishes it: it reads 4096 tokens."""
    path = tmp_path_factory.mktemp("source") / "instructed"
    tokenizer = tokenizers.train_bpe([TEMPLATE + "some text" * 9], 271)
    save_pretrained(path, make(vocab_size=280, context=4096), tokenizer)
    backend = hf.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens(["<s>", "<|turn|>"])
    processor = hf.processors.TemplateProcessing("<s> $A", None, [("<s>", 271)])
    backend.post_processor = processor
    backend.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
                "eos_token": "<|endoftext|>", "model_max_length": 4096}  # fmt: skip
    for name, content in {
        "tokenizer_config.json": json.dumps(settings, indent=1),
        "special_tokens_map.json": '{"bos_token":  "<s>"}',
        "chat_template.jinja": TEMPLATE,
        "chat_template.json": json.dumps({"chat_template": TEMPLATE}),
        "tokenizer.model": "a model of SentencePiece",
        "generation_config.json": json.dumps({"temperature": 0.6, **SPECIAL}),
    }.items():
        (path / name).write_text(content)
    change_config(path, **SPECIAL)
    (path / "modeling_llama.py").write_text("raise SystemExit")
    return path


KEPT = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "generation_config.json",
}  # fmt: skip


def tokenizer_of(directory):
    return pretrained_tokenizer.load(directory)


@pytest.mark.parametrize(("context", "longest"), [(64, 4096), (4096, 4096), (9000, 9000)])
def test_files_are_kept_byte_for_byte_and_the_longer_context(
    instructed, tmp_path, context, longest
):
    model = make(vocab_size=280, context=context)
    save_pretrained(tmp_path, model, tokenizer_of(instructed), source=instructed)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == KEPT | {"config.json", "model.safetensors"}
    for name in KEPT:
        assert (tmp_path / name).read_bytes() == (instructed / name).read_bytes()
    config = config_of(tmp_path)
    assert config["max_position_embeddings"] == longest
    assert SPECIAL.items() <= config.items()
    loaded = from_pretrained(tmp_path)
    assert loaded.config.context == longest
    assert_same_parameters(loaded, model)


def test_without_a_source_nothing_is_kept(instructed, tmp_path):
    save_pretrained(tmp_path, make(vocab_size=280), tokenizer_of(instructed))
    assert config_of(tmp_path)["max_position_embeddings"] == 64
    assert not {path.name for path in tmp_path.iterdir()} & (KEPT - {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json"})  # fmt: skip


def test_the_context_of_a_source_that_does_not_name_it_is_that_of_its_class(instructed, tmp_path):
    (tmp_path / "source").mkdir()
    for path in instructed.iterdir():
        (tmp_path / "source" / path.name).write_bytes(path.read_bytes())
    change_config(tmp_path / "source", max_position_embeddings="absent")
    model, tokenizer = make(vocab_size=280), tokenizer_of(instructed)
    save_pretrained(tmp_path / "out", model, tokenizer, source=tmp_path / "source")
    assert config_of(tmp_path / "out")["max_position_embeddings"] == 2048


def test_of_a_source_without_its_tokenizer_the_context_is_kept(instructed, tmp_path):
    (tmp_path / "source").mkdir()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "source" / name).write_bytes((instructed / name).read_bytes())
    out = tmp_path / "out"
    save_pretrained(out, make(vocab_size=280), ByteTokenizer(), source=tmp_path / "source")
    config = config_of(out)
    assert (config["max_position_embeddings"], config["eos_token_id"]) == (4096, 256)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 256
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 4096


def test_a_source_of_another_tokenizer_is_refused_before_anything_is_written(instructed, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(PretrainedError, match=r"tokenizer\.json: is not the tokenizer that the mo"):
        save_pretrained(out, make(vocab_size=280), ByteTokenizer(), source=instructed)
    assert not out.exists()


def test_what_is_no_file_of_the_model_is_not_copied(instructed, tmp_path):
    (tmp_path / "secret").write_text("a key")
    source = tmp_path / "source"
    source.mkdir()
    for path in instructed.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "tokenizer.model").unlink()
    (source / "tokenizer.model").symlink_to("../secret")
    for number, command in enumerate(("export", "quantise")):
        out = tmp_path / f"out{number}"
        process = call("-m", f"twell_jax.{command}", source, out)
        assert process.returncode == 1 and process.stderr.count("\n") == 1
        assert "tokenizer.model: is a link that leads out of its directory; put" in process.stderr
        assert not out.exists()  # weights would have been written in vain
    (source / "tokenizer.model").unlink()
    os.mkfifo(source / "tokenizer.model")
    process = call("-m", "twell_jax.export", source, tmp_path / "out2")
    assert process.returncode == 1 and "not a regular file" in process.stderr
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize("command", ["export", "quantise"])
def test_models_of_the_hub_keep_theirs_and_their_licence(instructed, tmp_path, command):
    needed("huggingface_hub")
    (tmp_path / "published").mkdir()
    for path in instructed.iterdir():
        (tmp_path / "published" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "published/README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    out = tmp_path / "out"
    with local_hub.serve() as (hub, address):
        hub.publish("org/instructed", tmp_path / "published", "v1")
        with local_hub.environment(HF_ENDPOINT=address, HF_HOME=tmp_path / "home"):
            succeeded("-m", f"twell_jax.{command}", "org/instructed@v1", out)
        assert "modeling_llama.py" not in hub.downloaded
    for name in KEPT:
        assert (out / name).read_bytes() == (instructed / name).read_bytes()
    card = (out / "README.md").read_text()
    assert "\nlicense: mit\n" in card and "\nbase_model: org/instructed\n" in card
    assert not (out / "modeling_llama.py").exists()


@pytest.mark.peers
def test_transformers_writes_and_reads_chats_as_the_source_does(instructed, tmp_path):
    transformers = needed("transformers")
    tokenizer = tokenizer_of(instructed)
    save_pretrained(tmp_path, make(vocab_size=280), tokenizer, source=instructed)
    before, after = map(transformers.AutoTokenizer.from_pretrained, (instructed, tmp_path))
    options = {"add_generation_prompt": True, "return_dict": False}
    ids = after.apply_chat_template(CHAT, **options)
    assert ids == before.apply_chat_template(CHAT, **options)
    assert ids[0] == 271 and ids.count(272) == 3  # <s>, and <|turn|> also where a user wrote it
    assert after("some text").input_ids == before("some text").input_ids
    assert after.model_max_length == 4096
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.max_position_embeddings == 4096
    assert transformers.GenerationConfig.from_pretrained(tmp_path).temperature == 0.6
