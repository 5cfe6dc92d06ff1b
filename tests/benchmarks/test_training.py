"""benchmarks.training: rows of a whole step on several devices, with the pattern asked for."""

import gc
import json

import jax
import pytest

from benchmarks import inference, training
from benchmarks.pages import TABLES
from tests.packages import needed
from twell_jax.train import roofline

SMALL = """
run_dir: unused
steps: 10
batch_tokens: 1024
micro_batch: 2
model: {vocab_size: 61, context: 64, d_model: 128, layers: 2, heads: 2, d_ff: 512, dtype: float32}
"""


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setitem(inference.NNZ, "small", 20)
    monkeypatch.setattr(training, "STEPS", 1)
    (tmp_path / "small.yaml").write_text(SMALL)
    return str(tmp_path / "small.yaml")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """`measured(*arguments)` are the rows of the benchmark."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["training", *arguments, "--out", str(tmp_path)])
        training.main()
        (path,) = tmp_path.glob("training-*.json")
        return json.loads(path.read_text())["rows"]

    return run


def held():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
def test_a_record_of_several_meshes(small, measured):
    before = held()
    one, data, fsdp = rows = measured(small, "--devices", "1", "2", "--only", "xla, relu")
    assert held() == before
    assert [(row["devices"], row["fsdp"]) for row in (one, data, fsdp)] == [(1, 1), (2, 1), (2, 2)]
    for row in (one, data, fsdp):
        assert row["implementation"] == "xla, relu" and row["sparse_layers"] == 0
        assert row["batch_tokens"] == row["devices"] * 2 * 64
        speed = row["tokens_per_second"] / row["devices"]
        assert row["efficiency"] == pytest.approx(speed / one["tokens_per_second"])
        # Most neurons are active for the first token of 64.
        assert sum(row["nnz_by_layer"]) / 2 == pytest.approx(20 + 500 / 64, rel=0.3)
    for name in ("ce", "grad_norm"):
        assert fsdp[name] == pytest.approx(data[name], rel=1e-2)
    assert fsdp["peak_bytes"] < data["peak_bytes"]
    shared, _, *lines = TABLES["training"].render(rows).splitlines()
    assert shared == "All lines: model small, micro-batch 2, block xla, relu."
    assert len(lines) == 2 + len(rows)
    assert lines[2].startswith("| 1 x 1 | 128 | ") and "%" not in lines[2]
    assert f" ({data['efficiency']:.0%}) | " in lines[3]


@pytest.mark.peers
@pytest.mark.slow
def test_a_row_of_qwix_multiplies_in_8_bits(small, measured):
    needed("qwix")
    by_xla, by_qwix = measured(small, "--devices", "1", "--only", "xla, relu", "qwix, relu")
    assert "failed" not in by_qwix
    # The same weights and tokens, and rounding is seen.
    assert by_qwix["ce"] == pytest.approx(by_xla["ce"], rel=0.05)
    assert by_qwix["grad_norm"] == pytest.approx(by_xla["grad_norm"], rel=0.2)
    assert by_qwix["ce"] != pytest.approx(by_xla["ce"], rel=1e-5)


@pytest.mark.slow
def test_the_row_of_what_cannot_be_served_says_why(small, measured):
    (row,) = measured(small, "--devices", "1", "--only", "sparse, relu")
    assert "RTX Blackwell GPU, got cpu" in row["failed"]
    *_, line = TABLES["training"].render([row]).splitlines()
    assert line == "| small | 1 x 1 | sparse, relu |"


def test_each_device_has_the_work_of_one(small):
    one, four, more = (
        training.configure(small, "xla, relu", devices, 1, overrides)
        for devices, overrides in [(1, []), (4, []), (4, ["batch_tokens=512"])]
    )
    assert (one.batch_tokens, four.batch_tokens) == (2 * 64, 4 * 2 * 64)
    assert (four.accumulation_steps(4), more.accumulation_steps(4)) == (1, 4)


def test_the_estimate_is_that_of_the_hardware(small):
    config = training.configure(small, "xla, relu", 4, 4, [])
    found = training.expected(config, 4, "NVIDIA H200")
    cost = roofline.step(config, 4, roofline.HARDWARE["h200"])
    assert found["estimate_ms"] == max(cost.seconds.values()) * 1e3
    assert found["estimate_collective_bytes"] == cost.fsdp > 0
    assert training.expected(config, 4, "cpu") == {}


def test_only_shapes_with_a_known_pattern(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["training", "configs/tiny.yaml"])
    with pytest.raises(SystemExit):
        training.main()
    assert "config: must be of 0p5b, 1b, 1p5b, 2b, got tiny" in capsys.readouterr().err
