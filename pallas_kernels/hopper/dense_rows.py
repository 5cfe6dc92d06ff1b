"""The whole feed-forward block for some rows of x, whose number only the GPU knows.

These are the rows that a packed format does not hold; the kernel that meets such a row appends it
to a list. Two matmul kernels read the length of the list and compute as many blocks as it takes: an
empty list costs two launches, and nothing waits for the host. Between the two, the hidden
activation is stored transposed, [H, rows]: its statistics are then sums along the rows of an
accumulator, for which warps need not communicate.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper import support
from pallas_kernels.hopper.device import versions
from pallas_kernels.hopper.device.tiles import ACC_ROWS, CONSUMERS, STAGE_K, TILED
from pallas_kernels.hopper.support import sm_count
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.layouts.weights import Weights

_BLOCK = CONSUMERS * ACC_ROWS  # rows and columns of a block
_STAGES = 4


def dense_rows(heavy: HeavyRows, weights: Weights, y_ref: jax.Ref) -> tuple[jax.Array, jax.Array]:
    """Sets the listed rows of y to those of the dense block.

    For each i < count, row `rows[i]` becomes `(relu(x_i w_gate^T) * (x_i w_up^T)) w_down`. The
    non-gated form is `relu(x_i w_up^T) w_down`. Sums are float32; the gate, h and y are rounded.

    Args:
      heavy: the list, with rows `[M]`; x is bfloat16 or float16, D a multiple of 64 from 128 to
        8192.
      weights: `[H, D]` each, in the dtype of x, H a multiple of 128 up to 65536.
      y_ref: mutable `[M, D]` of the same dtype.

    Returns:
      l1: float32 scalar, the sum of |h| over all i < count.
      fired: bool `[H]`, whether a neuron's gate is non-zero for any i < count.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    support.check_weight("w_down", weights.down)
    (h, d), dtype = weights.down.shape, weights.down.dtype
    m = y_ref.shape[0]
    support.check_array("w_gate", weights.gate, (h, d), dtype)
    support.check_array("w_up", weights.up, (h, d), dtype)
    support.check_array("heavy.x", heavy.x, (-(-m // 8) * 8, d), dtype)
    support.check_array("y_ref", y_ref, (m, d), dtype)
    support.check_array("heavy.rows", heavy.rows, (m,), jnp.int32)
    support.check_array("heavy.count", heavy.count, (1,), jnp.int32)

    tile = (CONSUMERS, ACC_ROWS, _BLOCK)
    row_blocks = pl.cdiv(m, _BLOCK)
    parts = jax.ShapeDtypeStruct((row_blocks, h), jnp.float32)
    hidden, l1, largest = _call(
        _hidden_kernel,
        out_type=(
            jax.ShapeDtypeStruct((h, row_blocks * _BLOCK), dtype),
            parts,
            parts,
        ),
        scratch_types=dict(h_smem=plgpu.SMEM(tile, dtype, transforms=TILED)),
    )(heavy.count, heavy.x, *weights.inner)
    count, rows, hidden, w_down = in_place.barrier((heavy.count, heavy.rows, hidden, weights.down))
    _call(_down_kernel, out_type=(), scratch_types=dict(y_smem=plgpu.SMEM(tile, dtype)))(
        count, rows, hidden, w_down, y_ref
    )
    is_computed = (jnp.arange(row_blocks) * _BLOCK < count[0])[:, None]
    return jnp.sum(l1, where=is_computed), jnp.any((largest != 0) & is_computed, axis=0)


def _call(body, **kwargs):
    return plgpu.kernel(
        body,
        grid=(sm_count(),),
        grid_names=("sm",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=body.__name__.strip("_"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **kwargs,
    )


def _hidden_kernel(count, x_rows, *refs, h_smem):
    *weights, hidden, l1, largest = refs
    h, d = weights[0].shape
    warpgroup = lax.axis_index("warpgroup")
    mine = pl.ds(warpgroup * ACC_ROWS, ACC_ROWS)

    def block(row_block, neuron_block):
        rows = pl.ds(row_block * _BLOCK, _BLOCK)
        first_neuron = neuron_block * _BLOCK

        def multiply(_, x_smem, *w_smem_and_accs):
            *w_smem, accs = w_smem_and_accs
            for acc, w in zip(accs, w_smem, strict=True):
                plgpu.wgmma(acc, w.at[mine], x_smem.T)
            plgpu.wgmma_wait(len(accs))  # the step before has ended
            return accs

        def finish(pipeline):
            def accumulate(*accs):
                pipeline(accs)
                return [acc[...] for acc in accs]

            acc = plgpu.ACC((ACC_ROWS, _BLOCK), jnp.float32)
            gate, *up = pl.run_scoped(accumulate, *len(weights) * [acc])
            row = plgpu.broadcasted_iota(jnp.int32, gate.shape, 1, layout=plgpu.Layout.WGMMA)
            is_listed = row < count[0] - row_block * _BLOCK
            gate = jnp.where(is_listed & ~(gate <= 0), gate, 0.0)  # keeps NaN
            gate = value = gate.astype(hidden.dtype).astype(jnp.float32)
            for u in up:
                value = jnp.where(is_listed, gate * u, 0.0)
            neurons = pl.ds(first_neuron + warpgroup * ACC_ROWS, ACC_ROWS)
            l1[row_block, neurons] = jnp.sum(jnp.abs(value), axis=1)
            largest[row_block, neurons] = jnp.max(jnp.where(gate != 0, 1.0, 0.0), axis=1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            h_smem[warpgroup] = value.astype(hidden.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(h_smem.at[warpgroup], hidden.at[neurons, rows])

        operand = _operand((_BLOCK, STAGE_K), lambda k: (0, k))
        _pipeline(multiply, finish, d, (1 + len(weights)) * [operand])(
            x_rows.at[rows], *(w.at[pl.ds(first_neuron, _BLOCK)] for w in weights)
        )

    _for_each_block(count[0], h // _BLOCK, block)


def _down_kernel(count, rows, hidden, w_down, y, *, y_smem):
    h, d = w_down.shape
    width = math.gcd(d, _BLOCK)  # copies of single rows are not clipped to y's columns
    warpgroup = lax.axis_index("warpgroup")
    mine = pl.ds(warpgroup * ACC_ROWS, ACC_ROWS)

    def block(row_block, column_block):
        first_row = row_block * _BLOCK + warpgroup * ACC_ROWS
        first_column = column_block * _BLOCK

        def multiply(_, h_smem, w_smem, acc):
            plgpu.wgmma(acc, h_smem.at[:, mine].T, w_smem)
            plgpu.wgmma_wait(1)  # the step before has ended
            return acc

        def finish(pipeline):
            def accumulate(acc):
                pipeline(acc)
                return acc[...]

            out = pl.run_scoped(accumulate, plgpu.ACC((ACC_ROWS, _BLOCK), jnp.float32))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            versions.store(y_smem.at[warpgroup], out.astype(y.dtype))
            plgpu.commit_smem()

            @pl.loop(0, jnp.clip(count[0] - first_row, 0, ACC_ROWS))
            def _(i):
                row = y.at[rows[first_row + i]]

                @pl.loop(0, jnp.minimum(_BLOCK, d - first_column), step=width)
                def _(column):
                    plgpu.copy_smem_to_gmem(
                        y_smem.at[warpgroup, i, pl.ds(column, width)],
                        row.at[pl.ds(first_column + column, width)],
                    )

        operand = _operand((STAGE_K, _BLOCK), lambda k: (k, 0))
        _pipeline(multiply, finish, h, [operand, operand])(
            hidden.at[:, pl.ds(row_block * _BLOCK, _BLOCK)],
            w_down.at[:, pl.ds(first_column, _BLOCK)],
        )

    _for_each_block(count[0], pl.cdiv(d, _BLOCK), block)


def _operand(block, index_map):
    return plgpu.BlockSpec(block, index_map, transforms=TILED, delay_release=1)


def _pipeline(multiply, finish, k, in_specs):
    return plgpu.emit_pipeline_warp_specialized(
        multiply,
        grid=(k // STAGE_K,),
        memory_registers=40,
        in_specs=in_specs,
        wg_axis="warpgroup",
        num_compute_wgs=CONSUMERS,
        max_concurrent_steps=min(_STAGES, k // STAGE_K),
        compute_context=finish,
    )


def _for_each_block(count, columns, body):
    """Calls `body(row block, column block)` for each block of this SM that has a listed row."""
    sm, sms = lax.axis_index("sm"), lax.axis_size("sm")
    blocks = pl.cdiv(count, _BLOCK) * columns

    @pl.loop(0, pl.cdiv(blocks - sm, sms))
    def _(i):
        index = sm + i * sms
        body(index // columns, index % columns)

    plgpu.wait_smem_to_gmem(0)
