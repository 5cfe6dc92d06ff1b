"""A dense feed-forward block of few tokens: two products by `token_ring`, one behind the other."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.decode import grid
from pallas_kernels.hopper.decode.token_ring import PARTS, Product, multiply_rounds
from pallas_kernels.hopper.decode.votes import Missing


class TokenBlock(NamedTuple):
    """The products of a subcluster, which takes turns with the others; their tiles are not set.

    Attributes:
      up: makes what `down` multiplies; None if it is there.
      down: the second product.
      first: int32 scalar, the number of the cluster's first subcluster. All subclusters of a
        cluster have as many rounds as this one.
      stride: subclusters that share the tiles. All of them must be on the GPU at once.
    """

    up: Product | None
    down: Product
    first: jax.Array
    stride: int

    def fetch_down(self) -> None:
        """Asks for the matrix of `down`."""
        pl.when(self.first < self.down.ring.tiles)(lambda: self._down(0).fetch_matrices())

    def multiply_up(self, missing: Missing, arrivals: Any, store: Callable[..., None]) -> None:
        """Makes what `down` multiplies, but for tiles that are there, and calls `fetch_down`.

        Args:
          missing: the tiles that are not there.
          arrivals: GMEM, int32 scalar, zero; counts thread blocks that are done.
          store: called with the first of a thread block's 16 columns and what up has of them.
        """
        pl.when(missing.total == 0)(self.fetch_down)

        @pl.when(missing.total > 0)
        def _():
            self._multiply_missing(missing, store)
            grid.arrive(arrivals)
            grid.wait(arrivals, PARTS * self.stride)

    def _multiply_missing(self, missing, store):
        assert self.up is not None
        at_once = self.up.ring.sums
        rounds = pl.cdiv(missing.total - self.first, at_once * self.stride)

        def of_round(up, i):
            turns = [i * at_once + turn for turn in range(at_once)]
            return dataclasses.replace(up, tiles=tuple(missing.tile(self._place(t)) for t in turns))

        pl.when(rounds > 0)(lambda: of_round(self.up, 0).fetch_matrices())
        up = self.up.with_scales()
        pl.when(rounds > 0)(lambda: of_round(up, 0).fetch_tokens())
        multiply_rounds(functools.partial(of_round, up), rounds, store, self.fetch_down)

    def multiply_down(self, store: Callable[..., None]) -> None:
        """Multiplies behind `fetch_down`; `store` as in `multiply_up`."""
        rounds = pl.cdiv(self.down.ring.tiles - self.first, self.stride)
        pl.when(rounds > 0)(lambda: self._down(0).fetch_tokens())
        multiply_rounds(self._down, rounds, store)

    def _down(self, i):
        return dataclasses.replace(self.down, tiles=(self._place(i),))

    def _place(self, turn):
        """What this subcluster's turn is, counted over all subclusters."""
        return self.first + lax.axis_index("subcluster") + turn * self.stride
