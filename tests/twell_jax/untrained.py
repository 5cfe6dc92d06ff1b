"""A run in its directory, with a checkpoint that no step of training made."""

import jax
import jax.numpy as jnp

from tests import seeds
from twell_jax import config as config_lib
from twell_jax.data import tokenizers
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models import sharding
from twell_jax.train.checkpoint import Checkpoints
from twell_jax.train.run_directory import open_run
from twell_jax.train.state import init_state


def begin(directory, model, **settings):
    """The configuration and the paths of a run without a checkpoint."""
    tree = {"steps": 1, "batch_tokens": 32, "micro_batch": 1, "model": model, **settings}
    config = config_lib.from_dict(tree | {"run_dir": str(directory)})
    paths = open_run(config)
    tokenizers.save(ByteTokenizer(), paths.tokenizer)
    return config, paths


def save(config, paths):
    """Saves a drawn state as the run's checkpoint; returns it."""
    rng, shapes = seeds.rng(), jax.eval_shape(lambda: init_state(config))
    with jax.set_mesh(sharding.make_mesh((1, 1), jax.devices()[:1])):
        state = jax.tree.map(
            lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), leaf.dtype), shapes
        )
    with Checkpoints(paths.checkpoints, keep=1) as checkpoints:
        checkpoints.save(0, state, {})
    return state
