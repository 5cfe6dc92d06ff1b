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

# What a shipped configuration leaves to the model that `init_from` names.
DECIDED = {
    "sparsify": [
        "model.vocab_size=257", "model.d_model=2048", "model.layers=2", "model.heads=32",
        "model.d_ff=5632",
    ]
}  # fmt: skip
