"""A dense block of few tokens: two products by `frames.token_ring`, one behind the other."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.device import grid, open_gates
from pallas_kernels.hopper.frames.token_ring import PARTS, Product, multiply_tiles
from pallas_kernels.layouts import open_counts


class TokenBlock(NamedTuple):
    """The products of a quartet, each of its first tile.

    Attributes:
      up: makes what `down` multiplies; None if it is there.
      down: the second product.
      first: int32 scalar, the first tile of the cluster's first quartet.
      stride: quartets that share the tiles. All of them must be on the GPU at once.
      quartets: of a cluster.
    """

    up: Product | None
    down: Product
    first: jax.Array
    stride: int
    quartets: int

    def fetch_down(self) -> None:
        """Asks for the matrix of `down`."""
        pl.when(self.first < self.down.ring.tiles)(self.down.fetch_matrices)

    def multiply_up(self, counts: Any, agreed: jax.Array, store: Callable[..., None]) -> None:
        """Makes what `down` multiplies, but for tiles that are there, and calls `fetch_down`.

        Args:
          counts: GMEM, int32, the row of `layouts.open_counts` that says which tiles are there.
          agreed: int32 scalar, their number.
          store: called with the first of a block's 16 columns and what up has of them.
        """
        assert self.up is not None
        tokens, tiles = self.up.ring.tokens, self.up.ring.tiles
        pl.when(agreed == tiles)(self.fetch_down)

        @pl.when(agreed < tiles)
        def _():
            self._multiply_missing(counts.at[pl.ds(open_counts.votes(tokens, 0), tiles)], store)
            arrivals = counts.at[open_counts.arrivals(tokens)]
            grid.arrive(arrivals)
            grid.wait(arrivals, PARTS * self.stride)

    def _multiply_missing(self, votes, store):
        up = self.up.with_scales()

        def is_missing(i):
            of_round = self.first + i * self.stride * up.ring.sums
            tiles = [
                of_round + quartet + s * up.ring.apart
                for quartet in range(self.quartets)
                for s in range(up.ring.sums)
            ]
            return open_gates.is_missing(votes, tiles)

        fetch = functools.partial(up.fetch, range(up.ring.slots))
        pl.when((self.first < up.ring.tiles) & is_missing(0))(fetch)
        multiply_tiles(up, self.first, self.stride, store, self.fetch_down, is_missing)

    def multiply_down(self, store: Callable[..., None]) -> None:
        """Multiplies behind `fetch_down`; `store` as in `multiply_up`."""
        pl.when(self.first < self.down.ring.tiles)(self.down.fetch_tokens)
        multiply_tiles(self.down, self.first, self.stride, store)
