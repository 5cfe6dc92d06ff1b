"""Kernels for few tokens: the back ends, operands, and what results must be."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.decode import (
    active_counts,
    few_tokens,
    token_ffn,
    token_gate,
    token_product,
    votes,
)
from pallas_kernels.hopper.decode.gate import Gate
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import quantise, rounded
from pallas_kernels.rectifiers import RELU
from pallas_kernels.reference import decode
from pallas_kernels.weights import Weights
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.eight_bits import in_float64

EPS = 1e-5
LAYER = np.array([1], np.int32)


def reference_gate(x, weights, layer, counts, rectifier=RELU, *, batch, norm=None):
    """The reference's gate, with the arguments of the kernel; nothing is counted."""
    squares, eps = norm or (jnp.full((len(x), 1), x.shape[1], jnp.float32), 0.0)  # a mean of 1
    return Gate(decode.gate(Stream(x, x, squares), weights, layer, rectifier, eps=eps))


def reference_add_ffn(gate, stream, weights, layer, counts, scale, rectifier=RELU, *, batch, eps):
    return decode.add_ffn(gate.values, stream, weights, layer, scale, rectifier, eps=eps)


# What a back end has for few tokens.
HOPPER = SimpleNamespace(
    few_tokens_ffn=few_tokens.few_tokens_ffn,
    gate=token_gate.gate,
    add_ffn=token_ffn.add,
    project=token_product.project,
    hidden=token_product.hidden,
    add_product=token_product.add_product,
)
REFERENCE = SimpleNamespace(
    few_tokens_ffn=decode.few_tokens_ffn,
    gate=reference_gate,
    add_ffn=reference_add_ffn,
    project=decode.project,
    hidden=decode.hidden,
    add_product=decode.add_product,
)
KERNELS = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(HOPPER, id="hopper", marks=pytest.mark.gpu),
]


def normal(*shape):
    return seeds.rng().standard_normal(shape, dtype=np.float32)


def weight(dtype, *shape):
    return (normal(*shape) / shape[-1] ** 0.5).astype(dtype)


def weights_of(layers, h, d, live=None):
    """The three weights of a block."""
    return Weights(*(weight(jnp.bfloat16, layers, h, d) for _ in range(3)), live)


def without_gate(weights):
    return Weights(None, weights.up, weights.down)


def in_8_bits(*shape):
    """Stacked matrices whose rows have very different sizes; the first is zero."""
    w = weight(jnp.float32, *shape) * 4.0 ** np.arange(-3, 3)[np.arange(shape[1]) % 6, None]
    w[:, 0] = 0
    return jax.tree.map(np.asarray, quantise(w))


def in_rounded(x):
    """The numbers that x stands for in 8 bits, in float64."""
    with jax.default_device(jax.devices("cpu")[0]):  # XLA's reciprocals are not exact on GPUs
        return in_float64(jax.device_get(rounded(jnp.asarray(x))))


def product(x, w):
    """x times the matrices of the second layer, both in 8 bits."""
    return in_rounded(x) @ in_float64(w)[1].T


def stream_of(x, scale):
    """A stream with its squares in uneven parts, as several blocks write them."""
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    scaled = (x.astype(jnp.float32) * scale.astype(jnp.float32)).astype(x.dtype)
    squares = np.asarray(x, np.float32).reshape(len(x), -1, 32) ** 2
    return Stream(x, scaled, jnp.asarray(squares.sum(axis=2)))


def inverse_rms(x):
    return 1 / np.sqrt(np.mean(wide(x) ** 2, axis=1, keepdims=True) + EPS)


def normed(x, scale):
    """The normed stream in float64, its scaling rounded as the stream rounds it."""
    return wide(x) * wide(scale) * inverse_rms(x)


def wide(array):
    return np.asarray(array, np.float64)


def assert_consistent(stream, scale):
    """`scaled` and `squares` are those of `x` as it was rounded."""
    x, scaled, squares = map(wide, stream)
    assert relative_error(scaled, x * wide(scale)) < ROUNDING
    assert relative_error(squares.sum(axis=1), (x * x).sum(axis=1)) < 1e-5


def gate_and_counts(kernels, x, weights, layer, norm=None, act=RELU, *, batch):
    """The gate, and counts of active gates, which are new if there is one layer; the reference has
    none."""
    layers, h, _ = weights.down.shape
    if kernels is REFERENCE:
        return kernels.gate(x, weights, layer, None, act, batch=batch, norm=norm), None
    counts = None if layers == 1 else jax.new_ref(active_counts.zeros(layers, len(x), h))
    gate = kernels.gate(x, weights, layer, counts, act, batch=batch, norm=norm)
    return gate, gate.counts if counts is None else counts[...]


def assert_counted(counts, gate):
    """The last layer's counts are the active gates of the tokens that are no padding."""
    if counts is None:  # of the reference
        return
    of_tokens, batch = active_counts.of_tokens(counts)[-1], len(gate)
    np.testing.assert_array_equal(of_tokens[:batch], np.count_nonzero(gate, axis=1))
    assert not of_tokens[batch:].any() and not counts[:-1].any()


def add_ffn(kernels, gate, stream, weights, counts, scale, hidden=None, *, batch):
    """Of a gate whose kernel has multiplied no tile, or those that `counts` say."""
    counts = jax.new_ref(counts)
    if hidden is None and weights.linear is not None:
        hidden = jnp.full(gate.shape, jnp.nan, gate.dtype)
    gate = Gate(gate, hidden)
    return kernels.add_ffn(gate, stream, weights, LAYER, counts, scale, batch=batch, eps=EPS)


def active_for_each(numbers, m, h):
    """Counts of two layers: of the second, so many for each of m tokens, no tile having voted."""
    counts = np.full(active_counts.zeros(2, m, h).shape, 9999, np.int32)
    tiles, numbers = np.arange(h // 64), np.broadcast_to(numbers, m).reshape(-1, 4, 1)
    of_tiles = numbers // len(tiles) + (tiles < numbers % len(tiles))
    assert (of_tiles < 256).all()
    counts[1, 0] = 0
    counts[1, 1:, active_counts.column(0) :] = (of_tiles << 8 * np.arange(4)[:, None]).sum(axis=1)
    return counts


def votes_of(counts):
    """The sum of the votes of each tile of the last layer."""
    return counts[-1, 0, active_counts.column(0) :]


def draw_tiles_that_are_there(counts, share):
    """Votes by which the gate's kernel has multiplied a share of the tiles, which this writes into
    `counts` of `active_for_each`. Returns whether each tile is among them."""
    against = votes.AGAINST + 3 * votes.HAS_MANY
    of_tiles = votes_of(counts)
    is_there = seeds.rng().permutation(len(of_tiles)) < share * len(of_tiles)
    missing = [against, 3 * votes.HAS_SOME + votes.HAS_MANY, 4 * against]
    there = [2 * votes.HAS_SOME + 2 * votes.HAS_MANY, 4 * votes.HAS_MANY]
    choices = [seeds.rng().choice(numbers, len(of_tiles)) for numbers in (there, missing)]
    of_tiles[:] = np.where(is_there, *choices)
    return is_there


def votes_by_blocks(gate):
    """What each tile's four blocks vote for a gate without padding, `[H / 64, 4]`."""
    numbers = (wide(gate) != 0).reshape(len(gate), -1, 4, 16).sum(axis=3).max(axis=0)
    of_blocks = np.where(numbers < votes.MANY, votes.HAS_SOME, votes.HAS_MANY)
    return np.where(numbers < votes.SOME, votes.AGAINST, of_blocks)


def assert_hidden_of_agreed_tiles(gate, exact_up, batch, act=RELU):
    """Where each of a tile's four blocks has a token with some active gates, and two have one with
    many, the hidden activation and its sum of magnitudes are there. Returns which tiles."""
    values, hidden = wide(gate.values[:batch]), wide(gate.hidden[:batch])
    of_blocks = votes_by_blocks(values)
    has_many = of_blocks == votes.HAS_MANY
    agree = (of_blocks != votes.AGAINST).all(axis=1) & (has_many.sum(axis=1) >= 2)
    columns = np.repeat(agree, 64)
    if agree.any():
        up = np.maximum(exact_up, 0) if act.both else exact_up
        exact = (values * up[:batch])[:, columns]
        assert relative_error(hidden[:, columns], exact) < 2 * ROUNDING
        l1 = wide(gate.l1[:batch])[:, np.repeat(agree, 4)]
        assert relative_error(l1, np.abs(exact).reshape(batch, -1, 16).sum(axis=2)) < ROUNDING
    return np.flatnonzero(agree)


def draw_tiles(m, d):
    """x and gate weights of six tiles: all gates are active for a token, none of one block, just
    enough, too few of one block, many of one block alone; then none. For the last token all are; it
    is padding if there is any."""
    x, w = normal(m, d), np.array(normal(2, 384, d)) / d**0.5
    x[:, -3:] = 1, 0, 0
    x[5, -2] = x[-1, -1] = 1
    active = np.zeros((6, 4, 16), bool)
    active[0] = True
    active[1, [0, 1, 3]] = True
    active[2:5, :, 3 : 3 + votes.SOME] = True
    active[2:4, [0, 3], : votes.MANY] = True
    active[3, 2, 3] = False
    active[4, 1, : votes.MANY] = True
    w[..., -3] = -90
    w[..., -2] = 180 * active.reshape(-1)
    w[..., -1] = 180
    return x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
