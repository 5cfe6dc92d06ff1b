"""Training configuration: typed sections, one YAML file, dotted overrides.

`load("configs/tiny.yaml", ["steps=10", "model.d_model=64"])` returns a frozen `Config`. Whatever is
unknown, mistyped or impossible raises a `ConfigError` whose single line names the key and what is
allowed.
"""

from twell_jax.config.loading import describe, from_dict, load, read, to_yaml
from twell_jax.config.sections import (
    Config,
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
)

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "describe",
    "from_dict",
    "load",
    "read",
    "to_yaml",
]
