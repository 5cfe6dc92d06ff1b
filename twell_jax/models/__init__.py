"""The language model around the sparse feed-forward block.

`Transformer(config, rngs=...)` makes one with random weights; `pretrained` reads and writes those
of Hugging Face; `sharding` lays parameters and batches on a mesh of devices.
"""

from twell_jax.models.cache import KVCache
from twell_jax.models.transformer import Transformer, graphdef

__all__ = ["KVCache", "Transformer", "graphdef"]
