"""The sparse feed-forward block: the operation, its statistics, its module and its formats."""

from pallas_kernels.quantised import Quantised, quantise
from pallas_kernels.rectifiers import Rectifier
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.algorithms import Gradients, Implementation, Packing
from twell_jax.ffn.api import sparse_ffn
from twell_jax.ffn.capture import ModelStats, SownStats, capture_stats, collect_stats
from twell_jax.ffn.dispatch import CannotServe
from twell_jax.ffn.explained import explain
from twell_jax.ffn.formats import TileUnions, TwELL, pack, pack_unions, unpack
from twell_jax.ffn.lasso import Windows
from twell_jax.ffn.module import BY_NEURON, LiveWidth, SparseMLP
from twell_jax.ffn.mosaic import RESIDUALS
from twell_jax.ffn.order import order_by_use
from twell_jax.ffn.quantised import quantise_mlps
from twell_jax.ffn.stats import FFNStats
from twell_jax.ffn.xla import Biases

__all__ = [
    "BY_NEURON",
    "RESIDUALS",
    "Activation",
    "Biases",
    "CannotServe",
    "FFNStats",
    "Gradients",
    "Implementation",
    "LiveWidth",
    "ModelStats",
    "Packing",
    "Quantised",
    "Rectifier",
    "SownStats",
    "SparseMLP",
    "TileUnions",
    "TwELL",
    "Windows",
    "capture_stats",
    "collect_stats",
    "explain",
    "order_by_use",
    "pack",
    "pack_unions",
    "quantise",
    "quantise_mlps",
    "sparse_ffn",
    "unpack",
]
