"""Inference: a model with its tokenizer, generation with sampling, and quality benchmarks.

`load` reads a run or a model in Hugging Face's format, from a directory or the hub, and `generate`
continues token sequences. `inference.harness`, which needs the extra "eval", scores a model on
benchmarks.
"""

from twell_jax.inference.generation import ENDED, generate, prepare, stream_text
from twell_jax.inference.language_model import LanguageModel, load
from twell_jax.inference.sampling import GREEDY, Sampling, sample
from twell_jax.inference.slots import SlotDecoder, Slots, free

__all__ = [
    "ENDED",
    "GREEDY",
    "LanguageModel",
    "Sampling",
    "SlotDecoder",
    "Slots",
    "free",
    "generate",
    "load",
    "prepare",
    "sample",
    "stream_text",
]
