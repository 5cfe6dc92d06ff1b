"""The weights of a feed-forward block, gated or not, as one value."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))  # that kernels take


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """The weights of a feed-forward block; row n of each belongs to neuron n.

    Any of them may be `Quantised` for XLA. The kernels for unions and for few tokens take such in
    place of gate and up; those for TwELL do not.

    Attributes:
      gate: `[H, D]`, or None for the non-gated block.
      up, down: `[H, D]`.
      live: int32 `[1]`: neurons from this number on are never active, whatever their weights. More
        than H is like H, a negative number like 0. None: any may be. Stacked weights,
        `[layers, H, D]`, have `[layers]`.
    """

    gate: jax.Array | None
    up: jax.Array
    down: jax.Array
    live: jax.Array | None = None

    @classmethod
    def of(cls, inner: Sequence[jax.Array], down: jax.Array) -> "Weights":
        """Of the projections of x, as `inner` has them, and down."""
        *gate, up = inner
        return cls(gate[0] if gate else None, up, down)

    @property
    def activated(self) -> jax.Array:
        """`[H, D]`, the projection that the ReLU is applied to, so that it decides which
        neurons are active: gate if there is one, else up."""
        return self.up if self.gate is None else self.gate

    @property
    def linear(self) -> jax.Array | None:
        """`[H, D]`, the projection that the gate multiplies; None for the non-gated block."""
        return None if self.gate is None else self.up

    @property
    def inner(self) -> tuple[jax.Array, ...]:
        """The projections of x: (gate, up), or (up,) for the non-gated block."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def live_in_parts(self, parts: int) -> "Weights":
        """These weights with `live` `[parts]`, a number for each of so many parts of the neurons.

        The parts are equal and follow each other, as devices or loops take them.
        """
        if self.live is None or parts == 1:
            return self
        size = len(self.down) // parts
        return replace(self, live=jnp.clip(self.live - size * jnp.arange(parts), 0, size))


def only_live(values: jax.Array, live: jax.Array | None) -> jax.Array:
    """`values: [..., H]`, but 0 for the neurons from `live: int32 [1]` on; None keeps all."""
    if live is None:
        return values
    return jnp.where(jnp.arange(values.shape[-1]) < live, values, 0)
