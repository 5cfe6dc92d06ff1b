"""Rotary positions: the angle of each pair of a head's features, and their rotation."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from twell_jax.config import ModelConfig, RopeScaling

type Table = tuple[jax.Array, jax.Array]  # of `rope_table`


class Rotation(NamedTuple):
    """Some projections of tokens are rotated, in heads.

    Attributes:
      table: the angles.
      head_dim: columns of a head.
      rotated: so many projections, the first ones, are rotated.
    """

    table: Table
    head_dim: int
    rotated: int

    @property
    def size(self) -> int:
        """Features of a head that are rotated."""
        return 2 * self.table[0].shape[-1]

    def of(self, projections: Sequence[jax.Array]) -> list[jax.Array]:
        """The projections, each `[B, T, heads * head_dim]`, after the rotation."""
        done = []
        for y in projections[: self.rotated]:
            heads = y.reshape(*y.shape[:-1], -1, self.head_dim)
            done.append(rotate(heads, self.table).reshape(y.shape))
        return [*done, *projections[self.rotated :]]


def rope_table(positions: jax.Array, config: ModelConfig) -> Table:
    """Cosine and sine of the rotary angles (RoFormer, arXiv 2104.09864, section 3.2.2).

    Args:
      positions: int `[B or 1, T]`.
      config: gives `rotary_size`, the base of the frequencies `rope_theta`, and `rope_scaling`,
        which changes them.

    Returns:
      Two float32 arrays `[B or 1, T, 1, rotary_size / 2]`. With yarn both have its factor, so that
      the product of a rotated query and key has its square.
    """
    size, scaling = config.rotary_size, config.rope_scaling
    exponent = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    frequency = config.rope_theta**-exponent
    if scaling is None:
        angle = positions[..., None, None] * frequency
        return jnp.cos(angle), jnp.sin(angle)
    share, factor = _share_of_scaled(size, config.rope_theta, scaling), scaling.table_factor
    frequency = frequency * jnp.asarray(1 - share + share / scaling.factor, jnp.float32)
    angle = positions[..., None, None] * frequency
    return factor * jnp.cos(angle), factor * jnp.sin(angle)


def rotate(x: jax.Array, rope: Table) -> jax.Array:
    """Rotates features i and i + n / 2 of `x: [B, T, heads, head_dim]` by their angle.

    Where the table's n / 2 angles are fewer than head_dim / 2, features from n on stay.
    """
    cos, sin = (
        jnp.concatenate(pair, axis=-1) for pair in ((rope[0], rope[0]), (-rope[1], rope[1]))
    )
    size = cos.shape[-1]
    turned = x[..., :size].astype(jnp.float32)
    # Not by halves that are concatenated: XLA cannot compute these along with their maximum.
    others = jnp.flip(turned.reshape(*x.shape[:-1], 2, size // 2), axis=-2).reshape(turned.shape)
    turned = (turned * cos + others * sin).astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


def _share_of_scaled(size: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """How much of each frequency is divided by the factor, from 0 to 1: float64 `[size / 2]`."""
    index = np.arange(size // 2)
    if scaling.type == "linear":
        return np.ones(size // 2)
    context = scaling.original_context
    assert context is not None  # `RopeScaling` checks it
    if scaling.type == "llama3":
        turns = context * theta ** (-2 * index / size) / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return 1 - np.clip((turns - low) / (high - low), 0, 1)

    def index_of(turns: float) -> float:  # of the pair that turns so often in the context
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    return np.clip((index - first) / max(last - first, 1e-3), 0, 1)
