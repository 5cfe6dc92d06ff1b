"""Files and names of others: nothing waits for a pipe, leaves a directory or rules a terminal."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell_jax import untrusted
from twell_jax.config import ConfigError, DataConfig, read
from twell_jax.data import json_files, records, shards, text_files, tokenizers
from twell_jax.models.pretrained import PretrainedError, files, json_file
from twell_jax.train import metrics
from twell_jax.train.checkpoint import Checkpoints
from twell_jax.train.checkpoint_errors import CheckpointError

READERS = {
    "configuration": (ConfigError, read),
    "shard": (ConfigError, lambda path: shards.open_shards([path], key="data.paths")),
    "document": (ConfigError, text_files.read),
    "tokenizer": (ConfigError, lambda path: tokenizers.named(str(path))),
    "tokenizer of a run": (ConfigError, tokenizers.load),
    "JSON of a model": (PretrainedError, json_file.read_json),
    "tensors": (PretrainedError, lambda path: files.tensors(path.parent)),
    "metrics": (OSError, metrics.read),
}


@pytest.fixture
def too_long():
    """Whoever waits for a pipe is told so."""

    def stop(*_):
        raise AssertionError("waits")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(5)
    yield
    signal.alarm(0)


@pytest.mark.parametrize(("error", "read"), READERS.values(), ids=READERS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_every_reader_takes_regular_files_alone(tmp_path, too_long, error, read, kind):
    path = tmp_path / "model.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/full")  # gives zeros without end
    with pytest.raises(error, match="not a regular file") as raised:
        read(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "read"), [READERS[name] for name in READERS if name not in ("shard", "tensors")]
)
def test_no_reader_reads_without_bounds(tmp_path, error, read):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(error, match=r"larger than [\d.]+ MiB"):
        read(path)


def test_a_checkpoint_with_a_pipe_is_not_restored(tmp_path, too_long):
    (tmp_path / "checkpoints" / "3" / "data").mkdir(parents=True)
    os.mkfifo(tmp_path / "checkpoints" / "3" / "data" / "metadata")
    with (
        Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints,
        pytest.raises(CheckpointError, match=r"step 3: OSError: .*not a regular file"),
    ):
        checkpoints.restore_position()


def test_a_session_of_weights_and_biases_has_a_plain_name(tmp_path, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **_: pytest.fail("began"))
    )
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "id").write_text("../../elsewhere")
    with pytest.raises(ConfigError, match=r"wandb/id: is no id of a run at Weights & Biases; rem"):
        metrics.Log(tmp_path / "metrics.jsonl", 0, ["wandb"])


def test_a_file_is_read_up_to_its_last_permitted_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "_CHUNK", 3)
    path = tmp_path / "file"
    path.write_bytes(b"abcdefgh")
    assert untrusted.read(path, 8) == b"abcdefgh"
    with pytest.raises(OSError, match="larger than"):
        untrusted.read(path, 7)
    # The size of these is said to be 0.
    with pytest.raises(OSError, match="larger than"):
        untrusted.read(Path("/proc/self/maps"), 9)
    with pytest.raises(IsADirectoryError):
        untrusted.read(tmp_path, 8)


def test_names_of_files_are_spelt_out_in_warnings(tmp_path, caplog):
    paths = [tmp_path / "\x1b[2Jbroken", tmp_path / "text"]
    for path, content in zip(paths, [b"\xff", b"text"], strict=True):
        path.write_bytes(content)
    text_files.digests(paths, DataConfig(source="files", paths=["*"]))
    assert "\\x1b[2Jbroken (at byte 0)" in caplog.text and "\x1b" not in caplog.text


def test_a_line_of_jsonl_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "_MOST_OF_A_LINE", 20)
    reader = records.reader(DataConfig())
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "12345678"}\n{"text": "123456789"}')
    assert len('{"text": "12345678"}') == 20
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: a line of more than"):
        list(json_files.lines(path, reader))
    path.write_text('{"text": "1234567"}\n{"text": "12345678"}')
    assert list(json_files.lines(path, reader)) == ["1234567", "12345678"]


@pytest.mark.parametrize(
    ("name", "inside"),
    [("a", True), ("a/b.c", True), ("refs/pr/1", True), ("a..b", True), ("..", False),
     ("", False), (".", False), ("/a", False), ("a/../../b", False), ("a\0", False)],
)  # fmt: skip
def test_names_that_stay_in_their_directory(name, inside):
    assert untrusted.is_inside(name) == inside


@given(st.text())
def test_a_message_is_a_plain_line_whatever_is_in_it(text):
    for error in (ConfigError(text), PretrainedError(text)):
        assert str(error).isprintable()
    assert untrusted.plain("漢字 é 🙂 'x' \\") == "漢字 é 🙂 'x' \\"


def test_escapes_are_spelt_out_and_long_messages_cut():
    assert untrusted.plain("a\x1b[2J\x07\u202eb\tc\nd") == "a\\x1b[2J\\x07\\u202eb\\tc d"
    assert len(untrusted.plain("x" * 10**6)) < 5000
    assert len(untrusted.short(["x" * 10**6] * 9)) < 1000
