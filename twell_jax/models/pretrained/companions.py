"""The small files of a model in Hugging Face's format that a model made of it keeps."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from twell_jax import untrusted
from twell_jax.models.pretrained.json_file import PretrainedError

SETTINGS = ("config.json", "generation_config.json")
TEMPLATE = "chat_template.jinja"
OF_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE,
    "chat_template.json",
    "tokenizer.model",
)
CARD = "README.md"


def copy(source: Path, name: str, directory: Path) -> None:
    """Copies a file of `source` into a directory, under its name; raises what `require` does."""
    require(source, name)
    with untrusted.open_file(source / name) as file, (directory / name).open("wb") as new:
        shutil.copyfileobj(file, new)


def require(source: Path, name: str) -> None:
    """Looks at a file of `source` that is to be copied, best before weights are written.

    Raises:
      PretrainedError: it is a link out of `source`, such as to a file that nobody wants published;
        links of the hub's cache lead to where that keeps the contents.
      OSError: it is no regular file, or cannot be read or written.
    """
    untrusted.require_regular(source / name)
    root = source.resolve()
    places = (root, root.parent.parent / "blobs")
    if not any((source / name).resolve().is_relative_to(place) for place in places):
        raise PretrainedError(
            f"{source / name}: is a link that leads out of its directory; put the file there"
        )


def present(source: Path, names: Sequence[str]) -> list[str]:
    """Those of the named files that `source` has; raises what `require` does."""
    found = [name for name in names if (source / name).exists()]
    for name in found:
        require(source, name)
    return found


def copy_all(source: Path, names: Sequence[str], directory: Path) -> None:
    """Copies those of the named files that `source` has; raises what `require` does."""
    for name in present(source, names):
        copy(source, name, directory)
