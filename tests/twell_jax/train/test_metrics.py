"""What is measured goes to metrics.jsonl; TensorBoard and Weights & Biases get the same numbers."""

import dataclasses
import json
import sys
import time
from datetime import datetime
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from rich.console import Console

from tests.packages import needed
from twell_jax import config
from twell_jax.config import Config, ConfigError
from twell_jax.train import metrics, sparsity_control
from twell_jax.train import progress as display
from twell_jax.train.gradient_plan import GradientPlan
from twell_jax.train.metrics import SINKS
from twell_jax.train.sample import Sample
from twell_jax.train.state import StepMetrics


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until its "now" is set."""
    clock = {"now": 0.0}
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock["now"])
    return clock


def measured():
    layers = jnp.ones(2)
    return StepMetrics(
        *[jnp.float32(1)] * 5,
        nnz=layers,
        max_nnz=layers,
        dead=layers,
        overflow=layers,
        mean_union=layers / 4,
    )


def test_tokens_per_second_count_neither_compilation_nor_evaluation(tmp_path, clock):
    settings = config.load(
        "configs/tiny.yaml", ["steps=20", "log_every=2", "eval_every=4", "batch_tokens=1024"]
    )
    shown = []
    with metrics.Log(tmp_path / "metrics.jsonl", 0) as log:
        recorder = metrics.Recorder(settings, log, lambda record, _: shown.append(record), None)
        for step in range(1, 9):
            clock["now"] += 60 if step == 1 else 2  # the first compiles, the others take 2 s
            recorder.add(step, measured())
            recorder.flush()
            if step == 4:
                clock["now"] += 100
                recorder.add_evaluation(step, 1.0, 2.0)
    assert [record["tokens_per_second"] for record in shown] == [0.0] + 7 * [512.0]
    records = metrics.read(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [2, 4, 4, 6, 8]
    totals = {"seconds": 166.0, "joules": None}  # these count all; there is no GPU
    assert records[2] == {"step": 4, "held_out_ce": 1.0, "unigram_ce": 2.0, **totals}


def test_the_last_step_is_logged_whatever_its_number(tmp_path):
    settings = config.load("configs/tiny.yaml", ["steps=5", "log_every=2"])
    with metrics.Log(tmp_path / "metrics.jsonl", 0) as log:
        recorder = metrics.Recorder(settings, log, lambda *_: None, None)
        for step in range(1, 6):
            recorder.add(step, measured())
        recorder.flush()
    assert [record["step"] for record in metrics.read(tmp_path / "metrics.jsonl")] == [2, 4, 5]


def test_a_step_with_another_plan_of_gradients_compiles_and_shows_it(tmp_path, clock):
    settings = config.load("configs/tiny.yaml", ["log_every=1", "batch_tokens=1024"])
    shown = []
    dense = GradientPlan.dense(layers=2)
    mixed = dataclasses.replace(dense, capacities=(0.5, 0.0))
    shares = {"union": jnp.array([0.4, 0.9]), "listed": jnp.array([0.3, 0.8])}
    with metrics.Log(tmp_path / "metrics.jsonl", 0) as log:
        recorder = metrics.Recorder(settings, log, lambda record, _: shown.append(record), None)
        for step, plan in enumerate([dense, dense, mixed, mixed], start=1):
            clock["now"] += 60 if step in (1, 3) else 2
            recorder.add(step, dataclasses.replace(measured(), **shares), plan)
            recorder.flush()
    assert [record["tokens_per_second"] for record in shown] == [0.0, 512.0, 512.0, 512.0]
    assert [record["sparse_gradients"] for record in shown] == 2 * [[False] * 2] + 2 * [
        [True, False]
    ]
    assert shown[-1]["union"] == pytest.approx([0.4, 0.9])
    console = Console(record=True, width=120)
    console.print(display.layer_table(shown[-1], 512))
    text = console.export_text()
    kinds = " sparse │", " dense ", " 50% sparse "
    shown_shares = " 25.0% ", " 40% ", " 90% ", " 65% ", " 30% ", " 55% "
    assert all(part in text for part in (*kinds, *shown_shares))


def test_layers_of_version_0_2_are_shown_without_u():
    record = {"step": 1, "nnz": [8.0], "max_nnz": [9], "dead": [0.0], "overflow": [0.0]}
    for also, columns in ({}, 5), ({"mean_union": [0.5]}, 6):
        assert len(display.layer_table(record | also, 512).columns) == columns


def test_a_target_out_of_reach_is_a_warning_once(tmp_path, caplog):
    settings = config.load("configs/tiny.yaml", ["sparsity_target=5", "l1_warmup=[0, 0]"])
    start, bound = settings.sparsity_control_start, jnp.float32(sparsity_control.MOST)
    many = jnp.full(2, 9.0)
    with metrics.Log(tmp_path / "metrics.jsonl", start) as log:
        recorder = metrics.Recorder(settings, log, lambda *_: None, None)
        for step, coefficient in enumerate([1.0, bound, bound, bound], start=start + 1):
            recorder.add(
                step,
                dataclasses.replace(measured(), nnz=many, l1_coefficient=jnp.float32(coefficient)),
            )
        recorder.flush()
    (warning,) = caplog.messages
    assert warning.startswith(f"step {start + 2}: sparsity_target: the L1 coefficient has reached")


def test_a_target_of_u_is_recorded_beside_what_it_is_for(tmp_path, caplog):
    settings = config.load("configs/tiny.yaml", ["union_target=0.3", "l1_warmup=[0, 0]"])
    step, records = settings.sparsity_control_start + 1, []
    with metrics.Log(tmp_path / "metrics.jsonl", step) as log:
        recorder = metrics.Recorder(settings, log, lambda record, _: records.append(record), None)
        found = {"mean_union": jnp.array([0.25, 0.5]), "l1_coefficient": jnp.float32(10)}
        recorder.add(step, dataclasses.replace(measured(), **found))
        recorder.flush()
    assert (records[0]["union_target"], records[0]["mean_union"]) == (0.3, [0.25, 0.5])
    assert "sparsity_target" not in records[0]
    assert "256 neighbouring tokens use 37.5% of the neurons, not 30.0%" in caplog.text
    table = Console(record=True, width=120)
    table.print(display.layer_table(records[0], 512))
    text = table.export_text()
    assert all(part in text for part in (" U ", " 25.0% ", " 50.0% ", " 37.5% "))


def test_a_cut_last_line_is_left_out_and_another_bad_line_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert metrics.read(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl:2: not a line of JSON"):
        metrics.read(path)


def test_a_continued_log_drops_what_comes_after_the_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    with metrics.Log(path, step=2) as log:
        log.write({"step": 3, "held_out_ce": 1.5})
    assert metrics.read(path) == [{"step": 1}, {"step": 2}, {"step": 3, "held_out_ce": 1.5}]


STEP = {"step": 1, "ce": 1, "l1": 2.5, "tokens_per_second": 9, "nnz": [1, 2], "max_nnz": [1, 2],
        "dead": [0, 0.5], "overflow": [0, 0]}  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "3",
        "[]",
        '"step"',
        "{}",
        '{"step": "one"}',
        '{"step": true}',
        '{"step": 2, "held_out_ce": "low"}',
        '{"step": 2, "ce": 1.5}',
        json.dumps(STEP | {"nnz": [1, "many"]}),
        json.dumps(STEP | {"nnz": [1]}),
        json.dumps(STEP | {"nnz": 3}),
        json.dumps({name: value[:1] if isinstance(value, list) else value
                    for name, value in STEP.items()}),
        json.dumps({name: value for name, value in STEP.items() if name != "dead"}),
        "[" * 100_000,
        "\udcff",
    ],
)  # fmt: skip
def test_a_foreign_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(STEP), json.dumps(STEP | {"sparse_gradients": [True, False]}), '{"step": 1}'
    path.write_text("\n".join([*good, line, ""]), errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"metrics.jsonl:4: not a (line|record) of "):
        metrics.read(path)
    path.write_text("\n".join([*good, ""]))
    assert len(metrics.read(path)) == 3


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
    needed({"tensorboard": "tensorboardX"}.get(request.param, request.param))
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
    wandb, asked = needed("wandb"), []

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
    wandb = needed("wandb")

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


def test_an_evaluation_has_bits_per_byte_and_a_text_which_sinks_do_not_get(tmp_path, monkeypatch):
    added = []
    sink = metrics.Sink(lambda numbers, step: added.append(numbers), lambda: None)
    monkeypatch.setitem(SINKS, "tensorboard", lambda *_: sink)
    path, settings = tmp_path / "metrics.jsonl", config.load("configs/tiny.yaml")
    with metrics.Log(path, 0, ["tensorboard"]) as log:
        recorder = metrics.Recorder(settings, log, lambda *_: None, None)
        recorder.add_evaluation(4, 1.0, 2.0, 0.25, Sample("def ", "f():\n"))
    (record,) = metrics.read(path)
    texts = {"prompt": "def ", "sample": "f():\n"}
    assert record.items() >= ({"held_out_ce": 1.0, "bits_per_byte": 0.25} | texts).items()
    assert added[0]["bits_per_byte/all"] == 0.25 and not added[0].keys() & {"sample/all", "sample"}


def test_a_run_that_starts_anew_keeps_no_record_of_an_earlier_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "source_ce": 5.3}\n{"step": 1, "ce": 2.0}\n')
    with metrics.Log(path, step=0) as log:
        assert log.last is None
    assert path.read_text() == ""
