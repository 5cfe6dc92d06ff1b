"""The benchmark harness: its patterns are what it says, its records are complete."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import ffn, kernels, record, render
from benchmarks.pages import TABLES
from benchmarks.patterns import RECORDED, recorded, with_padding
from pallas_kernels.kernels import REFERENCE
from tests import seeds
from tests.back_ends import changed
from twell_jax.analysis import patterns
from twell_jax.ffn import dispatch

independent = jax.jit(patterns.independent, static_argnums=(1, 2, 3, 4, 6))


@pytest.mark.parametrize("pattern", ["uniform", "skewed"])
@pytest.mark.parametrize("nnz", [10, 60])
def test_independent_patterns_have_the_wanted_density(pattern, nnz):
    key = jax.random.key(seeds.integer())
    x, w_gate = independent(key, pattern, 2000, 256, 1408, nnz, jnp.bfloat16)
    active = np.asarray(x, np.float32) @ np.asarray(w_gate, np.float32).T > 0
    assert abs(active.sum(1).mean() / nnz - 1) < 0.15
    never = 1 - active.any(0).mean()
    assert never > 0.29 if pattern == "skewed" else never < 0.1
    heavy = np.asarray(patterns.with_heavy_rows(x, 500), np.float32)
    fired = np.sum(heavy @ np.asarray(w_gate, np.float32).T > 0, axis=1)
    assert np.all(fired[::500] > 0.9 * 1408) and np.all(fired[1:500] < 0.5 * 1408)
    half = np.asarray(patterns.with_heavy_rows(x, 500, 0.0), np.float32)[::500]
    assert abs(np.mean(half @ np.asarray(w_gate, np.float32).T > 0) - 0.5) < 0.05


def test_padding_is_one_token_in_each_sequence():
    x = seeds.rng().standard_normal((20, 4)).astype(np.float32)
    padded = jax.jit(with_padding, static_argnums=1)(x, 8)
    np.testing.assert_array_equal(padded[:4], x[:4])
    np.testing.assert_array_equal(padded[4:8], x[[4] * 4])
    np.testing.assert_array_equal(padded[8:12], x[8:12])
    np.testing.assert_array_equal(padded[12:16], x[[12] * 4])
    np.testing.assert_array_equal(padded[16:], x[16:])


@pytest.mark.slow
def test_the_recorded_pattern_comes_out_of_the_gate():
    x, w_gate = recorded(jax.random.key(0), 16, 2048, jnp.bfloat16)
    active = np.asarray(x, np.float32) @ np.asarray(w_gate, np.float32).T > 0
    expected = np.unpackbits(np.load(RECORDED)["packed"][:16], axis=1)[:, :5632]
    np.testing.assert_array_equal(active, expected.astype(bool))


@pytest.mark.slow
def test_rows_are_complete_and_rendered(reference_kernels, monkeypatch, tmp_path):
    rows = []
    for pattern, nnz in (("skewed", 20), ("uniform", 5)):
        rows += ffn.measure(d=128, h=256, m=32, pattern=pattern, nnz=nnz)
    rows += ffn.measure(d=128, h=256, m=32, pattern="skewed", nnz=5, activation="drelu")
    rows += ffn.measure(d=128, h=256, m=32, pattern="skewed", nnz=5, heavy_every=8, gated=False)
    for row in rows:
        if row["implementation"] == "tokamax" and "failed" in row:
            continue  # an optional baseline
        assert row["ms"] > 0 and row["error"] < 1e-2
        assert row["speedup"] == row["baseline_ms"] / row["ms"]
    path = tmp_path / "ffn.json"
    record.write("ffn", rows, path)
    stored = json.loads(path.read_text())
    assert stored["rows"] == rows and stored["versions"]["jax"] == jax.__version__
    assert stored["kernels"] == kernels.of_today()
    shared, _, *lines = TABLES["ffn"].render(rows).splitlines()
    assert shared == "All lines: D x H 128 x 256, M 32, copies 1."
    assert len(lines) == 2 + 4 and lines[-1].startswith("| skewed | no | - |")
    monkeypatch.setattr("sys.argv", ["render", str(path), "--out", str(tmp_path / "pages")])
    render.main()
    assert lines[-1] in (tmp_path / "pages" / "ffn.md").read_text()
    assert (tmp_path / "pages" / "ffn.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_measurement_that_fails_is_a_row_of_its_own(monkeypatch):

    def broken(*_):
        raise RuntimeError("no such kernel\nand more")

    kernels = changed(REFERENCE, few_tokens_ffn=broken)
    monkeypatch.setattr(dispatch, "BACK_ENDS", (kernels,))
    ffn.stack.clear_cache()
    rows = {
        row["implementation"]: row
        for row in ffn.measure(d=128, h=256, m=32, pattern="uniform", nnz=5)
    }
    assert rows["mosaic"]["failed"] == "RuntimeError: no such kernel"
    assert "speedup" in rows["xla"]


def test_a_new_measurement_overwrites_none_of_the_same_day(tmp_path):
    paths = []
    for _ in range(3):
        paths.append(record.new_path("ffn", tmp_path))
        record.write("ffn", [], paths[-1])
    assert len(set(paths)) == 3 and paths[0] == record.path_of_today("ffn", tmp_path)
