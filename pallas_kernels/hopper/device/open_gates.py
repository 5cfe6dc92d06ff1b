"""How many gates of a token are open: counted by the blocks that compute them, read by others.

The values of 16 neurons for all tokens are an array as in `token_columns`.
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

_COUNTS = plgpu.Layout.WG_STRIDED((256,), vec_size=2)


def count(values: jax.Array, tokens: int, counts_ref) -> None:
    """Counts the values of each token that are not zero; NaN is not zero.

    Args:
      values: float32.
      tokens: only the first so many are looked at.
      counts_ref: GMEM, int32, for each token; gets the number added.
    """

    @plgpu.inline_mgpu(arg_types=(token_columns.layout(values.size // COLUMNS), plgpu.RefType()))
    def step(_, values, counts_ref):
        column, token = token_columns.column_and_token()
        lane, _ = simt.lane_and_warp()
        zero = mgpu.c(0.0, ir.F32Type.get())
        # The first lane of a token's 16 adds up their bits.
        token_bits = arith.shli(const(0xFFFF), arith.andi(lane, const(16)))
        of_token = simt.gmem_address(counts_ref, arith.muli(token, const(4)))
        is_first = simt.less(column, const(1))
        for i, register in enumerate(values.registers.flat):
            fires = arith.andi(
                arith.cmpf(arith.CmpFPredicate.UNE, token_columns.element(register), zero),
                simt.less(token, const(max(0, tokens - 8 * i))),
            )
            bits = arith.andi(lanes.ballot(fires), token_bits)
            mgpu.utils.inline_ptx(
                f"{{.reg .b32 n; popc.b32 n, $1; @$2 red.global.add.u32 [$0 + {32 * i}], n;}}",
                of_token,
                bits,
                arith.andi(is_first, arith.cmpi(arith.CmpIPredicate.ne, bits, const(0))),
                has_side_effects=True,
            )

    step(values, counts_ref)


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
            return mgpu.utils.inline_ptx(
                f"mov.b32 $0, 0; @$2 ld.global.b32 $0, [$1 + {4 * (row * width + start)}];",
                address,
                simt.less(lane, const(max(0, size - start))),
                result_types=i32,
                has_side_effects=True,
            )

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
        i32 = const(0).type
        first, second = gather.elements(counts.registers.flat[0], i32)

        def reduce(operation, value):
            return mgpu.utils.inline_ptx(
                f"redux.sync.{operation}.u32 $0, $1, -1;",
                value,
                result_types=i32,
                has_side_effects=True,
                convergent=True,
            )

        total = reduce("add", arith.addi(first, second))
        largest = reduce("max", arith.maxui(first, second))
        few = arith.andi(
            simt.less(total, const(most + 1)), simt.less(largest, const(most_of_a_token + 1))
        )
        return mgpu.FragmentedArray.splat(few, (), is_signed=False)

    return step(counts)
