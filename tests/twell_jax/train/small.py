"""A small run whose settings, batches and compiled steps several tests share."""

import functools

import jax
import numpy as np

from tests import seeds
from twell_jax import config
from twell_jax.models import sharding
from twell_jax.train.trainer import Trainer

SEQUENCES, CONTEXT, VOCAB, D_FF = 16, 12, 61, 48
END = 60
L1 = 1e-2


def settings(*, model=None, **changes):
    """Its model has the settings that are given and the others of the small one."""
    tree = {
        "run_dir": "unused",
        "steps": 50,
        "batch_tokens": SEQUENCES * CONTEXT,
        "micro_batch": 4,
        "dead_window_tokens": 2 * SEQUENCES * CONTEXT,
        "optimizer": {"lr": 1e-2},
        "model": {
            "vocab_size": VOCAB, "context": CONTEXT, "d_model": 32, "layers": 2, "heads": 4,
            "d_ff": D_FF, "dtype": "float32", "init_scale": 0.1, **(model or {}),
        },
    }  # fmt: skip
    return config.from_dict(tree | changes)


@functools.cache  # compiled once for all tests that use it
def trainer_on(devices, fsdp=1, **changes):
    """Its micro-batches are a few to a step, on one device 4, on eight 2."""
    run = settings(mesh={"fsdp": fsdp}, micro_batch=4 if devices == 1 else 1, **changes)
    mesh = sharding.make_mesh(run.mesh.shape(devices), jax.devices("cpu")[:devices])
    return Trainer(run, END, mesh)


def on_one_device(run):
    return Trainer(run, END, sharding.make_mesh((1, 1), jax.devices("cpu")[:1]))


def draw(sequences=SEQUENCES):
    return seeds.rng().integers(0, VOCAB, (sequences, CONTEXT + 1)).astype(np.int32)


def named(tree):
    """The leaves of a tree as numpy arrays, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
