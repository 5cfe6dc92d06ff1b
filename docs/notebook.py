"""Makes docs/tutorial.ipynb of docs/tutorial.md: python docs/notebook.py

Text becomes cells of Markdown, indented commands become cells that run them in a shell.
"""

import json
import re
from pathlib import Path

PAGE = Path(__file__).with_name("tutorial.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")

_COMMANDS = re.compile(r"((?:^    .*\n)+)", re.MULTILINE)
# A notebook runs in docs, its commands in the root of the repository.
_TO_ROOT = "%cd .."


def of(page: str) -> str:
    """The notebook of a page, as JSON."""
    cells = [_cell("code", _TO_ROOT)]
    for i, part in enumerate(_COMMANDS.split(page)):
        if i % 2:
            cells.append(_cell("code", re.sub(r"^    (?! )", "!", part, flags=re.MULTILINE)))
        elif part.strip():
            cells.append(_cell("markdown", part))
    named = [cell | {"id": str(i)} for i, cell in enumerate(cells)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}}
    return json.dumps(notebook | {"cells": named}, indent=1) + "\n"


def _cell(kind: str, text: str) -> dict[str, object]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    source = text.strip("\n").splitlines(keepends=True)
    return {"cell_type": kind, "metadata": {}, "source": source} | code


if __name__ == "__main__":
    NOTEBOOK.write_text(of(PAGE.read_text()))
