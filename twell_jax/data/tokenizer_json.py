"""Makes a tokenizer of a tokenizer.json, which anyone may have written.

The library `tokenizers` panics at some of them, which is no `Exception`, and their rules may make
any amount of text of one character.
"""

import base64
import contextlib
import json
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers as hf

from twell_jax import untrusted
from twell_jax.config import ConfigError

MOST_BYTES = 2**28  # the largest have about 2**25
_MOST_GROWTH = 100
_TRIED = "a 1é中\n"

# Without any of these, each match of a regular expression has a character at least.
_MAY_TAKE_NOTHING = re.compile(r"[*?^$]|\{[0,]|\\[bBAzZGKyYO]|^\||\|$|\|\||\(\||\|\)|\(\)|^$")
# The rules that are made of others, and where these are.
_PARTS = ("normalizers", "pretokenizers", "decoders")
# The most characters that other rules make of one. Forms of Unicode do so only once, of what
# others wrote only if it is `_expanded`.
_FACTORS = {
    "BertNormalizer": 3, "ByteLevel": 4, "Metaspace": 2, "BPEDecoder": 2, "CTC": 2, "WordPiece": 2,
}  # fmt: skip


def read(path: Path) -> hf.Tokenizer:
    """Parses a file.

    Raises:
      OSError, ValueError: it cannot be read or is no text; ConfigError: see `parse`.
    """
    return parse(untrusted.read(path, MOST_BYTES).decode())


def parse(text: str) -> hf.Tokenizer:
    """The tokenizer that a tokenizer.json describes, without its limits of length.

    Raises:
      ConfigError: the library cannot read it or use it, or it makes too much of a text.
    """
    with _no_panic_shown(), errors_are_lines():
        return _checked(hf.Tokenizer.from_str(text))


def fetch(name: str) -> hf.Tokenizer:
    """Parses the tokenizer.json of a model on the Hugging Face hub; see `parse`."""
    with errors_are_lines():
        backend = hf.Tokenizer.from_pretrained(name)
        with _no_panic_shown():
            return _checked(backend)


@contextlib.contextmanager
def errors_are_lines() -> Iterator[None]:
    """Raises what the library raises, its panics too, as ConfigError."""
    try:
        yield
    except BaseException as error:
        # A panic has no other name; Ctrl-C and the like are no errors of the library.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise ConfigError(f"tokenizer: {error}") from None


def _checked(backend: hf.Tokenizer) -> hf.Tokenizer:
    """The same tokenizer, which has been tried on a short text."""
    backend.no_truncation()
    backend.no_padding()
    for rules in ([backend.normalizer, backend.pre_tokenizer], [backend.decoder]):
        if (growth := _growth(rules)) > _MOST_GROWTH:
            raise ValueError(
                f"its rules may make {growth:.3g} characters of one, which takes too much memory; "
                f"{_MOST_GROWTH} are allowed"
            )
    for special_tokens in (False, True):
        with contextlib.suppress(Exception):  # not each has tokens for this text
            backend.decode(backend.encode(_TRIED, add_special_tokens=special_tokens).ids)
    return backend


@contextlib.contextmanager
def _no_panic_shown() -> Iterator[None]:
    """Keeps off the terminal what Rust writes there at a panic, as an error will say it."""
    try:
        terminal = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def _growth(rules: list[Any]) -> float:
    """The most characters that rules, one after the other, make of one character; at least 1.

    Each character has a share of the characters that were there at first: 1 of itself, and of what
    a rule writes an equal part of what the rule took.
    """
    other, written = 1.0, dict[str, float]()  # the least share of any character, and of these
    for rule in [
        step for part in rules if part for step in _steps(json.loads(part.__getstate__()))
    ]:
        kind, least = rule["type"], min([other, *written.values()])
        content = _expanded(rule.get("content", "")) if kind == "Replace" else ""
        if kind != "Replace":
            other, written = least / _factor(rule), {}
        elif content and (literal := rule["pattern"].get("String")):
            share = sum(written.get(c, other) for c in literal) / len(content)
            written |= {c: min(share, written.get(c, other)) for c in content}
        elif content and not _MAY_TAKE_NOTHING.search(rule["pattern"].get("Regex", "")):
            share = least / len(content)
            written |= {c: min(share, written.get(c, other)) for c in content}
        elif content:
            other, written = least / (1 + len(content)), {}
    return 1 / min([other, *written.values()])


def _steps(rule: dict[str, Any]) -> Iterator[dict[str, Any]]:
    parts = [part for key in _PARTS for part in rule.get(key, ())]
    if not parts:
        yield rule
    for part in parts:
        yield from _steps(part)


def _factor(rule: dict[str, Any]) -> int:
    """The most characters that a rule other than Replace makes of one."""
    if rule["type"] == "Prepend":
        return 1 + len(_expanded(rule["prepend"]))
    if rule["type"] != "Precompiled":
        return _FACTORS.get(rule["type"], 1)
    charsmap = base64.b64decode(rule["precompiled_charsmap"])
    replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]  # after a trie
    return max(1, *(len(part.decode(errors="replace")) for part in replacements.split(b"\0")))


def _expanded(text: str) -> str:
    """A text as the longest form of Unicode makes it, in case a later rule asks for that."""
    return max(text, unicodedata.normalize("NFKD", text).lower(), key=len)
