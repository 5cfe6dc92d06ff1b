"""How many gates of a token are open: counted by the blocks that compute them, read by others.

The values of 16 neurons for all tokens are an array as in `token_columns`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.device import gather, lanes, simt, token_columns, words
from pallas_kernels.hopper.device.simt import const
from pallas_kernels.hopper.device.token_columns import COLUMNS


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
        return mgpu.FragmentedArray.splat(simt.warp_max(most), (), is_signed=True)

    return step(values, counts_ref)


def has(most: jax.Array, number: int) -> jax.Array:
    """Whether a token has so many of a block's 16 gates open, given `most` of `count`: bool scalar.
    All warps have arrived then."""
    result = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=gather.SCALAR)

    @plgpu.inline_mgpu(arg_types=(gather.SCALAR,), return_type=result)
    def step(_, most):
        has = any_thread(simt.less(const(number - 1), most.registers.item()))
        return mgpu.FragmentedArray.splat(has, (), is_signed=False)

    return step(most)


def are_few(counts: jax.Array, most: int, most_of_a_token: int) -> jax.Array:
    """Whether `counts`, of `words.load`, are at most `most_of_a_token` each and `most` together."""
    result = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=gather.SCALAR)

    @plgpu.inline_mgpu(arg_types=(words.layout(counts.size),), return_type=result)
    def step(_, counts):
        numbers = words.of_lane(counts)
        total = simt.warp_sum(functools.reduce(arith.addi, numbers))
        largest = simt.warp_max(functools.reduce(arith.maxui, numbers))
        few = arith.andi(
            simt.less(total, const(most + 1)), simt.less(largest, const(most_of_a_token + 1))
        )
        return mgpu.FragmentedArray.splat(few, (), is_signed=False)

    return step(counts)


def any_thread(value: ir.Value) -> ir.Value:
    """Whether a thread of the block has `value` (i1); all of them wait for each other."""
    found = mgpu.utils.inline_ptx(
        "{.reg .pred any; barrier.cta.red.or.aligned.pred any, 0, $1; selp.b32 $0, 1, 0, any;}",
        value,
        result_types=const(0).type,
        has_side_effects=True,
        convergent=True,
    )
    return lanes.nonzero(simt.warp_max(found))  # so that ptxas knows that it is uniform
