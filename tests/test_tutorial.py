"""The commands of the tutorial do what it says, and its notebook has the same."""

import re
import runpy
import shlex
import subprocess
import sys

import pytest

from tests.commands import ROOT, succeeded
from tests.small_run import SETTINGS
from twell_jax import config

PAGE = (ROOT / "docs/tutorial.md").read_text()
ON_A_CPU = PAGE.partition("## The same on a GPU")[0]


def commands(text):
    """Those that stand indented, as words; those that need a shell, as they stand."""
    lines = re.findall(r"^    (\S.*)$", text.replace(" \\\n", " "), re.MULTILINE)
    return [shlex.split(line) if line.startswith("python ") else line for line in lines]


def of_training(text):
    found = [words for words in commands(text) if words[:3] == ["python", "-m", "twell_jax.train"]]
    return [arguments for _, _, _, *arguments in found]


def test_the_notebook_is_made_of_the_page():
    made = runpy.run_path(str(ROOT / "docs/notebook.py"))["of"](PAGE)
    assert (ROOT / "docs/tutorial.ipynb").read_text() == made, "run: python docs/notebook.py"


def test_there_is_a_run_its_twin_its_continuation_and_one_on_a_gpu():
    assert [arguments[0] for arguments in of_training(PAGE)] == [
        "tiny",
        "tiny",
        "runs/mine",
        "0p5b",
    ]


@pytest.mark.parametrize("arguments", of_training(PAGE), ids=lambda arguments: arguments[0])
def test_a_command_of_training_has_a_configuration(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").write_text(config.to_yaml(config.load("tiny")))
    succeeded("-m", "twell_jax.train", *arguments, "--print-config")


@pytest.mark.slow
def test_all_commands_run_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    python = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}; '
    for command in commands(ON_A_CPU):
        if isinstance(command, str):
            subprocess.run(["bash", "-c", python + command], check=True)
            continue
        _, *arguments = command
        if "tiny" in arguments:
            arguments += SETTINGS
        if "twell_jax.generate" in arguments:
            arguments += ["--max-tokens", "3"]
        succeeded(*[re.sub("^steps=.00$", "steps=5", word) for word in arguments])
    for made in ("report.md", "training.png", "layers.png", "analysis.json"):
        assert (tmp_path / "runs/mine" / made).stat().st_size
    assert (tmp_path / "runs.png").exists() and (tmp_path / "exported/config.json").exists()
    assert "5 steps" in (tmp_path / "runs/mine/report.md").read_text()
