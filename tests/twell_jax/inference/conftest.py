"""What is compiled while text is written."""

import re

import jax
import pytest


@pytest.fixture
def compiled(caplog):
    """A function that returns the names of the programs of `generate` that were compiled."""
    before = jax.config.jax_log_compiles
    jax.config.update("jax_log_compiles", True)
    line = r"Finished XLA compilation of jit\((prefill|extend)\)"
    yield lambda: sorted(re.findall(line, caplog.text))
    jax.config.update("jax_log_compiles", before)
