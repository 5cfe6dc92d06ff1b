"""The documentation site: the pages of docs/, a page of docstrings for each package, and all keys.

Sphinx runs this file. `make docs` builds the site with warnings as errors.
"""

import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from flax import nnx  # noqa: E402
from sphinx.ext.autodoc.mock import mock  # noqa: E402
from sphinx.util.inspect import stringify_signature  # noqa: E402

import pallas_kernels  # noqa: E402
import twell_jax  # noqa: E402
from twell_jax import config as config_lib  # noqa: E402

project = "twell-jax"
release = twell_jax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
suppress_warnings = ["ref.python"]  # names of attributes, such as nnz, that several classes have
exclude_patterns = ["_build", "api/keys.md"]  # which docs/training.md includes
myst_heading_anchors = 3
default_role = "code"  # docstrings write `x` for code, as Markdown does
autodoc_mock_imports = [
    "datasets", "huggingface_hub", "lm_eval", "pynvml", "tensorboardX", "torch", "wandb",
]  # fmt: skip
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_use_ivar = True
napoleon_use_rtype = False

API = HERE / "api"  # made anew by every build
SECTION = re.compile(r"(Args|Attributes|Example|Examples|Returns|Raises|Yields):$")


def setup(app: Any) -> None:
    """Connects the functions below to Sphinx."""
    app.connect("config-inited", lambda app, config: write_api())
    app.connect("config-inited", lambda app, config: (API / "keys.md").write_text(keys()))
    app.connect("autodoc-process-docstring", to_rst, priority=400)  # before napoleon, at 500
    app.connect("autodoc-process-signature", sign_as_init)
    app.connect("autodoc-skip-member", skip)


def write_api() -> None:
    """Writes a page for each package: what it exports, then the other contents of its modules."""
    API.mkdir(exist_ok=True)
    for page in API.glob("*.md"):
        page.unlink()
    with mock(autodoc_mock_imports):
        found = [*packages(twell_jax), *packages(pallas_kernels)]
        for package in found:
            name, above = package.__name__, exported_above(package.__name__)
            lines = [f"# {name}", "", "```{eval-rst}", *automodule(name, above)]
            for module in pkgutil.iter_modules(package.__path__, f"{name}."):
                if not module.ispkg and not module.name.endswith("__main__"):
                    heading = ["", module.name, "-" * len(module.name), ""]
                    lines += [*heading, *automodule(module.name, exported_above(module.name))]
            (API / f"{name}.md").write_text("\n".join([*lines, "```", ""]))


def keys() -> str:
    """What `train.py --help` prints of every key, with a table for each section."""
    sections: dict[str, list[str]] = {}
    lines = config_lib.describe().splitlines()
    for declared, meaning in zip(lines[::2], lines[1::2], strict=True):
        key, kind = declared.strip().split(": ", 1)
        cells = (f"`{key}`", f"`{kind}`", meaning.strip())
        row = " | ".join(cell.replace("|", r"\|") for cell in cells)
        sections.setdefault(key.rpartition(".")[0], []).append(f"| {row} |")
    head = ["", "| key | type = default | meaning |", "|---|---|---|"]
    return "\n".join(
        line
        for section, rows in sections.items()
        for line in (f"### Keys of {section or 'the run'}", *head, *rows, "")
    )


def exported_above(name: str) -> list[str]:
    """The names that the packages around a module export, which those packages' pages describe."""
    parts = name.split(".")
    above = [importlib.import_module(".".join(parts[:i])) for i in range(1, len(parts))]
    return [member for package in above for member in getattr(package, "__all__", [])]


def packages(root: ModuleType) -> list[ModuleType]:
    """A package and all packages below it, outer ones first."""
    found = [root]
    for module in pkgutil.iter_modules(root.__path__, f"{root.__name__}."):
        if module.ispkg:
            found += packages(importlib.import_module(module.name))
    return found


def automodule(name: str, excluded: list[str]) -> list[str]:
    """The directive that documents a module, without the members that its package exports."""
    options = ["   :members:"]
    if excluded:
        options.append(f"   :exclude-members: {', '.join(excluded)}")
    return [f".. automodule:: {name}", *options]


def to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Converts docstrings, which are written to be read in the source, to reStructuredText.

    Indented text below a blank line becomes a literal block, unless it belongs to a section such as
    "Args:". Several named values below "Returns:" become a list.
    """
    out: list[str] = []
    margin, is_literal = "", False
    for line in list_returns(lines):
        if line and not line.startswith(" "):
            margin, is_literal = line, False
        elif line and not SECTION.match(margin) and out and not out[-1] and not is_literal:
            out += ["::", ""]
            is_literal = True
        out.append(line if is_literal else escape(line))
    lines[:] = out


def list_returns(lines: list[str]) -> list[str]:
    """The lines, with each `name: description` below "Returns:" as an item if there are several."""
    if "Returns:" not in lines:
        return lines
    start = lines.index("Returns:") + 1
    after = (i for i, line in enumerate(lines[start:], start) if line and not line.startswith(" "))
    end = next(after, len(lines))
    named = re.compile(r"  (\w[\w, ]*): ")
    if sum(bool(named.match(line)) for line in lines[start:end]) < 2:
        return lines
    items = [
        named.sub(r"  - **\1**: ", line) if named.match(line) else line for line in lines[start:end]
    ]
    return [*lines[:start], "  A tuple of", "", *items, *lines[end:]]


def escape(line: str) -> str:
    """Escapes bars, which would be substitutions, and letters that directly follow code."""
    parts = re.split(r"(`[^`]*`)", line)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            is_glued = i > 0 and part[:1].isalnum()
            parts[i] = (r"\ " if is_glued else "") + part.replace("|", r"\|")
    return "".join(parts)


def sign_as_init(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str | None] | None:
    """Gives NNX modules the signature of their `__init__`, which their metaclass hides."""
    if what != "class" or not issubclass(obj, nnx.Module):
        return None
    _, *parameters = inspect.signature(obj.__init__).parameters.values()
    return stringify_signature(inspect.Signature(parameters), show_annotation=False), None


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leaves out the fields of named tuples, which "Attributes:" describes."""
    is_field = (inspect.getdoc(obj) or "").startswith("Alias for field number")
    return True if is_field else None
