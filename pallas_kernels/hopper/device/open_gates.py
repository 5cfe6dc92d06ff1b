"""How many gates of a token are open: counted by the blocks that compute them, read by others.

The four blocks of a tile of 64 neurons vote whether they multiply all of it. The values of 16
neurons for all tokens are an array as in `token_columns`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.device import gather, lanes, simt, token_columns
from pallas_kernels.hopper.device.simt import const
from pallas_kernels.hopper.device.token_columns import COLUMNS

# A block is for it if a token has so many open gates among the block's 16. Where gates are sparse
# none is, and where a token has half of its gates open most are (docs/design/0008-few-tokens.md).
MANY = 6
_FOR, _AGAINST = 1, 1 << 8  # votes; four for it make a number that no others do
_COUNTS = plgpu.Layout.WG_STRIDED((256,), vec_size=2)


def count(values: jax.Array, tokens: int, counts_ref) -> jax.Array:
    """Counts the values of each token that are not zero; NaN is not zero.

    Args:
      values: float32.
      tokens: only the first so many are looked at.
      counts_ref: GMEM, int32, for each token; gets the number added.

    Returns:
      int32 scalar, other in each warp: the most that one of the warp's tokens has.
    """
    arguments = token_columns.layout(values.size // COLUMNS), plgpu.RefType()
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=gather.SCALAR)

    @plgpu.inline_mgpu(arg_types=arguments, return_type=result)
    def step(_, values, counts_ref):
        column, token = token_columns.column_and_token()
        lane, _ = simt.lane_and_warp()
        zero = mgpu.c(0.0, ir.F32Type.get())
        # The first lane of a token's 16 adds up their bits.
        token_bits = arith.shli(const(0xFFFF), arith.andi(lane, const(16)))
        of_token = simt.gmem_address(counts_ref, arith.muli(token, const(4)))
        is_first, most = simt.less(column, const(1)), const(0)
        for i, register in enumerate(values.registers.flat):
            fires = arith.andi(
                arith.cmpf(arith.CmpFPredicate.UNE, token_columns.element(register), zero),
                simt.less(token, const(max(0, tokens - 8 * i))),
            )
            bits = arith.andi(lanes.ballot(fires), token_bits)
            number = lanes.popcount(bits)
            mgpu.utils.inline_ptx(
                f"red.global.add.u32 [$0 + {32 * i}], $1;",
                of_token,
                number,
                predicate=arith.andi(is_first, lanes.nonzero(bits)),
            )
            most = arith.maxui(most, number)
        return mgpu.FragmentedArray.splat(_reduce("max", most), (), is_signed=True)

    return step(values, counts_ref)


def are_many(most: jax.Array) -> jax.Array:
    """Whether a token has `MANY` of a block's 16 gates open, given `most` of `count`. All warps
    have arrived then."""
    result = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=gather.SCALAR)

    @plgpu.inline_mgpu(arg_types=(gather.SCALAR,), return_type=result)
    def step(_, most):
        are_many = _any_thread(simt.less(const(MANY - 1), most.registers.item()))
        return mgpu.FragmentedArray.splat(are_many, (), is_signed=False)

    return step(most)


def vote(vote_ref, *, dense: bool) -> None:
    """This block of a tile votes for multiplying all of it, or against it."""
    add(_FOR if dense else _AGAINST, vote_ref)


def do_agree(vote_ref) -> jax.Array:
    """Whether all four blocks of a tile have voted for it; waits for their votes."""
    result = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=gather.SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, vote_ref):
        votes = mgpu.utils.inline_ptx(
            f"""{{.reg .pred more; .reg .b32 seen;
                mov.b32 seen, 0;
                @!$2 bra done;
                poll: ld.relaxed.gpu.global.b32 seen, [$1];
                setp.lt.u32 more, seen, {4 * _FOR};
                @more bra poll;
                done: mov.b32 $0, seen;}}""",
            simt.gmem_address(vote_ref, const(0)),
            simt.is_first_thread(),
            result_types=const(0).type,
            has_side_effects=True,
        )
        agreed = _any_thread(arith.cmpi(arith.CmpIPredicate.eq, votes, const(4 * _FOR)))
        return mgpu.FragmentedArray.splat(agreed, (), is_signed=False)

    return step(vote_ref)


def add(number: int, count_ref) -> None:
    """Adds `number` to `count_ref` (GMEM, int32 scalar), once for the block."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def step(_, count_ref):
        mgpu.utils.inline_ptx(
            f"red.relaxed.gpu.global.add.u32 [$0], {number};",
            simt.gmem_address(count_ref, const(0)),
            predicate=simt.is_first_thread(),
        )

    step(count_ref)


def is_missing(votes_ref, tiles: list[jax.Array]) -> jax.Array:
    """Whether the blocks of one of `tiles` have not agreed, by `votes_ref` (GMEM, int32 `[tiles]`);
    those past the last are not missing."""
    result = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=gather.SCALAR)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), len(tiles) * [gather.SCALAR]), return_type=result
    )
    def step(_, votes_ref, tiles):
        (size,) = ir.MemRefType(votes_ref.type).shape
        missing = mgpu.c(0, ir.IntegerType.get_signless(1))
        for tile in tiles:
            tile = tile.registers.item()
            address = simt.gmem_address(votes_ref, arith.muli(tile, const(4)))
            is_there = simt.less(tile, const(size))
            votes = _load(address, 0, is_there)
            differ = arith.cmpi(arith.CmpIPredicate.ne, votes, const(4 * _FOR))
            missing = arith.ori(missing, arith.andi(is_there, differ))
        return mgpu.FragmentedArray.splat(missing, (), is_signed=False)

    return step(votes_ref, tiles)


def load(counts_ref) -> jax.Array:
    """The sums over rows of `counts_ref` (GMEM, int32 `[rows, n]`, n at most 64) for `are_few`: two
    of them in each lane of every warp."""
    result = plgpu.ShapeDtypeStruct((256,), jnp.int32, layout=_COUNTS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, counts_ref):
        i32 = const(0).type
        rows, size = ir.MemRefType(counts_ref.type).shape
        (width, _), _ = ir.MemRefType(counts_ref.type).get_strides_and_offset()
        lane, _ = simt.lane_and_warp()
        address = simt.gmem_address(counts_ref, arith.muli(lane, const(4)))

        def load_word(row, start):
            is_there = simt.less(lane, const(max(0, size - start)))
            return _load(address, 4 * (row * width + start), is_there)

        of_rows = [[load_word(row, start) for start in (0, 32)] for row in range(rows)]
        words = [functools.reduce(arith.addi, words) for words in zip(*of_rows, strict=True)]
        pair = vector.from_elements(ir.VectorType.get((2,), i32), words)
        registers = np.array([pair], dtype=object)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=_COUNTS.to_mgpu(), _is_signed=True
        )

    return step(counts_ref)


def are_few(counts: jax.Array, most: int, most_of_a_token: int) -> jax.Array:
    """Whether `counts`, of `load`, are at most `most_of_a_token` each and `most` together."""
    result = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=gather.SCALAR)

    @plgpu.inline_mgpu(arg_types=(_COUNTS,), return_type=result)
    def step(_, counts):
        words = gather.elements(counts.registers.flat[0], const(0).type)
        few = _are_few(*words, most, most_of_a_token)
        return mgpu.FragmentedArray.splat(few, (), is_signed=False)

    return step(counts)


def _are_few(first: ir.Value, second: ir.Value, most: int, most_of_a_token: int) -> ir.Value:
    total = _reduce("add", arith.addi(first, second))
    largest = _reduce("max", arith.maxui(first, second))
    return arith.andi(
        simt.less(total, const(most + 1)), simt.less(largest, const(most_of_a_token + 1))
    )


def _any_thread(value: ir.Value) -> ir.Value:
    """Whether a thread of the block has `value` (i1); all of them wait for each other."""
    found = mgpu.utils.inline_ptx(
        "{.reg .pred any; barrier.cta.red.or.aligned.pred any, 0, $1; selp.b32 $0, 1, 0, any;}",
        value,
        result_types=const(0).type,
        has_side_effects=True,
        convergent=True,
    )
    return lanes.nonzero(_reduce("max", found))  # so that ptxas knows that it is uniform


def _reduce(operation: str, value: ir.Value) -> ir.Value:
    """Over the lanes of a warp."""
    return mgpu.utils.inline_ptx(
        f"redux.sync.{operation}.u32 $0, $1, -1;",
        value,
        result_types=const(0).type,
        has_side_effects=True,
        convergent=True,
    )


def _load(address: ir.Value, offset: int, is_there: ir.Value) -> ir.Value:
    """A word of GMEM, or 0, without an access; the load stays behind `griddepcontrol_wait`."""
    return mgpu.utils.inline_ptx(
        f"mov.b32 $0, 0; @$2 ld.global.b32 $0, [$1 + {offset}];",
        address,
        is_there,
        result_types=const(0).type,
        has_side_effects=True,
    )
