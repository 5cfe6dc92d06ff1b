import itertools
import json
import logging

import numpy as np
import pytest

from tests import seeds
from twell_jax import data
from twell_jax.config import ConfigError
from twell_jax.data import sources, tokenizers

CONTEXT = 16


def first_epoch(loaded, stream):
    """The first epoch over a training stream, and what it should hold, both sorted."""
    count = (len(stream) - 1) // CONTEXT
    batches = itertools.islice(loaded.train, -(-count // 8))
    windows = np.concatenate([batch["tokens"] for batch in batches])[:count].tolist()
    expected = [stream[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(count)]
    return sorted(windows), sorted(expected)


def files(directory, pattern="*.txt", **settings):
    return {"source": "files", "paths": [str(directory / pattern)], **settings}


def stream_of(texts):
    """The bytes of each text followed by end-of-text, as a list."""
    return [token for text in texts for token in [*text.encode(), 256]]


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_splits_are_whole_documents_and_disjoint(make_config, text_dir, documents):
    config = make_config(files(text_dir), eval_sequences=1000)
    loaded = data.load(config)
    held_out = [text for text in documents if sources.is_held_out(text, 0.3)]
    train = [text for text in documents if text not in held_out]
    assert held_out and train

    epoch, expected = first_epoch(loaded, stream_of(train))
    assert epoch == expected

    stream = stream_of(held_out)
    windows = (len(stream) - 1) // CONTEXT
    assert loaded.held_out.dtype == np.int32
    assert loaded.held_out.shape == (windows, CONTEXT + 1)
    assert loaded.held_out[:, 1:].ravel().tolist() == stream[1 : windows * CONTEXT + 1]


def test_second_load_reads_the_cache(make_config, text_dir, monkeypatch):
    config = make_config(files(text_dir))
    first = data.load(config)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "encode_documents", lambda *_: pytest.fail("tokenised again"))
        second = data.load(config)
        np.testing.assert_array_equal(first.held_out, second.held_out)
        np.testing.assert_array_equal(
            next(iter(first.train))["tokens"], next(iter(second.train))["tokens"]
        )
        assert first.unigram_cross_entropy == second.unigram_cross_entropy


def test_changed_tokens_in_the_cache_are_not_trained_on(make_config, text_dir, tmp_path, caplog):
    config = make_config(files(text_dir))
    first = data.load(config)
    (shard,) = tmp_path.glob("cache/*/train-00000.npy")
    tokens = np.load(shard)
    np.save(shard, tokens[::-1])
    again = data.load(config)
    assert again.fingerprint == first.fingerprint
    np.testing.assert_array_equal(np.load(shard), tokens)
    assert "is damaged, or of an older version, and built again" in caplog.text


@pytest.mark.parametrize("change", ["edit", "add", "fraction", "tokenizer"])
def test_cache_follows_content_and_settings(make_config, text_dir, change):
    before = data.load(make_config(files(text_dir), eval_sequences=1000))
    settings = {}
    if change == "edit":
        path = text_dir / "00.txt"
        path.write_text(path.read_text().swapcase())  # the same size
    elif change == "add":
        (text_dir / "new.txt").write_text("new document " * 200)
    elif change == "fraction":
        settings = {"held_out_fraction": 0.6}
    else:
        settings = {"tokenizer": "bpe"}
    after = data.load(make_config(files(text_dir, **settings), eval_sequences=1000))
    assert before.unigram_cross_entropy != after.unigram_cross_entropy


def test_bpe_is_trained_on_the_training_documents_and_kept(
    make_config, text_dir, documents, monkeypatch
):
    config = make_config(files(text_dir, tokenizer="bpe"))
    train = [text for text in documents if not sources.is_held_out(text, 0.3)]
    loaded = data.load(config)
    assert loaded.tokenizer.to_json() == tokenizers.train_bpe(train, 300).to_json()
    monkeypatch.setattr(tokenizers, "train_bpe", lambda *_: pytest.fail("trained again"))
    assert data.load(config).tokenizer.to_json() == loaded.tokenizer.to_json()


def test_jsonl_lines_are_documents(make_config, tmp_path, text_dir, documents):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    lines = data.load(make_config(files(tmp_path, path.name)))
    whole = data.load(make_config(files(text_dir)))
    np.testing.assert_array_equal(lines.held_out, whole.held_out)


def test_another_field_of_the_same_lines_is_not_taken_from_the_cache(
    make_config, tmp_path, documents
):
    lines = (json.dumps({"text": text, "other": text.swapcase()}) for text in documents)
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    found = [
        data.load(make_config(files(tmp_path, "*.jsonl", text_field=field))).fingerprint
        for field in ("text", "other", "text")
    ]
    assert found[0] == found[2] != found[1]


def test_the_end_of_a_single_file_is_held_out(make_config, tmp_path, caplog):
    text = "".join(map(chr, seeds.rng().integers(97, 123, 1000)))
    (tmp_path / "input.txt").write_text(text)
    one = files(tmp_path, "input.txt", held_out_fraction=0.1)
    loaded = data.load(make_config(one, eval_sequences=1000))
    assert "too few documents to hold out whole ones, so the last 10 %" in caplog.text
    epoch, expected = first_epoch(loaded, stream_of([text[:900]]))
    assert epoch == expected
    assert loaded.held_out[:, :-1].ravel().tolist() == [*text[900:].encode()][:96]


@pytest.mark.parametrize("fraction", [0.5, 0.1])  # a hash would hold out the file, or not
def test_the_end_of_a_single_file_does_not_shape_the_bpe(make_config, tmp_path, fraction):
    text = "".join(seeds.rng().choice(["abc ", "de ", "fghi\n"], 2000))
    (tmp_path / "input.txt").write_text(text + text.upper())
    one = files(tmp_path, "input.txt", tokenizer="bpe", held_out_fraction=fraction)
    loaded = data.load(make_config(one, {"vocab_size": 262}))
    kept = (text + text.upper())[: int(2 * len(text) * (1 - fraction))]
    assert loaded.tokenizer.to_json() == tokenizers.train_bpe([kept], 262).to_json()


def test_the_end_of_several_documents_divides_one_of_them():
    texts = ["ab", "", "cdef", "g"]
    split = list(sources.by_position(texts, fraction=3 / 7, characters=7))
    assert split == [("ab", False), ("", False), ("cd", False), ("ef", True), ("g", True)]
    whole = list(sources.by_position(texts, fraction=5 / 7, characters=7))
    assert whole == [("ab", False), ("", False), ("cdef", True), ("g", True)]


def test_thirty_small_files_are_enough(make_config, tmp_path, caplog):
    held_out = {}
    for corpus in range(8):
        directory = tmp_path / str(corpus)
        directory.mkdir()
        for i in range(30):
            (directory / f"{i}.txt").write_text(f"small file {i} of corpus {corpus}")
        settings = files(directory, held_out_fraction=0.05)
        held_out[corpus] = len(data.load(make_config(settings, eval_sequences=99)).held_out)
    assert min(held_out.values()) > 0
    assert 0 < len(warnings(caplog)) < 8  # of some, the hash holds out no file


def test_of_many_documents_whole_ones_are_held_out(make_config, text_dir, caplog):
    data.load(make_config(files(text_dir)))
    assert not warnings(caplog)


def test_a_file_that_is_no_text_is_left_out_and_counted(make_config, text_dir, caplog):
    clean = data.load(make_config(files(text_dir)))
    (text_dir / "05b.txt").write_bytes(b"caf\xe9")
    (text_dir / "07b.txt").write_bytes(b"\xff\xfe")
    for _ in range(2):  # also where the tokens come from the cache
        caplog.clear()
        mixed = data.load(make_config(files(text_dir)))
        assert mixed.fingerprint == clean.fingerprint
        (warning,) = warnings(caplog)
        assert "data.paths: 2 of 42 files are not UTF-8 text and left out: " in warning
        assert "05b.txt (at byte 3), " in warning
    with pytest.raises(ConfigError, match=r"^data\.paths: 2 of 42 files are not UTF-8 .*05b"):
        data.load(make_config(files(text_dir, strict=True)))


def test_files_of_which_none_is_text_are_an_error(make_config, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1\xff\xff")
    with pytest.raises(ConfigError, match=r"a\.parquet \(at byte 4; data\.source=hf reads such"):
        data.load(make_config(files(tmp_path, "a.parquet")))


def test_a_file_with_null_characters_is_doubted(make_config, text_dir, caplog):
    (text_dir / "binary.txt").write_bytes(b"ELF\0\0\0" * 9)
    data.load(make_config(files(text_dir)))
    (warning,) = warnings(caplog)
    assert "1 of 41 files is read as text, but with null characters: " in warning


def test_the_seed_decides_the_order_of_the_data(make_config, text_dir):
    first, again, other = (
        next(iter(data.load(make_config(files(text_dir), seed=seed)).train))["tokens"]
        for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_unigram_cross_entropy():
    train = np.array([[9, 0, 0, 1]])  # 0 twice, 1 once of three; smoothed 3/6, 2/6, 1/6
    held_out = np.array([[0, 1, 2], [2, 0, 0]])
    expected = -np.mean(np.log([2 / 6, 1 / 6, 3 / 6, 3 / 6]))
    assert data.unigram_cross_entropy(train, held_out, 3) == pytest.approx(expected)


def save_shards(directory, *shards):
    for i, shard in enumerate(shards):
        np.save(directory / f"{i}.npy", shard)
    return {"source": "tokens", "paths": [str(directory / "[0-9].npy")]}


def test_tokens_with_a_held_out_tail(make_config, tmp_path):
    tokens = seeds.rng().integers(0, 257, 2000, np.uint16)
    loaded = data.load(make_config(save_shards(tmp_path, tokens[:700], tokens[700:])))
    tail = tokens[1400:]
    assert loaded.held_out.shape == (4, CONTEXT + 1)
    for window, i in zip(loaded.held_out, [0, 9, 18, 27], strict=True):  # of 37
        np.testing.assert_array_equal(window, tail[i * CONTEXT : (i + 1) * CONTEXT + 1])
    epoch, expected = first_epoch(loaded, tokens[:1400].tolist())
    assert epoch == expected


def test_a_fingerprint_is_that_of_the_tokenizer_and_the_training_tokens(make_config, tmp_path):
    tokens = seeds.rng().integers(0, 256, 2000, np.uint16)

    def fingerprint(tokens, tokenizer=None, **settings):
        config = make_config(save_shards(tmp_path, tokens), **settings)
        return data.load(config, tokenizer).fingerprint

    others, other_held_out = tokens.copy(), tokens.copy()
    others[5] += 1  # as many as before
    other_held_out[1500] += 1
    expected = fingerprint(tokens)
    assert fingerprint(other_held_out, seed=1) == expected
    assert fingerprint(others) != expected
    assert fingerprint(tokens[:-10]) != expected
    assert fingerprint(tokens, tokenizers.train_bpe(["text"], 257)) != expected


def test_tokens_with_held_out_shards(make_config, tmp_path):
    settings = save_shards(tmp_path, np.full(100, 1, np.uint32))
    np.save(tmp_path / "held_out.npy", np.full(200, 2, np.uint16))
    settings["held_out_paths"] = [str(tmp_path / "held_out.npy")]
    loaded = data.load(make_config(settings))
    assert (loaded.held_out == 2).all()
    assert (next(iter(loaded.train))["tokens"] == 1).all()
    assert loaded.unigram_cross_entropy == pytest.approx(np.log(300 + 6 * CONTEXT))


def test_a_shard_is_not_trained_on_and_held_out(make_config, tmp_path):
    settings = save_shards(tmp_path, np.full(100, 1, np.uint32))
    settings["held_out_paths"] = settings["paths"]
    with pytest.raises(
        ConfigError, match=r"^data\.held_out_paths: .*\.npy is in data\.paths, too; "
    ):
        data.load(make_config(settings))


def test_held_out_shards_must_hold_a_window(make_config, tmp_path):
    settings = save_shards(tmp_path, np.full(100, 1, np.uint32))
    np.save(tmp_path / "held_out.npy", np.full(CONTEXT, 2, np.uint16))
    settings["held_out_paths"] = [str(tmp_path / "held_out.npy")]
    with pytest.raises(ConfigError, match=rf"^data\.held_out_paths: there are {CONTEXT} tokens"):
        data.load(make_config(settings))
    settings["held_out_paths"] = []
    with pytest.raises(ConfigError, match=r"^data\.held_out_fraction: .* are needed; "):
        data.load(make_config(settings | {"held_out_fraction": 1e-9}))


def test_tokens_beyond_the_vocabulary(make_config, tmp_path):
    settings = save_shards(tmp_path, np.full(1000, 300, np.uint16))
    with pytest.raises(ConfigError, match=r"^model\.vocab_size: .* token 300"):
        data.load(make_config(settings))


def test_tokenizer_beyond_the_vocabulary(make_config, text_dir):
    with pytest.raises(ConfigError, match=r"^model\.vocab_size: the tokenizer byte has 257 tokens"):
        data.load(make_config(files(text_dir), {"vocab_size": 256}))


@pytest.mark.parametrize(("fraction", "split"), [(1e-9, "held-out"), (1 - 1e-9, "training")])
def test_both_splits_must_hold_a_window(make_config, text_dir, fraction, split):
    with pytest.raises(ConfigError, match=rf"^data\.held_out_fraction: .* {split} split has [02] "):
        data.load(make_config(files(text_dir, held_out_fraction=fraction)))


@pytest.mark.parametrize("count", [3, 16])
def test_batch_must_divide_among_processes(make_config, text_dir, count):
    with pytest.raises(ConfigError, match=r"^batch_tokens: 8 sequences"):
        data.load(make_config(files(text_dir)), process_count=count)


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_bits_per_byte_count_the_bytes_of_what_is_predicted(
    make_config, tmp_path, documents, tokenizer
):
    for i, text in enumerate(documents):
        (tmp_path / f"{i}.txt").write_text(text.replace("alpha", "naïve 漢字 🙂"))
    loaded = data.load(make_config(files(tmp_path, tokenizer=tokenizer), eval_sequences=1000))
    predicted = loaded.held_out[:, 1:].ravel()
    if tokenizer == "byte":
        size = np.sum(predicted < 256)
    else:  # a byte-level bpe spells each byte as one character
        names = [loaded.tokenizer.backend.id_to_token(int(i)) for i in predicted]
        size = sum(map(len, names)) - len("<|endoftext|>") * names.count("<|endoftext|>")
    # Where a window begins within a character, its rest may be counted wrongly by two bytes.
    assert loaded.held_out_bytes == pytest.approx(size, abs=0 if tokenizer == "byte" else 20)
    bits = loaded.bits_per_byte(np.log(2))  # a bit for each token
    assert bits == pytest.approx(predicted.size / loaded.held_out_bytes)


def test_tokens_of_another_tokenizer_have_no_bits_per_byte(make_config, tmp_path, caplog):
    np.save(tmp_path / "shard.npy", np.arange(256, dtype=np.uint16))
    shards = {"source": "tokens", "paths": [str(tmp_path / "shard.npy")]}
    assert data.load(make_config(shards)).held_out_bytes == 64 and not warnings(caplog)
    np.save(tmp_path / "shard.npy", np.arange(2000, dtype=np.uint16) % 257)
    assert data.load(make_config(shards)).held_out_bytes and not warnings(caplog)
    np.save(tmp_path / "shard.npy", np.arange(44, 300, dtype=np.uint16))
    loaded = data.load(make_config(shards))
    assert loaded.held_out_bytes is None and loaded.bits_per_byte(1.0) is None
    (warning,) = warnings(caplog)
    assert "the shards hold token 287, and byte has 257" in warning
    assert "no bits per byte and no sample text" in warning
