"""Training configuration: typed sections, one YAML file, dotted overrides.

`load("configs/tiny.yaml", ["steps=10", "model.d_model=64"])` returns a frozen `Config`. An unknown
key, a wrong type or an impossible value raises a `ConfigError` with one line that names the key and
what is allowed.
"""

from twell_jax.config.data import DataConfig
from twell_jax.config.loading import describe, from_dict, load, parse, read, shipped, to_yaml
from twell_jax.config.model import ModelConfig, RopeScaling
from twell_jax.config.section import ConfigError
from twell_jax.config.sections import Config, MeshConfig, OptimizerConfig

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RopeScaling",
    "describe",
    "from_dict",
    "load",
    "parse",
    "read",
    "shipped",
    "to_yaml",
]
