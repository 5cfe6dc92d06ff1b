"""The language model around the sparse feed-forward block.

`Transformer(config, rngs=...)` makes one with random weights; `pretrained` reads and writes models
in Hugging Face's format; `explain_decoding` says how one decodes; `sharding` distributes parameters
and batches over a mesh of devices.
"""

from twell_jax.models.cache import KVCache
from twell_jax.models.decoding import (
    DECODE_OPTIONS,
    decode,
    explain_decoding,
    laid_out,
    read_prompts,
)
from twell_jax.models.quantised import QUANTISED_OPTIONS
from twell_jax.models.transformer import PREFILL_OPTIONS, Transformer, graphdef

__all__ = [
    "DECODE_OPTIONS",
    "PREFILL_OPTIONS",
    "QUANTISED_OPTIONS",
    "KVCache",
    "Transformer",
    "decode",
    "explain_decoding",
    "graphdef",
    "laid_out",
    "read_prompts",
]
