import random

import pytest

from twell_jax import config

WORDS = ["alpha", "beta", "gamma", "delta", "def", "return", "import", "class", "\n    self."]


@pytest.fixture
def make_config(tmp_path):
    """A small configuration: context 16, 8 sequences a step, byte tokenizer, own cache."""

    def make(data=(), model=(), **top):
        return config.from_dict(
            {
                "run_dir": str(tmp_path / "run"),
                "steps": 10,
                "batch_tokens": 8 * 16,
                "micro_batch": 1,
                "eval_sequences": 4,
                **top,
                "model": {
                    "vocab_size": 300,
                    "context": 16,
                    "d_model": 8,
                    "layers": 1,
                    "heads": 1,
                    "d_ff": 8,
                    **dict(model),
                },
                "data": {
                    "held_out_fraction": 0.3,
                    "cache_dir": str(tmp_path / "cache"),
                    **dict(data),
                },
            }
        )

    return make


@pytest.fixture
def documents():
    """40 distinct documents of 5 to 60 words."""
    rng = random.Random(0)
    return [
        f"document {i}: " + " ".join(rng.choices(WORDS, k=rng.randrange(5, 60))) for i in range(40)
    ]


@pytest.fixture
def text_dir(tmp_path, documents):
    """A directory that holds each of the documents as a text file."""
    directory = tmp_path / "text"
    directory.mkdir()
    for i, text in enumerate(documents):
        (directory / f"{i:02d}.txt").write_text(text)
    return directory
