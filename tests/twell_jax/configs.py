"""The shipped configurations, and a small valid one."""

from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
VALID = {
    "run_dir": "run",
    "steps": 100,
    "batch_tokens": 256,
    "micro_batch": 2,
    "model": {
        "vocab_size": 257, "context": 32, "d_model": 32, "layers": 1, "heads": 4, "d_ff": 64,
    },
}  # fmt: skip
