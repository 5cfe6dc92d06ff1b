"""TensorBoard and Weights & Biases get the numbers of metrics.jsonl."""

import json
import sys
import time
from datetime import datetime
from types import SimpleNamespace

import pytest

from twell_jax.config import Config, ConfigError
from twell_jax.train import metrics
from twell_jax.train.sinks import SINKS


def records(content, length_at, header, trailer):
    """The whole parts of a file, each between a header, with the length, and a trailer."""
    position = 0
    while True:
        length = int.from_bytes(content[position:][slice(*length_at)], "little")
        start, position = position + header, position + header + length + trailer
        if position > len(content):
            return
        yield content[start : start + length]


def events(directory):
    """TensorBoard's: length, checksum, content, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = directory.glob("events.out.tfevents.*")
    return [Event.FromString(part) for part in records(path.read_bytes(), (0, 8), 12, 4)]


def of_tensorboard(directory):
    values = [(value, event.step) for event in events(directory) for value in event.summary.value]
    return {(value.tag, step): value.simple_value for value, step in values}


def of_wandb(directory):
    """Its records follow 7 bytes: checksum, length, kind, content. This many fit in one block."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    last, deadline = None, time.monotonic() + 30
    while last != "exit":  # another process writes the file, and may still do when the run ended
        assert time.monotonic() < deadline
        time.sleep(0.01)
        content = path.read_bytes()[7:]
        parts = [Record.FromString(part) for part in records(content, (4, 6), 7, 0)]
        last = parts[-1].WhichOneof("record_type") if parts else None
    found = {}
    for part in parts:
        for item in part.history.item:
            name = item.key or "/".join(item.nested_key)
            found[name, part.history.step.num] = json.loads(item.value_json)
    return {key: value for key, value in found.items() if not key[0].startswith("_")}


READERS = {"tensorboard": of_tensorboard, "wandb": of_wandb}


@pytest.fixture(params=SINKS)
def sink(request, monkeypatch):
    pytest.importorskip({"tensorboard": "tensorboardX"}.get(request.param, request.param))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    return request.param


def test_a_sink_gets_every_number(sink, tmp_path):
    with metrics.Log(tmp_path / "metrics.jsonl", 0, [sink]) as log:
        log.write({"step": 5, "ce": 1.5, "nnz": [3.0, 4.0]})
        log.write({"step": 6, "ce": 1.25})
    assert READERS[sink](tmp_path) == {
        ("step/all", 5): 5.0, ("ce/all", 5): 1.5, ("nnz/0", 5): 3.0, ("nnz/1", 5): 4.0,
        ("step/all", 6): 6.0, ("ce/all", 6): 1.25,
    }  # fmt: skip


def test_tensorboard_hides_what_earlier_sessions_wrote_later(tmp_path):
    with metrics.Log(tmp_path / "metrics.jsonl", 5, ["tensorboard"]) as log:  # which has step 5
        log.write({"step": 6})
    (start,) = (e.step for e in events(tmp_path) if e.HasField("session_log"))
    assert start == 6


def test_a_continued_run_keeps_its_id_at_weights_and_biases(tmp_path, monkeypatch):
    wandb, asked = pytest.importorskip("wandb"), []

    def init(**options):
        asked.append(options["id"])
        return SimpleNamespace(id=options["id"] or "of its own", finish=lambda: None)

    monkeypatch.setattr(wandb, "init", init)
    for step in (0, 5):
        with metrics.Log(tmp_path / "metrics.jsonl", step, ["wandb"]):
            pass
    assert asked == [None, "of its own"]


def test_sessions_that_start_in_the_same_second_write_apart(tmp_path, monkeypatch):
    def init(*, dir, id, **_):  # as W&B names its directories
        id = id or "abc"
        (dir / "wandb" / f"offline-run-{datetime.now():%Y%m%d_%H%M%S}-{id}").mkdir(parents=True)
        return SimpleNamespace(id=id, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=RuntimeError))
    for step in (0, 5):
        with metrics.Log(tmp_path / "metrics.jsonl", step, ["wandb"]):
            pass
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_what_weights_and_biases_refuses_is_one_line(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**options):
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    says = r"^wandb: No API key configured; WANDB_MODE=offline needs no account\Z"
    with pytest.raises(ConfigError, match=says):
        metrics.Log(tmp_path / "metrics.jsonl", 0, ["wandb"])


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_is_named_with_its_extra(name, tmp_path, monkeypatch):
    for package in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    says = rf"^{name}: needs \w+: in your clone, pip install -e '\.\[{name}\]'\Z"
    with pytest.raises(ConfigError, match=says):
        metrics.Log(tmp_path / "metrics.jsonl", 0, [name])


def test_every_sink_is_a_key_of_a_configuration():
    assert Config.model_fields.keys() >= SINKS.keys()
