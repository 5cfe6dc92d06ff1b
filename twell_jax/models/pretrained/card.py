"""The model card of an exported model: its README.md, which the Hugging Face hub shows."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from twell_jax import untrusted
from twell_jax.config import ModelConfig
from twell_jax.models.pretrained import config, hub, quantisation
from twell_jax.models.pretrained.architectures import ARCHITECTURES, WRITTEN
from twell_jax.models.pretrained.companions import CARD
from twell_jax.models.pretrained.json_file import read_json

_MOST_BYTES = 2**20
_FRONT = re.compile(r"---\r?\n(.{,100000}?)\n---\s", re.DOTALL)  # YAML is read slowly
_LICENSE = ("license", "license_name", "license_link")
_MOST_CHARACTERS = 200  # of a value that is taken from another card


def origin(source: hub.Source) -> dict[str, str]:
    """What a card says of the model that another one was made of, as far as it is known.

    Returns:
      `base_model`, a name on the hub: its own, or that which its card names; and the keys of its
      card that say its licence.
    """
    given = _front(source.directory / CARD)
    texts = {key: text for key, text in given.items() if isinstance(text, str)}
    known = {key: texts[key] for key in _LICENSE if 0 < len(texts.get(key, "")) < _MOST_CHARACTERS}
    named = given.get("base_model")
    if isinstance(named, list) and len(named) == 1:  # as the hub's own forms write one
        (named,) = named
    base = source.repository or (named if isinstance(named, str) else "")
    if hub.is_name(base):
        known["base_model"] = base
    link = known.pop("license_link", "")
    if link and not link.startswith("https://") and "base_model" in known:
        link = f"https://huggingface.co/{base}/blob/main/{link}"
    return known | ({"license_link": link} if link.startswith("https://") else {})


def _front(path: Path) -> dict[str, Any]:
    """The YAML that a card begins with; none if there is no such card, or it cannot be read."""
    try:
        text = untrusted.read(path, _MOST_BYTES).decode()
        found = _FRONT.match(text)
        tree = yaml.safe_load(found[1]) if found else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def front(keys: Mapping[str, Any]) -> str:
    """The YAML that a card begins with."""
    return f"---\n{yaml.safe_dump(dict(keys), sort_keys=False, allow_unicode=True)}---\n"


def write(
    directory: Path, name: str | None, known: Mapping[str, str], report: str | None = None
) -> None:
    """Writes README.md beside a model that was written, in whatever form.

    Args:
      directory: of the model.
      name: its name on the hub; None if it has none.
      known: what `origin` says of the model that it was made of.
      report: Markdown that begins with a heading, such as the report of a run; None writes the
        shapes of the model in its place.
    """
    tree = read_json(directory / "config.json")
    model, _ = config.read(directory, "float32", "float32")
    kind = str(tree["model_type"])
    has_class = kind in WRITTEN and not ARCHITECTURES[kind].own_code
    in_8_bits = tree.get(quantisation.KEY) is not None
    tags = ["twell-jax", *["activation-sparsity"] * (model.activation != "silu")]
    tags += ["fp8", "compressed-tensors"] * in_8_bits
    keys = {
        "library_name": "transformers" if has_class else "twell-jax",
        "pipeline_tag": "text-generation",
        **known,
        "tags": tags,
    }
    title = directory.absolute().name if name is None else name.partition("/")[2]
    text = report or f"# {untrusted.plain(title)}\n\n{_shapes(model, known)}\n"
    heading, _, rest = text.lstrip().partition("\n")
    parts = [heading, _loading(name, title, kind, has_class, in_8_bits), rest.strip()]
    # Bytes of a directory's name that are no UTF-8 become escapes, as the code may have them.
    card = f"{front(keys)}\n{'\n\n'.join(parts)}\n".encode(errors="backslashreplace")
    (directory / CARD).write_bytes(card)


def _shapes(model: ModelConfig, known: Mapping[str, str]) -> str:
    """What the files say of a model of which no report tells."""
    base = known.get("base_model")
    return (
        f"{model.layers} layers, d_model {model.d_model}, d_ff {model.d_ff}, {model.activation}"
        f"{'' if model.gated else ' without a gate'}; vocabulary of {model.vocab_size:,}, context "
        f"of {model.context:,} tokens."
        f"{f' It began as [{base}](https://huggingface.co/{base}).' if base else ''}"
    )


def _loading(name: str | None, title: str, kind: str, has_class: bool, in_8_bits: bool) -> str:
    """How a model of this `model_type` is loaded, by all that can."""
    called = json.dumps(title if name is None else name, ensure_ascii=False)
    where = "" if name else "  # this directory, or its name on the hub"
    theirs = f"""\
```python
import transformers

name = {called}{where}
model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype="auto")
tokenizer = transformers.AutoTokenizer.from_pretrained(name)
```"""
    if in_8_bits:
        theirs = f"Its 8-bit weights need `pip install compressed-tensors`:\n\n{theirs}"
    if not has_class:
        theirs = f"`transformers` has no class of the type `{kind}`; twell-jax reads it."
    ours = f"""\
```python
from twell_jax.models.pretrained import from_pretrained

model = from_pretrained({called})
```"""
    return f"## Loading\n\n{theirs}\n\nWith twell-jax:\n\n{ours}"
