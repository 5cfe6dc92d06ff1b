"""Sparse feed-forward blocks for language models: the operation, its module and its formats.

The rest has to be imported by name: `twell_jax.models`, `twell_jax.train`, `twell_jax.inference`,
`twell_jax.analysis`.
"""

from twell_jax.ffn import (
    Biases,
    CannotServe,
    FFNStats,
    ModelStats,
    Quantised,
    Rectifier,
    SparseMLP,
    TileUnions,
    TwELL,
    capture_stats,
    collect_stats,
    explain,
    order_by_use,
    pack,
    pack_unions,
    quantise_mlps,
    sparse_ffn,
    unpack,
)

__version__ = "0.2.0"

__all__ = [
    "Biases",
    "CannotServe",
    "FFNStats",
    "ModelStats",
    "Quantised",
    "Rectifier",
    "SparseMLP",
    "TileUnions",
    "TwELL",
    "__version__",
    "capture_stats",
    "collect_stats",
    "explain",
    "order_by_use",
    "pack",
    "pack_unions",
    "quantise_mlps",
    "sparse_ffn",
    "unpack",
]
