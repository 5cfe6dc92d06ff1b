"""The four thread blocks of a tile of 64 neurons vote whether they multiply it all with w_up.

A tile is worth it if many of its gates are active for a token. A block knows 16 of them. So that
all blocks come to the same decision, they add their votes to a word in memory, and those that are
not against it wait until all votes are there, or one that is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import lanes, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.decode import active_gates, on_host, words

# A block is against it unless a token has `SOME` of the block's 16 gates active. All of a tile's
# blocks must have some, and two of them `MANY`: of a token with half of its gates active, one tile
# in a thousand fails. Where gates are sparse no block has many, unless neurons that are often
# active are neighbours (docs/design/0008-decoding.md).
SOME, MANY = 2, 5
AGAINST, HAS_SOME, HAS_MANY = 1 << 8, 1 << 4, (1 << 4) + 1  # votes
ALL_MANY = 4 * HAS_MANY  # a sum of votes
_ALL, _AGREED = 4 * HAS_SOME, 2 * HAS_SOME + 2 * HAS_MANY  # the least sums of votes


@primitive
def vote(vote_ref, number: int) -> None:
    """This block votes, by one of the numbers above; `vote_ref` is an int32 scalar in GMEM."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def step(_, vote_ref):
        mgpu.utils.inline_ptx(
            f"red.relaxed.gpu.global.add.u32 [$0], {number};",
            simt.gmem_address(vote_ref, const(0)),
            predicate=simt.is_first_thread(),
        )

    step(vote_ref)


@vote.in_jax
def _vote(vote_ref, number):
    """Votes are in the log "votes", with the cluster that has the tile; `vote_ref` stays."""
    del vote_ref
    votes = on_host.log("votes")
    on_host.in_order(lambda tile: votes.note((int(tile), number)), lax.axis_index("cluster"))


@primitive
def do_agree(vote_ref) -> jax.Array:
    """Whether a tile's blocks agree on it, bool scalar.

    Waits until all four have voted, or one against it.
    """
    result = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, vote_ref):
        votes = mgpu.utils.inline_ptx(
            f"""{{.reg .pred more; .reg .b32 seen;
                mov.b32 seen, 0;
                @!$2 bra done;
                poll: ld.relaxed.gpu.global.b32 seen, [$1];
                setp.lt.u32 more, seen, {_ALL};
                @more bra poll;
                done: mov.b32 $0, seen;}}""",
            simt.gmem_address(vote_ref, const(0)),
            simt.is_first_thread(),
            result_types=const(0).type,
            has_side_effects=True,
        )
        agreed = active_gates.any_thread(_are_for_it(votes))
        return mgpu.FragmentedArray.splat(agreed, (), is_signed=False)

    return step(vote_ref)


@do_agree.in_jax
def _do_agree(vote_ref):
    del vote_ref
    votes = on_host.log("votes")

    def total(entries, tile):
        numbers = [number for of, number in entries if of == tile]
        return sum(numbers[(len(numbers) - 1) // 4 * 4 :])  # those of the launches before are whole

    def agree(tile):
        votes.wait_until(lambda entries: total(entries, tile) >= _ALL)
        return _AGREED <= total(votes.entries, tile) < AGAINST

    return on_host.in_order(agree, lax.axis_index("cluster")) != 0


class Missing(NamedTuple):
    """Tiles whose blocks have not agreed.

    Attributes:
      ranks: int32 `[128 * words]`, as in `words.load`: the rank of each tile among them, or -1.
      total: int32 scalar, their number.
    """

    ranks: jax.Array
    total: jax.Array

    @classmethod
    def of(cls, votes: jax.Array, tiles: int) -> "Missing":
        """From the votes of so many tiles, by `words.load`."""
        return cls(*_ranks_and_total(votes, tiles))

    def tile(self, rank: jax.Array) -> jax.Array:
        """The tile of a rank, int32 scalar; past the last one it is past all tiles."""
        return _tile(self.ranks, rank)


@primitive
def _ranks_and_total(votes: jax.Array, tiles: int) -> tuple[jax.Array, jax.Array]:
    """Of `Missing`, from the votes of so many tiles."""
    layout = words.layout(votes.size)
    ranks = plgpu.ShapeDtypeStruct(votes.shape, jnp.int32, layout=layout)
    total = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=(ranks, total))
    def step(_, votes):
        lane, _ = simt.lane_and_warp()
        lanes_before = arith.subi(arith.shli(const(1), lane), const(1))
        ranks, total, true = [], const(0), mgpu.c(1, ir.IntegerType.get_signless(1))
        for i, word in enumerate(words.of_lane(votes)):
            is_there = simt.less(lane, const(tiles - i * words.WARP))
            is_missing = arith.andi(is_there, arith.xori(_are_for_it(word), true))
            missing = lanes.ballot(is_missing)
            before = lanes.popcount(arith.andi(missing, lanes_before))
            rank = arith.addi(total, before)
            ranks.append(arith.select(is_missing, rank, const(-1)))
            total = arith.addi(total, lanes.popcount(missing))
        total = mgpu.FragmentedArray.splat(total, (), is_signed=True)
        return simt.int_array(ranks, layout), total

    return step(votes)


@_ranks_and_total.in_jax
def _ranks_and_total_in_jax(votes, tiles):
    assert votes.size == tiles
    is_missing = (votes < _AGREED) | (votes >= AGAINST)
    ranks = jnp.cumsum(is_missing, dtype=jnp.int32) - 1
    return jnp.where(is_missing, ranks, -1), jnp.sum(is_missing, dtype=jnp.int32)


@primitive
def _tile(ranks: jax.Array, rank: jax.Array) -> jax.Array:
    """`Missing.tile`."""
    layout = words.layout(ranks.size)
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(layout, SCALAR), return_type=result)
    def step(_, ranks, rank):
        lane, _ = simt.lane_and_warp()
        found = const(ranks.shape[0])
        for i, word in enumerate(words.of_lane(ranks)):
            is_it = arith.cmpi(arith.CmpIPredicate.eq, word, rank.registers.item())
            tile = arith.addi(lane, const(i * words.WARP))
            found = arith.select(is_it, tile, found)
        return mgpu.FragmentedArray.splat(simt.warp_min(found), (), is_signed=True)

    return step(ranks, rank)


@_tile.in_jax
def _tile_in_jax(ranks, rank):
    return jnp.min(jnp.where(ranks == rank, jnp.arange(ranks.size, dtype=jnp.int32), ranks.size))


def _are_for_it(votes: ir.Value) -> ir.Value:
    return simt.less(arith.subi(votes, const(_AGREED)), const(AGAINST - _AGREED))
