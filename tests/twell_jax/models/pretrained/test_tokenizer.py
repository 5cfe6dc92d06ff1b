"""tokenizer.json of Hugging Face directories: round trips, and what surrounds a text."""

import json

import numpy as np
import pytest
import tokenizers as hf

from twell_jax.data import tokenizers
from twell_jax.data.tokenizers import ByteTokenizer, SubwordTokenizer
from twell_jax.models.pretrained import PretrainedError
from twell_jax.models.pretrained import tokenizer as pretrained_tokenizer

TOKENS = [("</s>", 0), ("<s>", 1), ("<b>", 2)]


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_the_tokenizer_stays_the_same(tmp_path, kind):
    text = "for é in 漢字: don't  stop <|endoftext|>\n\t\x00" * 20
    tokenizer = ByteTokenizer() if kind == "byte" else tokenizers.train_bpe([text], 270)
    pretrained_tokenizer.save(tmp_path, tokenizer, context=64)
    loaded = pretrained_tokenizer.load(tmp_path)
    assert (loaded.size, loaded.eot_id) == (tokenizer.size, tokenizer.eot_id)
    ids = tokenizer.encode([text])[0]
    np.testing.assert_array_equal(loaded.encode([text])[0], ids)
    assert loaded.decode(ids) == text
    assert pretrained_tokenizer.prefix(loaded) == []
    # By default transformers would read the <|endoftext|> of a text as the token.
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["split_special_tokens"] is True


def test_the_end_of_text_and_what_precedes_a_text_are_those_of_the_files(tmp_path):
    tokenizer = tokenizers.train_bpe(["some text"], 257)
    pretrained_tokenizer.save(tmp_path, tokenizer, context=64)
    backend = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<s>", "<|im_end|>"])
    backend.post_processor = hf.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 257)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258, 0]}')
    loaded = pretrained_tokenizer.load(tmp_path)
    assert (loaded.eot, loaded.eot_id) == ("<|im_end|>", 258)
    assert pretrained_tokenizer.prefix(loaded) == [257]

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [999, 0]}')
    assert pretrained_tokenizer.load(tmp_path).eot_id == 0
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(PretrainedError, match=r"tokenizer.json: cannot be read"):
        pretrained_tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("100000", "eos_token_id=100000, but {}/tokenizer.json has ids up to 256; write "),
        ("[257, 300]", "eos_token_id=257, 300, but {}/tokenizer.json has ids up to 256; "),
    ],
)
def test_an_end_of_text_outside_the_vocabulary_is_named(tmp_path, name, written, says):
    pretrained_tokenizer.save(tmp_path, ByteTokenizer(), context=64)
    (tmp_path / name).write_text(f'{{"eos_token_id": {written}}}')
    with pytest.raises(PretrainedError) as error:
        pretrained_tokenizer.load(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / name}: {says.format(tmp_path)}")
    assert "endoftext" not in str(error.value)  # which the vocabulary has


def test_without_any_end_of_text_the_key_is_named(tmp_path):
    backend = hf.Tokenizer(hf.models.BPE(vocab={"a": 0}, merges=[]))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(PretrainedError, match=r"has no eos_token_id, and none of <\|endoftext\|>"):
        pretrained_tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("processor", "prefix"),
    [
        (hf.processors.TemplateProcessing("<s> <b> $A </s>", None, TOKENS), [1, 2]),
        (hf.processors.TemplateProcessing("$A </s>", None, TOKENS), []),
        (hf.processors.BertProcessing(("</s>", 0), ("<s>", 1)), [1]),
        (hf.processors.ByteLevel(), []),
        (None, []),
    ],
)
@pytest.mark.parametrize("letter", ["a", "z"])  # a text of letters alone may have no tokens
def test_the_prefix_is_what_precedes_a_text_not_what_ends_it(processor, prefix, letter):
    backend = hf.Tokenizer(
        hf.models.BPE(vocab={"</s>": 0, "<s>": 1, "<b>": 2, letter: 3}, merges=[])
    )
    backend.add_special_tokens([token for token, _ in TOKENS])
    if processor:
        backend.post_processor = processor
    tokenizer = SubwordTokenizer(backend, "</s>")
    assert pretrained_tokenizer.prefix(tokenizer) == prefix


LISTED = {"added_tokens_decoder": {"1": {"content": "<s>"}, "2": {"content": "<b>"}}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"bos_token": "<s>"}}, 1),
        ({"tokenizer_config": {"bos_token": {"content": "<b>", "lstrip": False}}}, 2),
        ({"special_tokens_map": {"bos_token": "<s>"}}, 1),
        ({"tokenizer_config": {"bos_token": None}, "special_tokens_map": {}}, None),
        ({}, None),
        # The older file counts where the newer one does not list the added tokens.
        ({"tokenizer_config": {"bos_token": "<b>"}, "special_tokens_map": {"bos_token": "<s>"}}, 1),
        ({"tokenizer_config": {"bos_token": "<b>"}, "special_tokens_map": {"eos_token": "<s>"}}, 2),
        ({"tokenizer_config": {"bos_token": "<b>"}, "special_tokens_map": {"bos_token": None}},
         None),
        ({"tokenizer_config": LISTED | {"bos_token": "<b>"},
          "special_tokens_map": {"bos_token": "<s>"}}, 2),
        ({"tokenizer_config": LISTED, "special_tokens_map": {"bos_token": "<s>"}}, None),
    ],
)  # fmt: skip
def test_the_token_that_begins_a_text_is_that_of_the_files(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    backend = hf.Tokenizer(hf.models.BPE(vocab=dict(TOKENS), merges=[]))
    assert pretrained_tokenizer.bos_id(tmp_path, SubwordTokenizer(backend, "</s>")) == expected


@pytest.mark.parametrize("token", ["<new>", 3, {"a": 1}, ["<s>"]])
def test_a_token_that_begins_a_text_and_is_none_of_the_vocabulary_is_named(tmp_path, token):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": token}))
    backend = hf.Tokenizer(hf.models.BPE(vocab=dict(TOKENS), merges=[]))
    with pytest.raises(
        PretrainedError, match=r"tokenizer_config.json: bos_token=.* is no token in"
    ):
        pretrained_tokenizer.bos_id(tmp_path, SubwordTokenizer(backend, "</s>"))
