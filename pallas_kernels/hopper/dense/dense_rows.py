"""The whole feed-forward block for some rows of x, whose number only the GPU knows.

These are the rows that a packed format does not hold; the kernel that meets such a row appends it
to a list. Two matmul kernels read the length of the list and compute as many blocks as it takes,
and `place_rows` puts the results in their places: an empty list costs three launches, and nothing
waits for the host. Between the two matmuls, the hidden activation is stored transposed, [H, rows]:
its statistics are then sums along the rows of an accumulator, for which warps need not communicate.

Kernels overlap where they can (programmatic dependent launch). The first starts when the list is
complete, on SMs that the kernel before it leaves free, and lets the second start, which first
fetches its weights into L2. Only `place_rows` changes an array in place, so that XLA copies no
weights of a layer out of stacked ones (docs/design/0014).

Few rows cost the time in which enough SMs read the weights. So up to 64 are computed in blocks of
half the size, and the two thread blocks of a cluster share a sum over H: their four warpgroups
write their sums to GMEM, and each adds the four parts for a quarter of the rows.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import quantised
from pallas_kernels.hopper.common import (
    copies,
    lists,
    params,
    register_rows,
    scalars,
    scales,
    support,
    versions,
)
from pallas_kernels.hopper.common.dependent_launch import await_previous, launch_next
from pallas_kernels.hopper.common.engine import Factor, current
from pallas_kernels.hopper.common.support import sm_count
from pallas_kernels.hopper.common.tiles import ACC_ROWS, CONSUMERS, STAGE_K, TILED, are_before
from pallas_kernels.hopper.common.warpgroup import fence
from pallas_kernels.hopper.dense import accumulate
from pallas_kernels.hopper.dense.accumulate import Operand
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.quantised import Quantised
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights

_BLOCK = CONSUMERS * ACC_ROWS  # rows and columns of a block
_FEW = ACC_ROWS  # a list of up to so many rows is short: rows and columns of its blocks
_PAIR = 2  # thread blocks that share the sums of a short list
_PARTS = _PAIR * CONSUMERS  # of a sum
_PART_ROWS = _FEW // _PARTS  # rows whose parts a warpgroup adds
_PREFETCH = 1 << 17  # elements of w_down that a thread block fetches into L2, at most


def dense_rows(
    heavy: HeavyRows, weights: Weights, rectifier: Rectifier = RELU, keep: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes the dense block for the listed rows.

    For each i < count that is `(act(x_i w_gate^T) * (x_i w_up^T)) w_down`. The non-gated form is
    `act(x_i w_up^T) w_down`. Sums are those of `gate_union`; the gate, h and y are rounded.

    Args:
      heavy: the list, with rows `[M]`; x is bfloat16 or float16, D a multiple of 64, 128 to 8192.
      weights: `[H, D]` each, in the dtype of x, H a multiple of 128 up to 65536. gate and up may be
        `Quantised`, with a scale for each row; x is then `Tokens`.
      rectifier: act, which may pass `x_i w_up^T` through a ReLU.
      keep: for how many i to return what a backward needs: 0, or a multiple of 128.

    Returns:
      y: `[at least M, D]` in the dtype of the weights, for `place_rows`; unspecified from count on.
      l1: float32 scalar, the sum of |h| over all i < count.
      fired: bool `[H]`, whether a neuron's gate is non-zero for any i < count.
      kept: gate and h, `[2, keep, H]`, or h alone, `[1, keep, H]`, in the dtype of y. Row i is that
        of `x_i`; from row count on they are unspecified. None if `keep` is 0.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    support.check_weight("w_down", weights.down)
    (h, d), dtype, m = weights.down.shape, weights.down.dtype, heavy.rows.shape[0]
    for name, w in (("w_gate", weights.gate), ("w_up", weights.up)):
        if w is not None:
            support.check_operand(name, w, (h, d), w if isinstance(w, Quantised) else weights.down)
            x = quantised.for_product(heavy.x, w)
            support.check_operand("heavy.x", x, (-(-m // 8) * 8, d), w)
    support.check_array("heavy.rows", heavy.rows, (m,), jnp.int32)
    support.check_array("heavy.count", heavy.count, (1,), jnp.int32)

    row_blocks = pl.cdiv(m, _BLOCK)
    stats = jax.ShapeDtypeStruct((max(row_blocks, CONSUMERS), h), jnp.float32)
    kept = [jax.ShapeDtypeStruct((len(weights.inner), keep, h), dtype)] if keep else []
    hidden, l1, largest, *kept = _call(
        _hidden_kernel,
        rectifier,
        out_type=(jax.ShapeDtypeStruct((h, row_blocks * _BLOCK), dtype), stats, stats, *kept),
        scratch_types=dict(smem=plgpu.SMEM((CONSUMERS, ACC_ROWS, _BLOCK), dtype, transforms=TILED)),
        grid=(sm_count(),),
        grid_names=("sm",),
    )(weights.live, heavy.pending, heavy.count, [_factors(heavy.x, w) for w in weights.inner])
    scratch: dict = dict(y_smem=plgpu.SMEM((CONSUMERS, ACC_ROWS, _FEW), dtype, transforms=TILED))
    pair, clusters = 1, {}
    if current().has_tma:
        pair, clusters = _PAIR, dict(cluster=(_PAIR,), cluster_names=("part",))
        barrier = plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=CONSUMERS)
        scratch |= dict(few_smem=plgpu.SMEM((CONSUMERS, _PART_ROWS, _FEW), dtype), written=barrier)
    y_rows, count, _ = _call(
        _down_kernel,
        out_type=(
            jax.ShapeDtypeStruct((row_blocks * _BLOCK, d), dtype),
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.ShapeDtypeStruct((d // _FEW, _PARTS, _FEW, _FEW), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(sm_count() // pair,),
        grid_names=("pair",),
        **clusters,
    )(heavy.count, hidden, weights.down)
    # This count is the second kernel's, so that XLA puts no sums between the first and the second.
    few, _ = _split(count[0])
    rows_of_stats = jnp.where(few > 0, _FEW // CONSUMERS, _BLOCK)
    is_computed = (jnp.arange(len(l1)) * rows_of_stats < count[0])[:, None]
    l1, fired = jnp.sum(l1, where=is_computed), jnp.any((largest != 0) & is_computed, axis=0)
    return y_rows, l1, fired, kept[0] if kept else None


def _factors(x, w):
    """The factors of a product, and the scales of their rows if they have some."""
    x, w, factors = quantised.unscaled(quantised.for_product(x, w), w)
    return x, w, factors and (scales.padded(factors[0], _BLOCK), factors[1])


def _call(body, *static, **kwargs):
    return plgpu.kernel(
        functools.partial(body, *static),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=body.__name__.strip("_"),
        compiler_params=params.ORDERED,
        **kwargs,
    )


def _hidden_kernel(
    rectifier, live, pending, count_ref, products, hidden, l1, largest, *kept, smem
):  # fmt: skip
    sm, sms = lax.axis_index("sm"), lax.axis_size("sm")
    (lists.acquire if pending else await_previous)()
    launch_next()
    count = scalars.read(count_ref)
    work = _Hidden(count, live, products, hidden, kept, l1, largest, smem, rectifier)
    few, row_blocks = _split(count)
    _for_each(few * (len(hidden) // _FEW), sm, sms, work.few_block)
    _for_each(row_blocks * (len(hidden) // _BLOCK), sm, sms, work.block)
    if pending:  # this kernel must not end before the one in front of it
        pl.when(sm == sms - 1)(lambda: await_previous())


@dataclasses.dataclass(frozen=True)
class _Hidden:
    """What the hidden kernel does, with references to its operands, results and scratch.

    Attributes:
      count: int32 scalar, the length of the list.
      live: GMEM, int32 `[1]`, neurons that may be active, the first ones; None: all may.
      products: GMEM, for gate and up or one of them x `[rows, D]`, the weight `[H, D]` and None, or
        in 8 bits the scales of the rows of both.
      hidden: GMEM `[H, rows]`, to be filled.
      kept: none, or one in GMEM to be filled: gate and h of the first rows, `[2 or 1, keep, H]`.
      l1, largest: GMEM, float32 `[parts, H]`, to be filled: for a neuron, of the rows of a block,
        the sum of |h| and whether the gate is ever non-zero (1 or 0). In a short list each
        warpgroup's half of the rows is a part.
      smem: SMEM `[warpgroups, 64, 128]`.
      rectifier: what makes the gate.
    """

    count: jax.Array
    live: jax.Ref | None
    products: list[tuple[jax.Ref, jax.Ref, tuple[jax.Ref, jax.Ref] | None]]
    hidden: jax.Ref
    kept: list[jax.Ref]
    l1: jax.Ref
    largest: jax.Ref
    smem: jax.Ref
    rectifier: Rectifier

    def block(self, index):
        """128 rows and 128 neurons, of which a warpgroup has 64."""
        columns = self.hidden.shape[0] // _BLOCK
        row_block, neuron_block = index // columns, index % columns
        warpgroup = lax.axis_index("warpgroup")
        mine = pl.ds(warpgroup * ACC_ROWS, ACC_ROWS)
        rows, first_neuron = pl.ds(row_block * _BLOCK, _BLOCK), neuron_block * _BLOCK

        def finish(accs):
            neurons = pl.ds(first_neuron + warpgroup * ACC_ROWS, ACC_ROWS)
            value = self._activate(accs, rows.start, neurons, row_block)
            copies.write(value, self.smem.at[warpgroup], self.hidden, (neurons, rows))

        self._multiply(rows, first_neuron, _BLOCK, lambda w, x: (w.at[mine], x), finish)

    def few_block(self, index):
        """All rows of a short list, of which a warpgroup has 32, and 64 neurons."""
        warpgroup = lax.axis_index("warpgroup")
        mine = pl.ds(warpgroup * (_FEW // CONSUMERS), _FEW // CONSUMERS)
        neurons = pl.ds(index * _FEW, _FEW)

        def finish(accs):
            value = self._activate(accs, mine.start, neurons, warpgroup)
            versions.store(self.hidden.at[neurons, mine], value)

        rows, columns = pl.ds(versions.first_block(), _FEW), _FEW // CONSUMERS
        self._multiply(rows, neurons.start, columns, lambda w, x: (w, x.at[mine]), finish)

    def _multiply(self, rows, first_neuron, columns, operands, finish):
        """Calls `finish` with products, `[64, columns]` each, of neurons and rows.

        Args:
          rows: a slice of x; from `first_neuron` on there are as many neurons.
          first_neuron: the first of the neurons.
          columns: rows of x that a warpgroup multiplies.
          operands: what a warpgroup takes of a stage of a weight and of x.
          finish: called with a list of float32 arrays, one for each weight.
        """
        size, n = rows.size, len(self.products)
        xs = {x.dtype: x for x, _, _ in self.products}  # each only once

        def factors(*smem):
            x_smem = dict(zip(xs, smem, strict=False))
            pairs = [operands(w, x_smem[w.dtype]) for w in smem[len(xs) :]]
            return [(Factor(w, 1), Factor(x, 1)) for w, x in pairs]

        k, scratch = current().part, self.smem.at[lax.axis_index("warpgroup")]
        slots = current().slots * _BLOCK // size  # they have the same size in either case
        blocks = [(x, rows.start) for x in xs.values()]
        blocks += [(w, first_neuron) for _, w, _ in self.products]
        parts = [Operand(a, (size, k), 1, first) for a, first in blocks]
        stages = self.products[0][0].shape[1] // k
        accumulate.accumulate(parts, factors, finish, n * [columns], stages, slots, scratch)

    def _activate(self, accs, first_row, neurons, part):
        """h, rounded, for rows from `first_row` on; stores its statistics and what is kept."""
        for i, (*_, factors) in enumerate(self.products):
            if factors is not None:
                accs[i] *= scales.of_columns(factors[0], first_row, accs[i].shape)
                accs[i] *= scales.of_rows(factors[1], neurons.start, accs[i].shape)
        gate, *up = accs
        row = plgpu.broadcasted_iota(jnp.int32, gate.shape, 1, layout=plgpu.Layout.WGMMA)
        is_listed, dtype = row < self.count - first_row, self.hidden.dtype
        if self.live is not None:
            is_listed &= are_before(scalars.read(self.live) - neurons.start, gate.shape)
        gate = jnp.where(is_listed & self.rectifier.is_active(gate, dtype), gate, 0.0)
        gate = value = self.rectifier.power(gate, dtype).astype(dtype).astype(jnp.float32)
        for u in up:
            value = jnp.where(is_listed, gate * self.rectifier.linear(u), 0.0)
        self.l1[part, neurons] = jnp.sum(jnp.abs(value), axis=1)
        self.largest[part, neurons] = jnp.max(jnp.where(gate != 0, 1.0, 0.0), axis=1)
        made = [a.astype(dtype) for a in ([gate, value] if up else [value])]
        for kept, (i, a) in itertools.product(self.kept, enumerate(made)):
            target = kept.at[i, pl.ds(first_row, a.shape[1]), neurons].T
            a = plgpu.layout_cast(a, plgpu.Layout.WGMMA_TRANSPOSED)
            pl.when(first_row < kept.shape[1])(functools.partial(versions.store, target, a))
        return made[-1]


def _down_kernel(
    count_ref, hidden, w_down, y_rows, count_out, parts, *, y_smem, few_smem=None, written=None
):
    (h, d), pair, pairs = w_down.shape, lax.axis_index("pair"), lax.axis_size("pair")
    block, blocks, is_first = pair, pairs, lax.axis_index("warpgroup") == 0
    if written is not None:  # there are clusters, and the kernel before it still runs
        block, blocks = pair * _PAIR + lax.axis_index("part"), pairs * _PAIR
        share = pl.cdiv(h, blocks)
        rows = w_down, block * share, min(share, _PREFETCH // d)
        fetch = functools.partial(register_rows.prefetch_rows, *rows)
        pl.when((scalars.read(count_ref) > 0) & is_first)(fetch)
    await_previous()
    launch_next()
    count = scalars.read(count_ref)

    @pl.when(is_first & (block == 0))
    def _():
        count_out[0] = count

    work = _Down(count, hidden, w_down, y_rows, parts, y_smem, few_smem, written)
    few, row_blocks = _split(count)
    if written is not None:
        _for_each(few * (d // _FEW), pair, pairs, work.few_block)
    _for_each(row_blocks * pl.cdiv(d, _BLOCK), block, blocks, work.block)


@dataclasses.dataclass(frozen=True)
class _Down:
    """What the down kernel does, with references to its operands, results and scratch.

    Attributes:
      count: int32 scalar, the length of the list.
      hidden, w_down: GMEM `[H, rows]` and `[H, D]`.
      y: GMEM `[rows, D]`, to be filled.
      parts: GMEM, float32 `[D / 64, 4, 64, 64]`: of 64 columns for the rows of a short list, what
        each warpgroup of a pair of thread blocks has summed.
      y_smem, few_smem: SMEM `[warpgroups, 64, 64]` and `[warpgroups, 16, 64]`.
      written: barrier of the pair, at which a warpgroup arrives when its part is in GMEM.
    """

    count: jax.Array
    hidden: jax.Ref
    w_down: jax.Ref
    y: jax.Ref
    parts: jax.Ref
    y_smem: jax.Ref
    few_smem: jax.Ref
    written: jax.Ref

    def block(self, index):
        """128 rows, of which a warpgroup has 64, and 128 columns."""
        h, d = self.w_down.shape
        row_block, column_block = index // pl.cdiv(d, _BLOCK), index % pl.cdiv(d, _BLOCK)
        warpgroup = lax.axis_index("warpgroup")
        mine = pl.ds(warpgroup * ACC_ROWS, ACC_ROWS)
        columns = pl.ds(column_block * _BLOCK, _BLOCK)

        def factors(h_smem, w_smem):
            return [(Factor(h_smem.at[:, mine], 0), Factor(w_smem, 0))]

        def finish(accs):
            rows = pl.ds(row_block * _BLOCK + warpgroup * ACC_ROWS, ACC_ROWS)
            for first in range(0, _BLOCK, _FEW):
                half = accs[0][:, first : first + _FEW].astype(self.y.dtype)
                target = pl.ds(columns.start + first, _FEW)

                @pl.when(target.start < d)  # D may end in between
                def _(half=half, target=target):
                    copies.write(half, self.y_smem.at[warpgroup], self.y, (rows, target))

        slots, scratch = current().slots, self.y_smem.at[warpgroup]
        blocks = (self.hidden, row_block * _BLOCK), (self.w_down, columns.start)
        parts = [Operand(a, (STAGE_K, _BLOCK), 0, first) for a, first in blocks]
        accumulate.accumulate(parts, factors, finish, [_BLOCK], h // STAGE_K, slots, scratch)

    def few_block(self, index):
        """All rows of a short list and 64 columns; a warpgroup multiplies half of each stage."""
        warpgroup, part = lax.axis_index("warpgroup"), lax.axis_index("part")
        mine = pl.ds(warpgroup * STAGE_K, STAGE_K)

        def factors(h_smem, w_smem):
            return [(Factor(h_smem.at[mine], 0), Factor(w_smem.at[mine], 0))]

        def finish(accs):
            quarter = part * CONSUMERS + warpgroup
            self.parts[index, quarter] = accs[0]
            fence()
            plgpu.barrier_arrive(self.written)
            plgpu.barrier_wait(self.written)
            fence()
            first_row = quarter * _PART_ROWS
            pl.when(first_row < self.count)(lambda: self._add_parts(index, first_row))

        # Rows beyond H are read as zeros: the last stage may have some, or the second be of them.
        stages = max(2, pl.cdiv(self.w_down.shape[0], _PAIR * CONSUMERS * STAGE_K))
        slots, scratch = current().slots, self.y_smem.at[warpgroup]
        block, blocks = (CONSUMERS * STAGE_K, _FEW), ((self.hidden, 0), (self.w_down, index * _FEW))
        parts = [Operand(a, block, 0, first, part * stages) for a, first in blocks]
        accumulate.accumulate(parts, factors, finish, [_FEW], stages, slots, scratch)

    def _add_parts(self, index, first_row):
        """Sets 16 rows of a short list, from `first_row` on, to the sums of the four parts."""
        warpgroup = lax.axis_index("warpgroup")
        parts = self.parts.at[index, :, pl.ds(first_row, _PART_ROWS)]
        layout = plgpu.Layout.WG_STRIDED((_PART_ROWS, _FEW), vec_size=2)
        total = plgpu.load(parts.at[0], layout=layout)
        for part in range(1, _PARTS):  # in this order, always
            total += plgpu.load(parts.at[part], layout=layout)
        rows, columns = pl.ds(first_row, _PART_ROWS), pl.ds(index * _FEW, _FEW)
        smem = self.few_smem.at[warpgroup]
        copies.write(total.astype(self.y.dtype), smem, self.y, (rows, columns))


def _split(count):
    """1 if a list of `count` rows is short, else 0; and the blocks of rows of a longer list."""
    if not current().has_tma:
        return jnp.int32(0), pl.cdiv(count, _BLOCK)
    few = ((count > 0) & (count <= _FEW)).astype(jnp.int32)
    return few, jnp.where(count <= _FEW, 0, pl.cdiv(count, _BLOCK))


def _for_each(blocks, worker, workers, body):
    """Calls `body(index)` for each of `blocks` indices that is this worker's."""

    @pl.loop(0, pl.cdiv(blocks - worker, workers))
    def _(i):
        body(worker + i * workers)

    copies.await_stores(0)
