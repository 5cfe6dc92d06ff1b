"""Examples in docstrings do what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import twell_jax

ROOT = Path(__file__).parents[1]
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("twell_jax", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings(name):
    public = {name: getattr(twell_jax, name) for name in twell_jax.__all__}
    result = doctest.testmod(importlib.import_module(name), extraglobs=public)
    assert result.attempted and not result.failed


def test_the_public_function_has_an_example():
    assert twell_jax.sparse_ffn.__module__ in WITH_EXAMPLES
