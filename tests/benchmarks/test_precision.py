"""benchmarks.precision: pairs of runs in both dtypes, from several seeds."""

import json

import pytest

from benchmarks import precision, render
from tests.small_run import SETTINGS


@pytest.mark.slow
def test_pairs_differ_in_the_dtype_of_products(
    tmp_path, monkeypatch, capsys, text_settings, in_this_process
):
    small = [
        *SETTINGS,
        f"run_dir={tmp_path}/runs",
        "log_every=1",
        "data.tokenizer=byte",
        *text_settings,
    ]
    arguments = [str(precision.BASE), *small, "--seeds", "4", "7", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["precision", *arguments])
    precision.main()
    (path,) = tmp_path.glob("precision-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["seed"], row["variant"]) for row in rows] == [
        (seed, dtype) for seed in (4, 7) for dtype in ("bfloat16", "float8")
    ]
    for plain, in_8_bits in zip(rows[::2], rows[1::2], strict=True):
        assert plain["increase"] == 0 and plain["nnz_ratio"] == 1
        assert in_8_bits["held_out_ce"] != plain["held_out_ce"]
        assert in_8_bits["held_out_ce"] == pytest.approx(plain["held_out_ce"], rel=0.02)
        assert in_8_bits["increase"] == in_8_bits["held_out_ce"] / plain["held_out_ce"] - 1
        assert in_8_bits["tokens"] == 3 * 512
    monkeypatch.setattr("sys.argv", ["render", str(path)])
    capsys.readouterr()
    render.main()
    assert "| 7 | float8 |" in capsys.readouterr().out
