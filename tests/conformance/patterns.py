"""Patterns of non-zeros for which the backward of sparse gradients goes each of its ways."""

import functools

import jax

from pallas_kernels.rectifiers import RELU
from pallas_kernels.weights import Weights
from tests.conformance.cases import draw
from twell_jax.ffn import dispatch, unions
from twell_jax.ffn.residuals import Way

SHAPE = 700, 128, 512  # M, D, H: the same for most cases, so that they share a compiled program
PATTERNS = {  # every how many tokens one is dense, the threshold, the capacity; the way
    "sparse": (0, 2.2, 1.0, Way.SPARSE),
    "some dense tokens": (100, 2.2, 1.0, Way.SPARSE_AND_FEW),
    "the last tile does not fit": (100, 2.2, 0.7, Way.SPARSE_AND_HEAVY),  # its tokens leave
    "the lists do not fit": (100, 1.5, 0.7, Way.RECOMPUTE),
    "too many tokens leave": (2, 9.0, 1.0, Way.SPARSE_AND_HEAVY),  # from some tile on they stay
    "zero but for one token": (1000, 8, 1.0, Way.SPARSE_AND_FEW),
    "dense": (1000, -8, 1.0, Way.DENSE),
    "dense is faster": (100, 1.5, 1.0, Way.DENSE_AND_HEAVY),
}


def draw_pattern(name, gated):
    """(operands, capacity, way) of one of `PATTERNS`."""
    every, threshold, capacity, way = PATTERNS[name]
    operands = draw(*SHAPE, gated=gated, threshold=threshold)
    if every:
        operands[0][3::every, -1] = -1
    if name == "dense is faster":  # neurons that are active for the dense tokens alone
        operands[1 if gated else 2][-40:, -1] = -9
    found, heavy = way_and_heavy_tokens(operands, capacity)
    assert found == way and (heavy >= 7 or way != Way.DENSE_AND_HEAVY)
    return operands, capacity, way


def way_and_heavy_tokens(operands, capacity):
    """How the gradients of these operands are computed, and how many tokens left the unions."""
    kernels, *_ = dispatch.BACK_ENDS
    residuals = _residuals(kernels, capacity)(operands)
    return residuals.way(len(operands[0]), capacity), residuals.heavy_count[0]


@functools.cache
def _residuals(kernels, capacity):
    forward = functools.partial(unions.forward_with_residuals, kernels, RELU, capacity=capacity)
    return jax.jit(lambda operands: forward(operands[0], Weights(*operands[1:]))[1])
