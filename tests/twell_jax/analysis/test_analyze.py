"""python -m twell_jax.analyze as a person runs it."""

import contextlib
import io
import json
import random

import jax
import pytest

from tests import hub as local_hub
from tests.twell_jax import drawn
from twell_jax import analyze, data, sparse_ffn
from twell_jax import config as config_lib
from twell_jax.analysis import speedup
from twell_jax.data import tokenizers
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models import sharding
from twell_jax.models.pretrained import save_pretrained
from twell_jax.train.checkpoint import Checkpoints
from twell_jax.train.run_directory import open_run
from twell_jax.train.trainer import Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of no steps on a small corpus, and the held-out cross-entropy that training finds."""
    directory = tmp_path_factory.mktemp("analyze")
    for i in range(200):  # documents that are shorter than a sequence
        words = random.choices(["alpha", "beta", "gamma", "delta"], k=4)
        (directory / f"{i}.txt").write_text(" ".join(words))
    config = config_lib.from_dict(
        {
            "run_dir": str(directory / "run"),
            "steps": 1,
            "batch_tokens": 160,
            "micro_batch": 5,
            "eval_sequences": 8,
            "model": {
                "vocab_size": 257, "context": 32, "d_model": 32, "layers": 2, "heads": 2,
                "d_ff": 64, "dtype": "float32",
            },
            "data": {
                "source": "files",
                "paths": [str(directory / "*.txt")],
                "held_out_fraction": 0.3,
                "mask_documents": True,
                "cache_dir": str(directory / "tokens"),
            },
        }
    )  # fmt: skip
    paths, corpus = open_run(config), data.load(config)
    tokenizers.save(corpus.tokenizer, paths.tokenizer)
    mesh = sharding.make_mesh((1, 1), jax.devices()[:1])
    with jax.set_mesh(mesh), Checkpoints(paths.checkpoints, keep=1) as checkpoints:
        trainer = Trainer(config, corpus.tokenizer.eot_id, mesh)
        state = trainer.init()
        checkpoints.save(0, state, {"corpus": corpus.fingerprint})
        held_out_ce = trainer.evaluate(state.params, corpus.held_out)
    return paths, held_out_ce


def run_main(*arguments):
    analyze.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def analysed(run):
    """What the command prints of the run, and its summary."""
    paths, _ = run
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_main(paths.directory)
    return printed.getvalue(), json.loads(paths.analysis.read_text())


def test_tables_figures_and_plots_of_a_run(run, analysed):
    (paths, held_out_ce), (printed, summary) = run, analysed
    assert summary["held_out_ce"] == pytest.approx(held_out_ce, rel=1e-5)
    assert (summary["sequences"], summary["tokens"], summary["d_ff"]) == (8, 256, 64)
    assert [len(row) for row in summary["nnz_by_position"]] == [32, 32]
    assert f"held-out CE {held_out_ce:.3f}" in printed
    for layer in range(2):  # half of an untrained layer's neurons are active
        assert 0.4 < summary["sparsity"][layer] < 0.6
        row = next(line for line in printed.splitlines() if line.startswith(f"│     {layer} │"))
        assert f"{summary['nnz_mean'][layer]:.1f}" in row
        assert f"{summary['sparsity'][layer]:.1%}" in row
    for name in ("nnz_by_layer", "nnz_by_position", "union", "usage"):
        path = paths.directory / f"{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG") and str(path) in printed


def test_what_cannot_be_estimated_is_said_and_kept(analysed):
    printed, summary = analysed
    assert "no estimate of scoring, training step, decoding one sequence: " in printed
    assert "sequences have 32 tokens, U is of 256 in a row" in printed
    assert summary["estimate"]["model"] == {} and summary["estimate"]["sentence"] in printed


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory in Hugging Face's format, with a model of which no neuron after 8 is active."""
    directory = tmp_path_factory.mktemp("models") / "model"
    written = drawn.small(vocab_size=257, context=300, d_ff=128)
    gate = written.blocks.mlp.w_gate
    gate.set_value(gate[...].at[:, 8:].set(0))
    save_pretrained(directory, written, ByteTokenizer())
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("A text, which models read. " * 30, "utf-8")
    return path


def test_a_model_of_others_is_read_with_a_text(model, text, capsys):
    run_main(model, "--text", text)
    printed = capsys.readouterr().out
    assert "2 sequences, 600 tokens: cross-entropy " in printed
    assert "kernels need a d_model that is a multiple of 64, got 32" in printed
    *_, table = printed.partition("estimated speed-up")
    rows = [line.split("│")[2:8] for line in table.splitlines() if line.startswith("│ ")]
    assert len(rows) == 2
    for u, nnz, dead, *gains in rows:
        assert 0 < float(u.strip(" %")) <= 6.3 and 0 < float(nnz) <= 8
        assert 93.7 <= float(dead.strip(" %")) < 100
        assert [gain.strip() for gain in gains] == ["-", "-", "-"]
    assert [path.name for path in model.parent.iterdir()] == ["model"]


@pytest.fixture
def read(monkeypatch):
    """What the command reads: it ends before it measures, which takes a program for each shape."""

    def shape_of(*arguments):
        with pytest.raises(SystemExit) as ended:
            run_main(*arguments)
        return ended.value.code

    def measure(_, tokens, **__):
        raise SystemExit(tokens.shape)

    monkeypatch.setattr(analyze, "measure_activity", measure)
    return shape_of


def test_a_name_on_the_hub_and_a_run_are_read_with_a_text(run, model, text, tmp_path, read):
    with local_hub.serve() as (hub, address):
        hub.publish("org/name", model)
        with local_hub.environment(HF_ENDPOINT=address, HF_HOME=tmp_path):
            assert read("org/name", "--text", text, "--sequences", "1") == (1, 301)
    paths, _ = run
    assert read(paths.directory, "--text", text) == (16, 33)


def test_a_model_of_others_needs_a_text_that_is_long_enough(model, tmp_path):
    with pytest.raises(SystemExit, match=r"not the directory of a run; .* --text FILE"):
        run_main(model)
    (tmp_path / "short.txt").write_text("a", "utf-8")
    with pytest.raises(SystemExit, match=r"short\.txt: has 1 tokens, too few to read"):
        run_main(model, "--text", tmp_path / "short.txt")
    with pytest.raises(SystemExit, match=r"none\.txt"):
        run_main(model, "--text", tmp_path / "none.txt")
    for content, says in ((b"", "is empty"), (b"a\xff", r"is not UTF-8 text \(at byte 1\)")):
        (tmp_path / "bad.txt").write_bytes(content)
        with pytest.raises(SystemExit, match=rf"--text: .*bad\.txt {says}"):
            run_main(model, "--text", tmp_path / "bad.txt")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it is measured there")
def test_without_a_gpu_it_says_that_no_speed_up_is_measured(analysed):
    printed, summary = analysed
    assert (
        "speed-up not measured: it needs an Ampere, Ada, Hopper or RTX Blackwell GPU, got "
        in printed
    )
    assert summary["speedup"] is None


def test_speed_up_per_layer_is_that_of_the_inputs_which_the_layer_sees(run, monkeypatch, capsys):
    """With a dense block that errs in place of the kernels, and a clock that is set."""
    times = iter([3.0, 3.0, 2.0, 2.0])  # two layers by XLA, then by the kernels

    def dense(*operands, implementation, **options):
        y, stats = sparse_ffn(*operands, **options, implementation="xla")
        return (y * 1.01 if implementation == "mosaic" else y), stats

    monkeypatch.setattr(speedup, "sparse_ffn", dense)
    monkeypatch.setattr(speedup.timing, "milliseconds", lambda f, *a, calls: next(times))
    paths, _ = run
    run_main(paths.directory)
    summary = json.loads(paths.analysis.read_text())
    assert summary["speedup"]["nnz"] == pytest.approx(summary["nnz_mean"])
    assert summary["speedup"]["factor"] == [1.5, 1.5]
    assert summary["speedup"]["xla_error"] == pytest.approx([0, 0], abs=1e-5)
    assert summary["speedup"]["mosaic_error"] == pytest.approx([0.01, 0.01], rel=1e-3)
    printed = capsys.readouterr().out
    assert "1.50" in printed and "1.0e-02" in printed
    assert (paths.directory / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_the_number_of_sequences_can_be_chosen(run, capsys):
    paths, _ = run
    run_main(paths.directory, "--sequences", 3)
    assert json.loads(paths.analysis.read_text())["sequences"] == 3
    with pytest.raises(SystemExit):
        run_main(paths.directory, "--sequences", 0)
    assert "--sequences: must be at least 1, got 0" in capsys.readouterr().err


def test_what_cannot_be_analysed_is_one_clear_line(run, tmp_path):
    with pytest.raises(SystemExit, match=r"error: run_dir: .* is not the directory of a run"):
        run_main(tmp_path)
    paths, _ = run
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"another corpus {i} " * 20)
    config = paths.config.read_text()
    paths.config.write_text(config.replace(str(paths.directory.parent / "*.txt"), f"{tmp_path}/*"))
    try:
        with pytest.raises(SystemExit, match="error: data: the text is not that of the run"):
            run_main(paths.directory)
    finally:
        paths.config.write_text(config)
