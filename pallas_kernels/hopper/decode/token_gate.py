"""The gate of a sparse feed-forward block for up to 64 tokens, and the rest of dense tiles."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.common import register_rows, warpgroup
from pallas_kernels.hopper.common.dependent_launch import launch_next
from pallas_kernels.hopper.decode import active_counts, active_gates, token_columns, votes
from pallas_kernels.hopper.decode.gate import Gate
from pallas_kernels.hopper.decode.launch import Phase, launched
from pallas_kernels.hopper.decode.token_call import TokenCall, only_live, store_zeros
from pallas_kernels.hopper.decode.token_ring import Matrices, Product, TokenRing
from pallas_kernels.quantised import Quantised
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights

# Slots of the second product's ring that a thread block with many active gates fills before it
# knows whether the others agree. If all that wait did so, sparse gates would take more time
# (docs/design/0008-decoding.md).
_AHEAD = range(1)
# Of the 16 rows of w_down that are a block's, those that it prefetches into L2 as soon as its ring
# is free: that of the next kernel is not there yet. With more or none, dense gates take more time.
_DOWN_ROWS = 2


def gate_phase(
    x: jax.Array,
    weights: Weights,
    layer: jax.Array,
    counts: jax.Ref | None,
    rectifier: Rectifier = RELU,
    *,
    batch: int,
    norm: tuple[jax.Array, float] | None = None,
) -> Phase[Gate]:
    """The gate of a sparse feed-forward block, `act(x @ w^T)`; counts each token's active gates.

    Where many gates of a tile of 64 neurons are active, they are multiplied with `x @ w_up^T` at
    once: memory would stand still until all gates are known.

    Zeros are ignored by what reads the gate, but in a dense one 0 * inf is NaN. So where x is not
    finite and the product is -inf, the gate is -0.0, which is not ignored.

    Args:
      x: `[M, D]`, M a multiple of 8 up to 64; or fewer than 8, and the results are of 8.
      weights: `[layers, H, D]` each, in the dtype of x; gate and up may be `Quantised`, as in
        `token_product.project`. If only one of them is, no tile is multiplied with w_up here. H is
        a multiple of 64. Gates past the number of live neurons are zero, and whole tiles of 64 of
        them are not computed. Rows of active gates are prefetched into L2 if gates are few.
      layer: int32 `[1]`.
      counts: mutable, as in `active_counts`, zero at `layer`; gets the active gates of each
        token and the votes of tiles. None, for weights of one layer, makes an array of them.
      rectifier: act, which may pass `x @ w_up^T` through a ReLU.
      batch: the first so many tokens are counted, the others are padding. What the results hold
        for padding is undefined.
      norm: `Stream.squares` and epsilon, if x is the scaled stream of a norm.
    """
    squares, eps = norm if norm is not None else (None, 0.0)
    are_new = counts is None
    outs = _outs(x, weights, are_new)
    activated, linear, live = weights.activated, weights.linear, weights.live
    rows = [w.values if isinstance(w, Quantised) else w for w in (*weights.inner[1:], weights.down)]
    # One ring serves both products.
    is_alike = isinstance(linear, Quantised) == isinstance(activated, Quantised)
    ups = Matrices.of((linear,)) if linear is not None and is_alike else None

    finish = functools.partial(_finish, are_new=are_new, eps=eps, batch=batch, rectifier=rectifier)
    call = TokenCall(
        "token_gate",
        TokenRing.of(x, (activated,), k_axis=2),
        _with_counts(finish, are_new),
        starts_next=True,
        staggered=are_new,  # in a decode step the kernel before still runs
        live=-3,
        leave_out=_with_counts(_leave_out, are_new),
    )
    return call.phase(
        x,
        (activated,),
        layer,
        [squares, live, rows, ups],
        list(outs.values()),
        lambda *written: Gate(**dict(zip(outs, written, strict=True))),
        refs=[] if are_new else [counts],
    )


gate = launched(gate_phase)


def _outs(x, weights, are_new):
    """What the kernel writes, by the fields of `Gate`; the counts, if they are new, come last."""
    tokens, h = token_columns.padded(x.shape[0]), weights.down.shape[1]
    outs = dict(values=jax.ShapeDtypeStruct((tokens, h), x.dtype))
    if weights.linear is not None:
        l1_parts = (tokens, h // token_columns.COLUMNS)
        outs["hidden"] = jax.ShapeDtypeStruct((tokens, h), x.dtype)
        outs["l1"] = jax.ShapeDtypeStruct(l1_parts, jnp.float32)
    if are_new:
        outs["counts"] = active_counts.shape(1, tokens, h)
    return outs


def _with_counts(function, are_new):
    """`function`, which `TokenCall` calls, with the counts in front: one of the results if they are
    new, else one of the references."""

    def call(refs, outs, number, product):
        if are_new:
            *outs, counts = outs
        else:
            counts, *refs = refs
        return function(counts, refs, outs, number, product)

    return call


def _finish(counts, refs, outs, number, product, *, are_new, eps, batch, rectifier):
    squares, live, rows, ups = refs
    (tile,), (first,) = product.tiles, product.first_columns
    tokens, dtype = product.ring.tokens, outs[0].dtype
    if are_new:
        _set_numbers(counts, number, tile, 0)
    set_live = only_live(live, number, first, tokens)
    scale = 1.0
    if squares is not None:
        scale = token_columns.inverse_rms(squares, product.ring.k, eps)

    def store(values):
        before = values[0] * scale
        g = jnp.where(before == -jnp.inf, -0.0, rectifier.gate(before, dtype))
        g = set_live(g).astype(dtype).astype(jnp.float32)
        numbers = _numbers(counts, number, tile)
        most = active_gates.count(g, batch, numbers.at[pl.ds(1, tokens // 4)])
        if ups is None:
            launch_next()
        else:
            # Thread blocks with many active gates let the next kernel start later: it would put two
            # on each SM that is free first, and read w_down through half of the SMs.
            has_many = active_gates.has(most, votes.MANY)
            pl.when(~has_many)(lambda: launch_next())

            up = dataclasses.replace(product, matrices=ups, is_early=None)
            dense = _DenseTile(up, rows[-1].at[number], numbers.at[0], has_many)
            has_some = dense.vote(most)

        # Where a token of the warp has many, the tile will probably be read as a whole.
        @pl.when(ups is None or most < votes.MANY)
        def _():
            for w in rows:
                token_columns.prefetch_rows(w.at[number], first, g, batch)

        token_columns.store(outs[0], first, g)
        if ups is not None:

            def store_hidden(up):
                _store_hidden(outs[1:], first, hidden(g, up * scale, rectifier))

            pl.when(has_some)(functools.partial(dense.multiply_if_agreed, store_hidden))

    return store


def _numbers(counts, number, tile):
    return counts.at[number, :, active_counts.column(tile)]


def _set_numbers(counts, number, tile, sum_of_votes):
    """The first thread block of a tile stores the sum of its votes, and that no gate is active;
    that of the first tile also that no block of `token_ffn` has arrived. The other blocks of the
    tile see it when they have the sums that this one sends."""

    @pl.when(lax.axis_index("part") == 0)
    def _():
        active_gates.store(_numbers(counts, number, tile), sum_of_votes)

        @pl.when(tile == 0)
        def _():
            active_gates.store(counts.at[number, pl.ds(0, 1), active_counts.Launch.FFN], 0)

        warpgroup.fence()


def _leave_out(counts, refs, outs, number, product):
    launch_next()
    store_zeros(refs, outs, number, product)
    (tile,), (first,) = product.tiles, product.first_columns
    if len(outs) > 1:
        # The tile is there, as if it had been multiplied.
        _store_hidden(outs[1:], first, token_columns.zeros(product.ring.tokens))
    _set_numbers(counts, number, tile, votes.ALL_MANY)


def hidden(g: jax.Array, up: jax.Array, rectifier: Rectifier) -> jax.Array:
    """The hidden activation of columns with the gates `g`, float32; a gate of 0 ignores `up`."""
    is_active = lax.bitcast_convert_type(g, jnp.uint32) != 0
    return jnp.where(is_active, g * rectifier.linear(up), 0.0)


def _store_hidden(outs, first, h):
    token_columns.store(outs[0], first, h)
    token_columns.store_sums(outs[1], first // token_columns.COLUMNS, jnp.abs(h))


class _DenseTile(NamedTuple):
    """The second product of a tile, if its blocks agree on it, in the ring of the first.

    Attributes:
      up: the product.
      down: GMEM `[H, D]`, w_down.
      votes: GMEM int32 scalar, for the tile's votes.
      has_many: whether a token has `votes.MANY` active gates in this block, bool scalar; then it
        has not let the next kernel start.
    """

    up: Product
    down: Any
    votes: Any
    has_many: jax.Array

    def vote(self, most: jax.Array) -> jax.Array:
        """Votes, and fetches the first stages if this block has many.

        Args:
          most: of `active_gates.count`.

        Returns:
          Whether a token has `votes.SOME`, bool scalar: whether this block is not against it.
        """
        vote = functools.partial(votes.vote, self.votes)
        has_some = active_gates.has(most, votes.SOME)
        pl.when(~has_some)(functools.partial(vote, votes.AGAINST))
        pl.when(has_some & ~self.has_many)(functools.partial(vote, votes.HAS_SOME))

        @pl.when(self.has_many)
        def _():
            vote(votes.HAS_MANY)
            self.up.fetch(_AHEAD)

        return has_some

    def multiply_if_agreed(self, store: Callable[..., None]) -> None:
        """Waits for the votes of the others, multiplies if all are for it, and calls `store` with
        the 16 columns of `up`."""
        has_many, do_agree = self.has_many, votes.do_agree(self.votes)
        pl.when(~do_agree)(lambda: launch_next())
        pl.when(has_many & ~do_agree)(functools.partial(self.up.drop, _AHEAD))
        pl.when(do_agree & ~has_many)(functools.partial(self.up.fetch, _AHEAD))
        pl.when(do_agree)(functools.partial(self._multiply, store))

    def _multiply(self, store):
        up = self.up
        up.fetch(range(_AHEAD.stop, up.ring.slots))
        up.expect()
        up.send()
        launch_next()
        register_rows.prefetch_rows(self.down, up.first_columns[0], _DOWN_ROWS)
        store(*up.receive())
