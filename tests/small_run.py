"""A run of no use, which tests of several commands share, so that its programs compile once."""

SETTINGS = [
    "steps=3", "batch_tokens=512", "micro_batch=4", "dead_window_tokens=5120", "eval_sequences=8",
    "sample_tokens=0",
    "model.vocab_size=257", "model.context=64", "model.d_model=128", "model.layers=2",
    "model.heads=2", "model.d_ff=256", "model.dtype=bfloat16",
    "optimizer.lr=3.0e-3", "optimizer.warmup_steps=1",
]  # fmt: skip
