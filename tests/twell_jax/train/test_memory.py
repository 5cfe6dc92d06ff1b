"""What cannot fit is refused with the memory that it would need, and nothing else is."""

import re

import pytest

from tests.commands import call
from twell_jax import config
from twell_jax.config import ConfigError
from twell_jax.train import memory

# tiny.yaml with 4 layers of 3 x 128 x 1e10 weights, each with two moments, all in float32; then
# with 1e8 layers; then 1e9 sequences x 256 tokens x 4 layers x 128 features; then 2.56e14 tokens of
# 4 bytes.
TOO_LARGE = [
    ("model.d_ff=10000000000", "model: 15,360.0 billion parameters", "171,661 GiB"),
    ("model.layers=100000000", "model: 26,240.0 billion parameters", "293,255 GiB"),
    ("micro_batch=1000000000", "micro_batch: what a micro-batch's layers are given", "488,281 GiB"),
    ("batch_tokens=256000000000000", "batch_tokens: the tokens of a step", "953,674 GiB"),
]


@pytest.mark.parametrize(("override", "what", "size"), TOO_LARGE)
def test_what_cannot_fit_is_refused_before_anything_is_made(tmp_path, override, what, size):
    process = call("train.py", "tiny", f"run_dir={tmp_path / 'run'}", override)
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert re.fullmatch(rf"error: {what}.*: at least {size} on each device, of [\d,.]+", line)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["1", "model.layers=100000000"], "model: 26,240.0 billion parameters"),
        (["0"], "--dry-run: takes 1 to 1024 devices, got 0"),
        (["1000000"], "--dry-run: takes 1 to 1024 devices, got 1000000"),
        (["1000"], "micro_batch: 16 sequences on each of 1000 devices must divide"),
    ],
)
def test_a_dry_run_that_could_not_end_is_refused(arguments, says):
    process = call("train.py", "tiny", "--dry-run", *arguments)
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"error: {says}")


def test_the_bound_is_what_a_device_holds():
    # Two devices share a copy: 18 x (4 x 2048^2 + 3 x 2048 x 5632 + 2 x 2048) + 49153 x 2048
    run = config.load("configs/1b.yaml", ["mesh.fsdp=2"])
    need = 3 * 4 * 1_025_583_104 // 2
    memory.require_for_training(run, 8, need)
    with pytest.raises(ConfigError, match=r"model: 1\.0 billion parameters"):
        memory.require_for_training(run, 8, need - 1)
    memory.require_for_training(run, 8, None)


def test_the_cache_of_a_generation_is_bounded():
    # keys and values of 4 layers x 128 features in float32, for 3 x 1000 tokens
    model, need = config.load("tiny").model, 2 * 4 * 4 * 128 * 3000
    memory.require_for_generation(model, 3, 1000, need)
    with pytest.raises(ConfigError, match=r"^--max-tokens: the cache of 3 x 1000 tokens: at least"):
        memory.require_for_generation(model, 3, 1000, need - 1)


def test_a_cache_in_8_bits_has_a_scale_for_each_head():
    model = config.load("tiny", ["model.kv_cache_dtype=float8"]).model
    need = 2 * 4 * (128 + 4 * model.num_kv_heads) * 3000
    memory.require_for_generation(model, 3, 1000, need)
    with pytest.raises(ConfigError, match=r"^--max-tokens: the cache of 3 x 1000 tokens: at least"):
        memory.require_for_generation(model, 3, 1000, need - 1)


def test_devices_have_memory():
    assert memory.of_device() > 2**20
