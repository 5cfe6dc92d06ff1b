"""The whole feed-forward block for some rows of x, whose number the GPU alone knows.

For rows that a packed format does not hold. Whoever meets such a row appends it to a list
for `dense_rows`; its two matmul kernels read the length of the list and do as many blocks as it
takes, so that an empty list costs two launches and nothing waits for the host. The hidden
activation lies transposed between them, [H, rows]: its statistics are then sums over the columns of
an accumulator, which need no communication between warps.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper import operands
from pallas_kernels.hopper.frames.gate_matmul import sm_count

_CONSUMERS = 2
_ROWS = 64  # of a consumer's accumulator
_BLOCK = _CONSUMERS * _ROWS  # rows and columns of a block
_STEP = 64  # columns of an operand in a stage: one 128-byte swizzle
_STAGES = 4
_TILED = (plgpu.TilingTransform((8, _STEP)), plgpu.SwizzleTransform(128))


def dense_rows_reference(count, rows, x_rows, w_gate, w_up, w_down, y_ref):
    """Pure-JAX meaning of `dense_rows`."""
    m = y_ref.shape[0]
    product = functools.partial(jnp.einsum, "md,hd->mh", preferred_element_type=jnp.float32)
    x_rows, is_listed = x_rows[:m], jnp.arange(m) < count[0]
    gate = jax.nn.relu(product(x_rows, w_up if w_gate is None else w_gate)).astype(y_ref.dtype)
    h = gate.astype(jnp.float32)
    if w_gate is not None:
        h *= product(x_rows, w_up)
    y = jnp.dot(h.astype(y_ref.dtype), w_down, preferred_element_type=jnp.float32)
    place = jnp.where(is_listed, rows, m)
    y_ref[...] = y_ref[...].at[place].set(y.astype(y_ref.dtype), mode="drop")
    l1 = jnp.sum(jnp.sum(jnp.abs(h), axis=1), where=is_listed)
    return l1, jnp.any((gate != 0) & is_listed[:, None], axis=0)


def dense_rows(
    count: jax.Array,
    rows: jax.Array,
    x_rows: jax.Array,
    w_gate: jax.Array | None,
    w_up: jax.Array,
    w_down: jax.Array,
    y_ref: jax.Ref,
) -> tuple[jax.Array, jax.Array]:
    """Sets row `rows[i]` of y to `(relu(x_i w_gate^T) * (x_i w_up^T)) w_down` for each i < count.

    The non-gated form is `relu(x_i w_up^T) w_down`. Sums in float32; the gate, h and y are rounded.

    Args:
      count: int32 `[1]`, the length of the list, from 0 to M.
      rows: int32 `[M]`, different rows of y.
      x_rows: `[M rounded up to a multiple of 8, D]`, row i is x_i; bfloat16 or float16, D a
        multiple of 64 from 128 to 8192. Past count, `rows` and `x_rows` may hold anything.
      w_gate: `[H, D]`, H a multiple of 128 up to 65536. None for the non-gated form.
      w_up: `[H, D]`.
      w_down: `[H, D]`.
      y_ref: mutable `[M, D]`.

    Returns:
      l1: float32 scalar, the sum of |h| over all i < count.
      fired: bool `[H]`, whether a neuron's gate is non-zero for any i < count.

    Raises:
      ValueError: if a shape or dtype is not one of these.
    """
    operands.check_weight("w_down", w_down)
    h, d = w_down.shape
    m = y_ref.shape[0]
    operands.check_array("w_gate", w_gate, (h, d), w_down.dtype)
    operands.check_array("w_up", w_up, (h, d), w_down.dtype)
    operands.check_array("x_rows", x_rows, (-(-m // 8) * 8, d), w_down.dtype)
    operands.check_array("y_ref", y_ref, (m, d), w_down.dtype)
    operands.check_array("rows", rows, (m,), jnp.int32)
    operands.check_array("count", count, (1,), jnp.int32)

    tile = (_CONSUMERS, _ROWS, _BLOCK)
    row_blocks = pl.cdiv(m, _BLOCK)
    parts = jax.ShapeDtypeStruct((row_blocks, h), jnp.float32)
    hidden, l1, largest = _call(
        _hidden_kernel,
        out_type=(
            jax.ShapeDtypeStruct((h, row_blocks * _BLOCK), w_down.dtype),
            parts,
            parts,
        ),
        scratch_types=dict(h_smem=plgpu.SMEM(tile, w_down.dtype, transforms=_TILED)),
    )(count, x_rows, *([w_up] if w_gate is None else [w_gate, w_up]))
    count, rows, hidden, w_down = in_place.apart((count, rows, hidden, w_down))
    _call(_down_kernel, out_type=(), scratch_types=dict(y_smem=plgpu.SMEM(tile, w_down.dtype)))(
        count, rows, hidden, w_down, y_ref
    )
    is_computed = (jnp.arange(row_blocks) * _BLOCK < count[0])[:, None]
    return jnp.sum(l1, where=is_computed), jnp.any((largest != 0) & is_computed, axis=0)


def _call(body, **kwargs):
    return plgpu.kernel(
        body,
        grid=(sm_count(),),
        grid_names=("sm",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=body.__name__.strip("_"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **kwargs,
    )


def _hidden_kernel(count, x_rows, *refs, h_smem):
    *weights, hidden, l1, largest = refs
    h, d = weights[0].shape
    warpgroup = lax.axis_index("warpgroup")
    mine = pl.ds(warpgroup * _ROWS, _ROWS)

    def block(row_block, neuron_block):
        rows = pl.ds(row_block * _BLOCK, _BLOCK)
        first_neuron = neuron_block * _BLOCK

        def multiply(_, x_smem, *w_smem_and_accs):
            *w_smem, accs = w_smem_and_accs
            for acc, w in zip(accs, w_smem, strict=True):
                plgpu.wgmma(acc, w.at[mine], x_smem.T)
            plgpu.wgmma_wait(len(accs))  # of the step before
            return accs

        def finish(pipeline):
            def accumulate(*accs):
                pipeline(accs)
                return [acc[...] for acc in accs]

            acc = plgpu.ACC((_ROWS, _BLOCK), jnp.float32)
            gate, *up = pl.run_scoped(accumulate, *len(weights) * [acc])
            row = plgpu.broadcasted_iota(jnp.int32, gate.shape, 1, layout=plgpu.Layout.WGMMA)
            is_listed = row < count[0] - row_block * _BLOCK
            gate = jnp.where(is_listed & ~(gate <= 0), gate, 0.0)  # keeps NaN
            gate = value = gate.astype(hidden.dtype).astype(jnp.float32)
            for u in up:
                value = jnp.where(is_listed, gate * u, 0.0)
            neurons = pl.ds(first_neuron + warpgroup * _ROWS, _ROWS)
            l1[row_block, neurons] = jnp.sum(jnp.abs(value), axis=1)
            largest[row_block, neurons] = jnp.max(jnp.where(gate != 0, 1.0, 0.0), axis=1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            h_smem[warpgroup] = value.astype(hidden.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(h_smem.at[warpgroup], hidden.at[neurons, rows])

        operand = _operand((_BLOCK, _STEP), lambda k: (0, k))
        _pipeline(multiply, finish, d, (1 + len(weights)) * [operand])(
            x_rows.at[rows], *(w.at[pl.ds(first_neuron, _BLOCK)] for w in weights)
        )

    _for_each_block(count[0], h // _BLOCK, block)


def _down_kernel(count, rows, hidden, w_down, y, *, y_smem):
    h, d = w_down.shape
    width = math.gcd(d, _BLOCK)  # the copies of single rows are not clipped to y
    warpgroup = lax.axis_index("warpgroup")
    mine = pl.ds(warpgroup * _ROWS, _ROWS)

    def block(row_block, column_block):
        first_row = row_block * _BLOCK + warpgroup * _ROWS
        first_column = column_block * _BLOCK

        def multiply(_, h_smem, w_smem, acc):
            plgpu.wgmma(acc, h_smem.at[:, mine].T, w_smem)
            plgpu.wgmma_wait(1)  # of the step before
            return acc

        def finish(pipeline):
            def accumulate(acc):
                pipeline(acc)
                return acc[...]

            out = pl.run_scoped(accumulate, plgpu.ACC((_ROWS, _BLOCK), jnp.float32))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            y_smem[warpgroup] = out.astype(y.dtype)
            plgpu.commit_smem()

            @pl.loop(0, jnp.clip(count[0] - first_row, 0, _ROWS))
            def _(i):
                row = y.at[rows[first_row + i]]

                @pl.loop(0, jnp.minimum(_BLOCK, d - first_column), step=width)
                def _(column):
                    plgpu.copy_smem_to_gmem(
                        y_smem.at[warpgroup, i, pl.ds(column, width)],
                        row.at[pl.ds(first_column + column, width)],
                    )

        operand = _operand((_STEP, _BLOCK), lambda k: (k, 0))
        _pipeline(multiply, finish, h, [operand, operand])(
            hidden.at[:, pl.ds(row_block * _BLOCK, _BLOCK)],
            w_down.at[:, pl.ds(first_column, _BLOCK)],
        )

    _for_each_block(count[0], pl.cdiv(d, _BLOCK), block)


def _operand(block, index_map):
    return plgpu.BlockSpec(block, index_map, transforms=_TILED, delay_release=1)


def _pipeline(multiply, finish, k, in_specs):
    return plgpu.emit_pipeline_warp_specialized(
        multiply,
        grid=(k // _STEP,),
        memory_registers=40,
        in_specs=in_specs,
        wg_axis="warpgroup",
        num_compute_wgs=_CONSUMERS,
        max_concurrent_steps=min(_STAGES, k // _STEP),
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
