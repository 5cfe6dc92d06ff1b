"""The weights of a feed-forward block, gated or not, as one value."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """The weights of a feed-forward block; row n of each belongs to neuron n.

    Any of them may be `Quantised` for XLA; kernels take arrays alone.

    Attributes:
      gate: `[H, D]`, or None for the non-gated block.
      up, down: `[H, D]`.
    """

    gate: jax.Array | None
    up: jax.Array
    down: jax.Array

    @property
    def activated(self) -> jax.Array:
        """`[H, D]`, the projection that the ReLU is applied to, so that it decides what fires:
        gate if there is one, else up."""
        return self.up if self.gate is None else self.gate

    @property
    def linear(self) -> jax.Array | None:
        """`[H, D]`, the projection that the gate multiplies; None for the non-gated block."""
        return None if self.gate is None else self.up

    @property
    def inner(self) -> tuple[jax.Array, ...]:
        """The projections of x: (gate, up), or (up,) for the non-gated block."""
        return (self.up,) if self.gate is None else (self.gate, self.up)
