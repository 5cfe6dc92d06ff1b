"""Where the package keeps what it found out on this machine."""

from pathlib import Path

import pytest

from twell_jax import user_cache
from twell_jax.ffn import measured
from twell_jax.ffn.measured import Block


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch):
    for name in ("TWELL_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")


def test_the_nearest_name_decides(monkeypatch):
    assert user_cache.directory() == Path("/home/someone/.cache/twell-jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert user_cache.directory() == Path("/xdg/twell-jax")
    monkeypatch.setenv("TWELL_JAX_CACHE", "/named")
    assert user_cache.directory() == Path("/named")


def test_without_a_home_nothing_is_known_here(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(FileNotFoundError, match="TWELL_JAX_CACHE names a directory"):
        user_cache.directory()
    assert measured.of("NVIDIA H100", Block(2048, 5632, True, "bfloat16")) is None
