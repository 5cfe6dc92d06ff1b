"""A small model, and changes to the directory where it was saved."""

import json

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.twell_jax import drawn

SMALL = {
    "vocab_size": 257, "context": 64, "d_model": 16, "layers": 2, "heads": 4, "d_ff": 24,
    "dtype": "float32", "rope_theta": 3e4, "norm_eps": 1e-4, "init_scale": 0.3,
}  # fmt: skip


def make(**changes):
    return drawn.transformer(**(SMALL | changes))


def assert_same_parameters(a, b):
    jax.tree.map(np.testing.assert_array_equal, nnx.state(a), nnx.state(b))


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def change_config(directory, **changes):
    tree = config_of(directory) | changes
    tree = {key: value for key, value in tree.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(tree))


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
