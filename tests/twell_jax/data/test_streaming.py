import gzip
import itertools
import json
import sys

import numpy as np
import pytest

from tests.packages import needed
from twell_jax import data
from twell_jax.config import ConfigError, DataConfig
from twell_jax.data import sources, streaming, tokenizers

needed("datasets")

CONTEXT = 16


@pytest.fixture(params=["jsonl", "parquet"])
def dataset_dir(request, tmp_path, documents):
    """A dataset of three files that hold the documents in order."""
    directory = tmp_path / "dataset"
    directory.mkdir()
    for i, part in enumerate(itertools.batched(documents, 15)):
        rows = [{"text": text, "length": len(text)} for text in part]
        path = directory / f"train-{i}.{request.param}"
        if request.param == "jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        else:
            pyarrow = needed("pyarrow")
            parquet = needed("pyarrow.parquet")
            parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    return directory


@pytest.fixture(autouse=True)
def few_documents_at_once(monkeypatch):
    """An epoch of 40 documents then takes several reads."""
    monkeypatch.setattr(streaming, "_DOCUMENTS", 7)


def streamed(dataset_dir, **settings):
    return {"source": "hf", "name": str(dataset_dir), **settings}


def take(iterator, steps):
    return np.stack([next(iterator)["tokens"] for _ in range(steps)])


def test_windows_are_the_training_documents_in_order(make_config, dataset_dir, documents):
    loaded = data.load(make_config(streamed(dataset_dir)))
    train, held_out = (
        [text for text in documents if sources.is_held_out(text, 0.3) == split]
        for split in (False, True)
    )
    stream = np.concatenate(list(tokenizers.encode_documents(loaded.tokenizer, train)))
    steps = 2 * stream.size // (8 * CONTEXT)  # two epochs, but for a part of a batch
    tokens = take(iter(loaded.train), steps).reshape(-1, CONTEXT + 1)
    np.testing.assert_array_equal(tokens[:, :-1].ravel(), np.resize(stream, tokens.shape[0] * 16))
    np.testing.assert_array_equal(tokens[1:, 0], tokens[:-1, -1])

    stream = np.concatenate(list(tokenizers.encode_documents(loaded.tokenizer, held_out)))
    np.testing.assert_array_equal(loaded.held_out[:, :-1].ravel(), stream[: 4 * CONTEXT])


def test_resume_is_exact(make_config, dataset_dir):
    config = make_config(streamed(dataset_dir))
    iterator = iter(data.load(config).train)
    states, steps = [iterator.get_state()], []
    for _ in range(20):  # more than two epochs
        steps.append(next(iterator)["tokens"])
        states.append(json.loads(json.dumps(iterator.get_state())))
    for step in 0, 1, 3, 8, 11, 17:
        resumed = iter(data.load(config).train)
        resumed.set_state(states[step])
        first = take(resumed, 1)
        assert resumed.get_state() == states[step + 1]  # from which a run is resumed again
        np.testing.assert_array_equal([*first, *take(resumed, 19 - step)], steps[step:])


def test_processes_share_the_batch_of_one(make_config, dataset_dir):
    config = make_config(streamed(dataset_dir))
    single = iter(data.load(config).train)
    for count in 2, 4:
        processes = [
            iter(data.load(config, process_index=i, process_count=count).train)
            for i in range(count)
        ]
        for _ in range(3):
            whole = next(single)["tokens"]
            parts = [next(process)["tokens"] for process in processes]
            assert sorted(np.concatenate(parts).tolist()) == sorted(whole.tolist())
            assert all(process.get_state() == single.get_state() for process in processes)
        single = iter(data.load(config).train)


NULLS = {17: 1, 18: 2, 40: 12}  # rows without a text before a document, both counted from 1


@pytest.fixture
def with_nulls(tmp_path, documents):
    """The documents, among them rows without a text: 17, 19, 20 and 43 to 54."""
    directory = tmp_path / "with nulls"
    directory.mkdir()
    rows = [
        {"text": text}
        for number, document in enumerate(documents, start=1)
        for text in [*[None] * NULLS.get(number, 0), document]
    ]
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return DataConfig(source="hf", name=str(directory), held_out_fraction=0.3)


def row_warnings(caplog):
    found = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    caplog.clear()
    assert not any("\n" in message for message in found)
    return found


def test_rows_without_a_text_are_left_out_and_warned_of(make_config, with_nulls, caplog):
    loaded = data.load(make_config(with_nulls.model_dump(exclude={"cache_dir"})))
    assert not row_warnings(caplog)  # it reads the dataset several times
    take(iter(loaded.train), 50)  # more than an epoch
    first, tenth, *_ = row_warnings(caplog)
    assert "row 17 is left out, as its field 'text' is null; of the rows so far " in first
    assert "row 49 is left out" in tenth and "that is so for 10; data.strict=true" in tenth


def test_the_rows_are_numbered_the_same_after_a_restart(with_nulls, documents, caplog):
    stream = sources.StreamedDocuments(with_nulls)
    positions = [None] + [json.loads(json.dumps(stream.position)) for _ in stream]
    messages = row_warnings(caplog)
    assert len(messages) == 2
    for start, later in (0, 2), (16, 2), (17, 1), (38, 1), (39, 1), (40, 0):
        resumed = sources.StreamedDocuments(with_nulls, positions[start])
        assert list(resumed) == documents[start:]
        assert row_warnings(caplog) == messages[2 - later :]
    as_of_0_2 = positions[20]["dataset"]
    assert list(sources.StreamedDocuments(with_nulls, as_of_0_2)) == documents[20:]


def test_strict_ends_at_a_row_without_a_text(make_config, with_nulls):
    settings = with_nulls.model_dump(exclude={"cache_dir"}) | {"strict": True}
    with pytest.raises(ConfigError, match=r": row 17: field 'text' must .*; data\.strict=false le"):
        data.load(make_config(settings))


def test_bpe_is_trained_on_the_stream(make_config, dataset_dir, documents):
    loaded = data.load(make_config(streamed(dataset_dir, tokenizer="bpe")))
    train = [text for text in documents if not sources.is_held_out(text, 0.3)]
    assert loaded.tokenizer.to_json() == tokenizers.train_bpe(train, 300).to_json()
    first = loaded.tokenizer.decode(next(iter(loaded.train))["tokens"][0])
    assert train[0].startswith(first)


def test_a_bpe_is_trained_on_the_first_documents_that_have_enough_characters(
    make_config, dataset_dir, documents, monkeypatch
):
    def train_bpe(texts, _):
        seen.extend(texts)
        return tokenizers.ByteTokenizer()

    train = [text for text in documents if not sources.is_held_out(text, 0.3)]
    seen = []
    monkeypatch.setattr(tokenizers, "train_bpe", train_bpe)
    for spare, count in ((0, 2), (1, 3)):
        monkeypatch.setattr(data.corpus, "BPE_CHARACTERS", len(train[0]) + len(train[1]) + spare)
        data.load(make_config(streamed(dataset_dir, tokenizer="bpe")))
        assert seen == train[:count]
        seen.clear()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text_field": "body"}, r"no field 'body' \(data\.text_field\); there are: text, length"),
        ({"text_field": "length"}, "field 'length' must hold text, not int"),
        ({"split": "validation"}, "validation"),
        ({"subset": "fr"}, "fr"),
        ({"name": "/no/such/directory"}, "/no/such/directory"),
        ({"held_out_fraction": 1e-9}, "held-out split has 0 tokens"),
    ],
)
def test_unusable_datasets(make_config, dataset_dir, settings, message):
    with pytest.raises(ConfigError, match=rf"^data\.(name|held_out_fraction): .*{message}"):
        data.load(make_config(streamed(dataset_dir) | settings))


@pytest.mark.parametrize("after", [[], ["train-0.jsonl"]])
def test_a_compressed_file_that_is_cut_short_is_one_line(make_config, tmp_path, after):
    rows = (json.dumps({"text": "a" * 80}) + "\n").encode()
    for name in after:
        (tmp_path / name).write_bytes(rows)
    (tmp_path / "train-1.jsonl.gz").write_bytes(gzip.compress(rows)[:-20])
    where = ": row 2" * len(after)
    with pytest.raises(ConfigError, match=rf"^data\.name: [^:]*{where}: EOFError: Compressed file"):
        data.load(make_config(streamed(tmp_path)))


def test_a_dataset_that_is_a_program_is_one_line(make_config, tmp_path):
    (tmp_path / f"{tmp_path.name}.py").write_text("print()")
    with pytest.raises(ConfigError, match=r"^data\.name: .*: RuntimeError: Dataset scripts are no"):
        data.load(make_config(streamed(tmp_path)))


def test_missing_library_names_the_extra(make_config, dataset_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[hf\]'"):
        data.load(make_config(streamed(dataset_dir)))
