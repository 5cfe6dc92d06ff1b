import json

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import given
from hypothesis import strategies as st

from twell_jax.config import ConfigError
from twell_jax.data import tokenizers
from twell_jax.data.tokenizers import ByteTokenizer

ODD_TEXT = "naïve 🙂 <|endoftext|>\r\n\t  x\x00 漢字 "


@given(st.text())
def test_bytes_round_trip(text):
    (ids,) = ByteTokenizer().encode([text])
    assert bytes(ids.tolist()) == text.encode()
    assert ByteTokenizer().decode(ids) == text


def test_byte_decode_of_what_is_no_text():
    assert ByteTokenizer().decode(np.array([104, 256, 105, 0xFF, 299])) == "hi�"


@given(st.lists(st.text(), min_size=1))
def test_documents_end_with_end_of_text(texts):
    tokenizer = ByteTokenizer()
    stream = np.concatenate(list(tokenizers.encode_documents(tokenizer, texts)))
    assert stream.dtype == np.uint16
    *documents, after = np.split(stream, np.flatnonzero(stream == tokenizer.eot_id) + 1)
    assert after.size == 0
    assert [tokenizer.decode(ids) for ids in documents] == texts


def test_documents_are_encoded_in_bounded_batches(monkeypatch):
    monkeypatch.setattr(tokenizers, "_BATCH_CHARACTERS", 10)
    arrays = list(tokenizers.encode_documents(ByteTokenizer(), ["abcd"] * 5))
    assert [array.size for array in arrays] == [10, 10, 5]


@pytest.mark.parametrize("size", [257, 330])
def test_bpe_has_the_asked_size_and_round_trips(documents, size):
    bpe = tokenizers.train_bpe(documents, size)
    assert bpe.size == size
    ids = bpe.encode([*documents, ODD_TEXT])
    assert [bpe.decode(i) for i in ids] == [*documents, ODD_TEXT]
    assert all(bpe.eot_id not in i for i in ids)
    assert bpe.decode([bpe.eot_id, *ids[0], bpe.eot_id, size + 5]) == documents[0]


def test_bpe_merges_make_text_shorter_and_are_deterministic(documents):
    small, large, again = (tokenizers.train_bpe(documents, size) for size in (257, 330, 330))
    assert large.encode(documents)[0].size < small.encode(documents)[0].size
    assert large.to_json() == again.to_json()


@pytest.mark.parametrize(("size", "message"), [(256, "at least 257"), (50000, "at most, got")])
def test_bpe_of_an_impossible_size(documents, size, message):
    with pytest.raises(ConfigError, match=rf"^model\.vocab_size: .*{message}"):
        tokenizers.train_bpe(documents, size)


def test_saved_tokenizers_are_the_same(tmp_path, documents):
    path = tmp_path / "tokenizer.json"
    for tokenizer in ByteTokenizer(), tokenizers.train_bpe(documents, 300):
        tokenizers.save(tokenizer, path)
        loaded = tokenizers.load(path)
        assert (loaded.size, loaded.eot_id) == (tokenizer.size, tokenizer.eot_id)
        for text in [*documents, ODD_TEXT]:
            np.testing.assert_array_equal(loaded.encode([text])[0], tokenizer.encode([text])[0])
            assert loaded.decode(loaded.encode([text])[0]) == text


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"type": "tokenizers"}',
     b'{"type": "tokenizers", "eot": "x", "tokenizer": {}}'],
)  # fmt: skip
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: ") as error:
        tokenizers.load(path)
    assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        tokenizers.load(path)


def test_a_stored_tokenizer_must_have_its_end_of_text(documents):
    tree = json.loads(tokenizers.train_bpe(documents, 260).to_json())
    for eot in ("<other>", 3):
        with pytest.raises(ConfigError, match=r"not the tokenizer of a run"):
            tokenizers.from_json(json.dumps(tree | {"eot": eot}))


def word_level(*special):
    backend = hf.Tokenizer(hf.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(special))
    return backend


@pytest.mark.parametrize("as_directory", [True, False])
def test_tokenizer_of_a_path(tmp_path, as_directory):
    backend = word_level("<pad>", "</s>")
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizers.named(str(tmp_path if as_directory else tmp_path / "tokenizer.json"))
    assert (tokenizer.size, tokenizer.eot_id) == (5, 4)
    assert tokenizer.encode(["a b b a"])[0].tolist() == [0, 1, 1, 0]


def test_an_ordinary_token_ends_no_text_whatever_its_name(tmp_path):
    backend = word_level("<eos>")
    backend.add_tokens(["</s>"])  # which would come first
    backend.save(str(tmp_path / "tokenizer.json"))
    assert tokenizers.named(str(tmp_path)).eot == "<eos>"


def test_tokenizer_without_end_of_text(tmp_path):
    word_level("<pad>", "<stop>").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="special tokens are: <pad>, <stop>"):
        tokenizers.named(str(tmp_path))


def test_directory_without_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: .* is not byte, bpe, a path"):
        tokenizers.named(str(tmp_path))


def test_stored_form_is_one_json_object(documents):
    assert json.loads(ByteTokenizer().to_json()) == {"type": "byte"}
    assert json.loads(tokenizers.train_bpe(documents, 260).to_json())["eot"] == "<|endoftext|>"


def test_ids_are_as_small_as_they_can_be():
    assert tokenizers.token_dtype(2**16) == np.uint16
    assert tokenizers.token_dtype(2**16 + 1) == np.uint32


def chat():
    tokenizer = tokenizers.train_bpe([ODD_TEXT * 4], 260)
    tokenizer.backend.add_special_tokens(["<|im_start|>"])
    return tokenizer


@pytest.mark.parametrize("make", [ByteTokenizer, chat])
def test_special_tokens_in_a_text_are_tokens_only_on_purpose(make):
    tokenizer = make()
    names = {"<|endoftext|>": tokenizer.eot_id}
    if make is chat:
        names["<|im_start|>"] = 260
    text = "é "
    expected = tokenizer.encode([text])[0].tolist()
    for name, token in names.items():
        text += f"{name}{name}user\n"
        expected += [token, token, *tokenizer.encode(["user\n"])[0].tolist()]
    for _ in range(2):  # neither changes how the other reads
        (ids,) = tokenizer.encode([text], special_tokens=True)
        assert ids.tolist() == expected and ids.dtype == tokenizers.token_dtype(tokenizer.size)
        (ids,) = tokenizer.encode([text])
        assert not set(ids.tolist()) & set(names.values()) and tokenizer.decode(ids) == text
    assert tokenizer.encode(["", "a"], special_tokens=True)[0].size == 0
