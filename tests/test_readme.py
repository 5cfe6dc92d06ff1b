"""What the README shows runs, and what it points to exists; so do the commands of all pages."""

import contextlib
import functools
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests.commands import ROOT, succeeded
from twell_jax import config

README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_is_code():
    assert CODE


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("code", CODE)
def test_the_code_runs(code, capsys):
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["y"].shape == names["x"].shape
    assert names["stats"].l1 > 0
    assert ", by mosaic (benchmarks/results/" in capsys.readouterr().out  # kernels serve the block


def test_the_first_paragraph_says_what_it_needs():
    line = README.split("\n\n")[1]
    needed = PROJECT["requires-python"].removeprefix(">=")
    (jax,) = re.findall(r"jax>=([\d.]+),", " ".join(PROJECT["dependencies"]))
    for words in (needed, jax, "Hopper", "bf16 or fp16", "multiple of 64", "multiple of 128"):
        assert words in " ".join(line.split()), words


def test_cells_of_the_first_table_are_short():
    _, *table = README.partition("## Does it help me?")
    rows = re.findall(r"^\|(?!---)(.*)\|$", "".join(table).partition("\n\n[")[0], re.MULTILINE)
    cells = [cell for row in rows for cell in row.split(" | ")]
    shown = [re.sub(r"<!--.*?-->|\]\(.*?\)", "", cell) for cell in cells]
    assert len(shown) > 15
    assert [cell for cell in shown if len(cell.split()) > 12] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())
    targets = [target for target in targets if not target.startswith("http")]
    assert [target for target in targets if not (ROOT / target).exists()] == []


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_of(page: Path) -> list[str]:
    """Lines of indented code without comments, continued ones joined, and code inside the text."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).replace(" \\\n", " ")
    return re.findall(r"^    (\S.*?)(?:  +#.*)?$", text, re.MULTILINE) + re.findall(
        r"`([^`]+)`", text
    )


def commands() -> list[list[str]]:
    """The commands on all pages, as a shell splits them."""
    found = {}
    for line in [line for page in PAGES for line in code_of(page)]:
        for part in line.removeprefix(".venv/bin/").split(" && "):
            with contextlib.suppress(ValueError):  # not for a shell
                words = shlex.split(part.replace("[--dtype bfloat16]", "--dtype bfloat16"))
                if words and re.fullmatch(r"python3?|pip|make|twell-(?!jax).*", words[0]):
                    found[part] = words
    return list(found.values())


@functools.cache
def help_of(*program: str) -> str:
    return succeeded(*program, "--help").stdout


def test_the_pages_have_commands():
    assert {"python3", "python", "pip", "make", "twell-train"} <= {words[0] for words in commands()}


@pytest.mark.parametrize(
    "name", ["generate", "evaluate", "analyze", "export", "quantise", "sparsify"]
)
def test_help_shows_the_default_of_every_option(name):
    *_, options = help_of("-m", f"twell_jax.{name}").partition("\n\noptions:\n")
    named = dict(re.findall(r"^  (--[\w-]+)(.*(?:\n {8,}.*)*)", options, re.MULTILINE))
    # none, or required
    switches = {"--prompt", "--special-tokens", "--task-path", "--out"}
    switches |= {"--print-config", "--dry-run"}
    assert named
    for option in named.keys() - switches:
        assert "default:" in named[option], option


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_exist_with_their_options(words):
    match words:
        case ["make", *targets]:
            rules = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(targets) <= set(rules)
        case ["pip", "install", *_] | [_, "-m", "pip", "install", *_]:
            check_installation(words[words.index("install") + 1 :])
        case [script, *arguments] if script.startswith("twell-"):
            module, function = PROJECT["scripts"][script].split(":")
            assert callable(getattr(importlib.import_module(module), function))
            check_arguments(["-m", module.removesuffix(".command")], arguments)
        case [_, "-c", code]:
            compile(code, "page", "exec")
        case [_, "-m", module, *arguments]:
            assert importlib.util.find_spec(module)
            if module.split(".")[0] in ("twell_jax", "benchmarks"):
                check_arguments(["-m", module], arguments)
        case [_, script, *arguments]:
            assert (ROOT / script).exists()
            check_arguments([script], arguments)


def check_installation(arguments: list[str]) -> None:
    for requirement in arguments:
        assert not requirement.startswith("twell"), "no package index has it"
        if extras := re.fullmatch(r"\.\[(.*)\]", requirement):
            assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])


def check_arguments(program: list[str], arguments: list[str]) -> None:
    """Options are in the help, and the keys of a configuration can be set so."""
    options = [word for word in arguments if word.startswith("--")]
    if options:
        assert all(option in help_of(*program) for option in options)
    shipped = config.shipped()
    files = [word for word in arguments if word.endswith(".yaml") or word in shipped]
    overrides = [word for word in arguments if "=" in word]
    if files or overrides:
        config.load(files[0] if files else "tiny", overrides)


SETTINGS = [
    code for code in code_of(ROOT / "docs/training.md") if re.match(r"'?[a-z][\w.]*=", code)
]


def test_the_page_of_training_has_settings():
    assert len(SETTINGS) >= 20


@pytest.mark.parametrize("code", SETTINGS)
def test_settings_can_be_set_as_they_stand(code):
    config.load("tiny", shlex.split(code.replace("...", "x")))


def test_nothing_says_to_install_a_package_that_no_index_has():
    sources = [
        path for name in ("twell_jax", "benchmarks", ".ci") for path in (ROOT / name).rglob("*")
    ]
    for path in [*PAGES, ROOT / "Makefile", *sources]:
        if path.suffix in ("", ".py", ".md") and path.is_file():
            assert not re.search(r"pip install (-\S+ )*['\"]?twell", path.read_text()), path
