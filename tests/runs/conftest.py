import json
import random

import pytest
import yaml

from tests.commands import succeeded
from tests.runs.started import STEPS
from tests.twell_jax import drawn
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import save_pretrained


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A directory with a small corpus, a configuration and caches that all runs share."""
    directory = tmp_path_factory.mktemp("train")
    draw = random.Random(0)
    (directory / "corpus").mkdir()
    for i in range(60):
        words = draw.choices(["alpha", "beta", "gamma", "delta", "epsilon"], k=100)
        (directory / f"corpus/{i}.txt").write_text(" ".join(words))
    settings = {
        "run_dir": str(directory / "run"),
        "steps": STEPS,
        "batch_tokens": 256,
        "micro_batch": 4,
        "l1_coefficient": 1e-2,
        "l1_warmup": [0, 20],
        "dead_window_tokens": 2560,
        "reinit_every": 5,
        "eval_every": 25,
        "eval_sequences": 5,
        "checkpoint_every": 10,
        "log_every": 3,
        "model": {
            "vocab_size": 257, "context": 32, "d_model": 32, "layers": 2, "heads": 2, "d_ff": 64,
            "dtype": "float32",
        },
        "data": {
            "source": "files",
            "paths": [str(directory / "corpus/*.txt")],
            "held_out_fraction": 0.2,
            "mask_documents": True,
            "cache_dir": str(directory / "tokens"),
        },
        "optimizer": {"lr": 3e-3, "warmup_steps": 5},
    }  # fmt: skip
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
    return directory


@pytest.fixture(scope="session")
def uninterrupted(workspace):
    return succeeded("train.py", workspace / "config.yaml")


@pytest.fixture(scope="session")
def llama(workspace):
    """Somebody's dense model, of the shape that other tests of commands train."""
    shape = yaml.safe_load((workspace / "config.yaml").read_text())["model"]
    model = drawn.transformer(**shape, activation="silu", param_dtype="bfloat16")
    save_pretrained(workspace / "llama", model, ByteTokenizer(), dtype="float32")
    config = json.loads((workspace / "llama/config.json").read_text())
    config |= {"max_position_embeddings": 4096}
    (workspace / "llama/config.json").write_text(json.dumps(config))
    return workspace / "llama"
