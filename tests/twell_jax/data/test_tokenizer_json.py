"""A tokenizer.json of someone else: its library's panics are lines, and texts stay small."""

import base64
import json

import pytest
import tokenizers as hf
from tokenizers import decoders, normalizers, pre_tokenizers

from twell_jax.config import ConfigError
from twell_jax.data import tokenizer_json, tokenizers
from twell_jax.models.pretrained import PretrainedError
from twell_jax.models.pretrained import tokenizer as pretrained_tokenizer


def backend(**parts):
    made = hf.Tokenizer(hf.models.BPE(vocab={"a": 0, "b": 1, "z": 2}, merges=[]))
    made.add_special_tokens(["</s>"])
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def text(**changes):
    """A tokenizer.json with these values, which the library itself would not write."""
    return json.dumps(json.loads(backend().to_str()) | changes)


def charsmap(content):
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def split(regex):
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return split | {"pattern": {"Regex": regex}}


BEGIN = {"SpecialToken": {"id": "<x>", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "single": [BEGIN], "pair": [], "special_tokens": {}}
PANICS = {
    "no charsmap": text(normalizer=charsmap(b"")),
    "cut charsmap": text(normalizer=charsmap(b"\xff\xff\xff\xff")),
    "charsmap out of bounds": text(normalizer=charsmap(b"\4\0\0\0\xff\xff\xff\xff")),
    "unknown token": text(post_processor=TEMPLATE),
    "no length": text(pre_tokenizer={"type": "FixedLength", "length": 0}),
}


@pytest.mark.parametrize("broken", PANICS.values(), ids=PANICS)
def test_a_panic_is_one_line_when_a_tokenizer_is_read(tmp_path, broken, capfd):
    (tmp_path / "tokenizer.json").write_text(broken)
    stored = json.dumps({"type": "tokenizers", "eot": "</s>", "tokenizer": json.loads(broken)})
    (tmp_path / "of_a_run.json").write_text(stored)
    for error, load, path in (
        (PretrainedError, pretrained_tokenizer.load, tmp_path),
        (ConfigError, tokenizers.named, str(tmp_path)),
        (ConfigError, tokenizers.load, tmp_path / "of_a_run.json"),
    ):
        with pytest.raises(error, match=r"\(tokenizer: .+\)") as raised:
            load(path)
        assert "\n" not in str(raised.value)
    assert not capfd.readouterr().err


def test_a_panic_is_one_line_when_a_text_is_read_or_written():
    exploding = tokenizer_json.parse(text(pre_tokenizer=split("(a+)+$")))
    tokenizer = tokenizers.SubwordTokenizer(exploding, "</s>")
    with pytest.raises(ConfigError, match=r"^tokenizer: .*retry-limit-in-match over"):
        tokenizer.encode(["a" * 40 + "b"])
    assert tokenizer.encode(["aab"])[0].tolist() == [0, 0, 1]
    with pytest.raises(ConfigError, match=r"^tokenizer: "):
        pretrained_tokenizer.prefix(tokenizers.SubwordTokenizer(backend_that_panics(), "</s>"))


def backend_that_panics():
    return hf.Tokenizer.from_str(PANICS["unknown token"])


def test_ctrl_c_is_no_error_of_a_tokenizer():
    with pytest.raises(KeyboardInterrupt), tokenizer_json.errors_are_lines():
        raise KeyboardInterrupt


def replaced(*pairs, kind=normalizers):
    return kind.Sequence([kind.Replace(old, new) for old, new in pairs])


def regex(pattern):
    return hf.Regex(pattern)


TENFOLD = [(chr(97 + i), chr(98 + i) * 10) for i in range(9)]


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": replaced(*TENFOLD)},
        {"normalizer": replaced(*[("a", "a" * 10)] * 9)},
        {"normalizer": replaced(("a", "b" * 1000))},
        {"normalizer": replaced(*[(regex("."), "ab")] * 9)},
        {"normalizer": replaced(*[(regex("z*"), "b")] * 9)},  # also between characters
        {"normalizer": replaced(*[(regex("(?=.)"), "b")] * 9)},
        {"normalizer": replaced(*[("", "b")] * 9)},
        {"normalizer": normalizers.Sequence(
            [normalizers.Replace(" ", "\ufdfa"), normalizers.NFKD()] * 2)},
        {"normalizer": normalizers.Prepend("a" * 100)},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 9)},
        {"normalizer": replaced(*TENFOLD[:2]), "pre_tokenizer": pre_tokenizers.ByteLevel()},
        {"decoder": replaced(*TENFOLD, kind=decoders)},
    ],
)  # fmt: skip
def test_rules_that_make_a_text_grow_without_bounds_are_refused(parts):
    with pytest.raises(ConfigError, match=r"^tokenizer: its rules may make .* characters of one"):
        tokenizer_json.parse(backend(**parts).to_str())


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        replaced(*[(chr(0x2000 + i), "...") for i in range(30)]),  # none works on another's text
        replaced(*[("a" * 10, "b"), ("b", "a" * 10)] * 9),
        replaced(*[(regex(" {2,}"), " "), (regex(r"\s+"), "▁")] * 9),
        normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase(), normalizers.NFKC()]),
    ],
)
def test_rules_that_do_not_are_read(normalizer):
    pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(regex("a|b"), "isolated"), pre_tokenizers.ByteLevel()]
    )
    made = backend(normalizer=normalizer, pre_tokenizer=pre_tokenizer)
    assert tokenizer_json.parse(made.to_str()).to_str() == made.to_str()


def test_limits_of_length_do_not_matter():
    made = backend()
    made.enable_padding(length=10**12)
    assert tokenizer_json.parse(made.to_str()).encode("ab").ids == [0, 1]
