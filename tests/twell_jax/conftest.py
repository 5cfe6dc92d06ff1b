import warnings

import jax
import pytest
import yaml
from jax.experimental.compilation_cache import compilation_cache as of_jax

from tests.twell_jax.configs import VALID
from twell_jax.inference import traces

_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_compilation_cache_max_size",
)


@pytest.fixture
def path(tmp_path):
    """A file with a valid configuration."""
    file = tmp_path / "valid.yaml"
    file.write_text(yaml.safe_dump(VALID))
    return file


@pytest.fixture
def kept_programs(tmp_path, monkeypatch):
    """The directory of programs that commands keep, as if nobody had set anything yet."""
    before = {name: getattr(jax.config, name) for name in _SETTINGS}
    for name, value in dict(zip(_SETTINGS, (None, True, 1.0, -1), strict=True)).items():
        monkeypatch.delenv(name.upper(), raising=False)
        jax.config.update(name, value)
    monkeypatch.setenv("TWELL_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(traces, "_directory", None)
    of_jax.reset_cache()
    yield tmp_path / "cache/compiled"
    for name, value in before.items():
        jax.config.update(name, value)
    of_jax.reset_cache()
