"""Each example runs as it stands, within a few seconds, and does what it is there to show."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.commands import succeeded
from tests.packages import needed
from tests.small_run import SETTINGS

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = ["def add(a, b):", "import "]


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(name, *arguments)` is the text that the example prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def steps(printed: str) -> list[list[float]]:
    """The numbers of each line about a step, without that of the step."""
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    return [[float(number) for number in re.findall(r"\d+\.?\d*", line)][1:] for line in lines]


def continuations(printed: str) -> list[str]:
    return [ast.literal_eval(line) for line in printed.splitlines()]


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", ["nnx_model", "linen_model", "equinox_model"])
def test_a_model_learns_to_add_with_few_neurons(run, name):
    if name == "equinox_model":
        needed("equinox")
    (_, *fired_at_first), *_, (cross_entropy, *fired) = steps(run(name))
    assert cross_entropy < 0.1
    for before, after in zip(fired_at_first, fired, strict=True):
        assert 0 < after < before / 4


@pytest.mark.usefixtures("optimised")
def test_plain_jax_learns_the_facts_with_few_neurons(run):
    (_, fired_at_first), *_, (error, fired) = steps(run("plain_jax"))
    assert error < 0.01
    assert 0 < fired < fired_at_first / 4


def test_fine_tuning_lowers_the_loss_and_closes_gates_and_its_model_writes_text(run):
    printed = run("finetune")
    (cross_entropy_at_first, fired_at_first), *_, (cross_entropy, fired) = steps(printed)
    assert cross_entropy < cross_entropy_at_first - 2
    assert 0 < fired < fired_at_first / 2

    directory = printed.split("model: ")[1].strip()
    for prompt, text in zip(PROMPTS, continuations(run("generate_text", directory)), strict=True):
        assert text.startswith(prompt)
        written = text.removeprefix(prompt)
        assert len(written) > 30
        readable = [c for c in written if c.isascii() and (c.isprintable() or c == "\n")]
        assert len(readable) > 0.9 * len(written)


def test_without_a_model_random_bytes_follow_the_prompts(run):
    for prompt, text in zip(PROMPTS, continuations(run("generate_text")), strict=True):
        assert text.startswith(prompt) and len(text) > len(prompt)


def test_pruning_keeps_every_neuron_of_a_run_in_which_all_fire(run, tmp_path):
    (tmp_path / "corpus").mkdir()
    for example in EXAMPLES.glob("*.py"):
        (tmp_path / "corpus" / example.name).write_text(example.read_text() * 4)
    settings = [
        *SETTINGS, "data.source=files", f"data.paths=[{tmp_path}/corpus/*.py]",
        "data.held_out_fraction=0.4", f"data.cache_dir={tmp_path}/cache",
        f"run_dir={tmp_path}/run",
    ]  # fmt: skip
    succeeded("train.py", "configs/tiny.yaml", *settings)
    width, _, changed = run("prune", str(tmp_path / "run")).splitlines()
    assert width == "d_ff 256 -> 256"
    assert changed == "0.00% of other tokens have an active neuron that was removed"


def test_all_prompts_of_a_queue_are_answered(run):
    answered, tokens = re.match(
        r"(\d+) prompts answered with (\d+) tokens", run("serve_queue")
    ).groups()
    assert answered == "100" and 100 <= int(tokens) <= 3000


def test_every_example_is_tested():
    source = Path(__file__).read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.stem}"' in source


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("nnx_model", ["one"], "unrecognized arguments: one"),
        ("linen_model", ["--step"], "unrecognized arguments: --step"),
        ("plain_jax", ["one"], "unrecognized arguments: one"),
        ("prune", [], "the following arguments are required: RUN_DIR"),
        ("prune", ["none"], "run_dir: none is not the directory of a run"),
        ("finetune", ["one"], "DIRECTORY and OUT are given together, or neither"),
        ("finetune", ["none", "out"], "'none': there is no such directory"),
        ("generate_text", ["none"], "'none': there is no such directory"),
        ("generate_text", ["one", "two"], "unrecognized arguments: two"),
        ("serve_queue", ["none"], "'none': there is no such directory"),
        ("equinox_model", ["one"], "unrecognized arguments: one"),
        ("torch_score", ["one"], "MODEL and TEXT are given together, or neither"),
        ("torch_finetune", ["none", "none", "out"], "No such file or directory: 'none'"),
    ],
)
def test_wrong_arguments_are_one_line_behind_the_usage(run, capsys, name, arguments, line):
    needed({"equinox_model": "equinox"}.get(name, "transformers" if "torch" in name else "jax"))
    with pytest.raises(SystemExit, match="2"):
        run(name, *arguments)
    usage, said = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: {name}") and line in said


@pytest.mark.peers
def test_a_model_of_torch_is_scored_and_its_neurons_counted(run):
    needed("transformers")
    first, *layers = run("torch_score").splitlines()
    assert 5 < float(re.findall(r"[\d.]+", first)[0]) < 6  # ln 256 is 5.5
    assert [line.split(":")[0] for line in layers] == [f"model.layers.{i}.mlp" for i in range(2)]


@pytest.mark.peers
def test_transformers_trainer_lowers_the_loss_and_closes_gates(run):
    needed("transformers")
    lines = [line for line in run("torch_finetune").splitlines() if "neurons per token" in line]
    (ce_before, nnz_before), (ce, nnz) = (
        map(float, re.findall(r"\d+\.?\d*", line)) for line in lines
    )
    assert ce < ce_before - 1
    assert 0 < nnz < nnz_before / 2
