"""python -m twell_jax.evaluate where lm-evaluation-harness is not installed."""

import importlib
import sys

import pytest

from twell_jax import inference


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    for name in ("twell_jax.evaluate", "twell_jax.inference.harness"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(inference, "harness", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[eval\]'"):
        importlib.import_module("twell_jax.evaluate")
