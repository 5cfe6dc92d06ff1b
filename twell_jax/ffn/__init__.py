"""The sparse feed-forward block: the operation, its statistics, its module and its formats."""

from twell_jax.ffn.api import CannotServe, sparse_ffn
from twell_jax.ffn.formats import TileUnions, TwELL, pack, pack_unions, unpack
from twell_jax.ffn.module import SparseMLP
from twell_jax.ffn.xla import FFNStats

__all__ = [
    "CannotServe",
    "FFNStats",
    "SparseMLP",
    "TileUnions",
    "TwELL",
    "pack",
    "pack_unions",
    "sparse_ffn",
    "unpack",
]
