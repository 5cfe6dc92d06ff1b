"""A kernel that multiplies up to 64 tokens with matrices that are read once, and finishes the sums.

A thread block mostly lets the next kernel start at once, and asks for its part of the matrix before
it waits for the kernel or the phase before it (programmatic dependent launch, `launch`), so that
memory does not stand still between them. Matrices must therefore be finished earlier: inputs of the
program, not results of the computations just before.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.common.dependent_launch import launch_next
from pallas_kernels.hopper.decode import cluster, token_columns
from pallas_kernels.hopper.decode.launch import Phase
from pallas_kernels.hopper.decode.token_ring import (
    COLUMNS,
    PARTS,
    Matrices,
    Product,
    TokenRing,
    clusters_at_once,
)


def store_zeros(_, outs, number, product):
    """Stores zeros to the first result."""
    del number
    zeros = token_columns.zeros(product.ring.tokens)
    token_columns.store(outs[0], product.first_columns[0], zeros)


@dataclasses.dataclass(frozen=True)
class TokenCall:
    """A kernel that multiplies and then does what `finish` says.

    Attributes:
      name: the kernel's name.
      ring: the product.
      finish: called with references to the further operands and to the results, the layer, and the
        `Product`, which is on its way. It returns what is called with the finished sums: for each
        matrix of a block an array of `token_columns`.
      starts_next: whether `finish` and `leave_out` let the next kernel start. That kernel can then
        read at once what the one before this one has written.
      staggered: whether blocks that find others on their SM ask for one stage at first, so that not
        all blocks wait for each other's sums at the same time, while memory stands still. It takes
        a GPU that is empty when the kernel starts.
      live: the index, among references and further operands, of the one that says how many columns
        of each layer's matrices are multiplied, in whole tiles. All are if this or that is None.
      leave_out: called for other tiles, instead of `finish`.
    """

    name: str
    ring: TokenRing
    finish: Callable
    starts_next: bool = False
    staggered: bool = False
    live: int | None = None
    leave_out: Callable = store_zeros

    def phase(self, x, weights, layer, operands, outs, form, *, refs=()) -> Phase:
        """This kernel; `finish` finds `refs` in front of `operands`.

        Each subcluster has a tile. The subclusters of a cluster must agree whether they multiply
        it, so a kernel with `live` keeps its one subcluster.
        """
        matrices = Matrices.of(weights, side_by_side=self.ring.side_by_side)
        read = [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in weights]  # of one layer
        flops = 2 * x.shape[0] * sum(w.size for w in read)
        return Phase(
            self.name,
            clusters=self.ring.tiles,
            cluster=(1, PARTS),
            operands=(x, layer, matrices, operands),
            refs=refs,
            outs=outs,
            form=form,
            memory=self.ring.scratch(),
            barriers=self.ring.barriers(),
            run=functools.partial(_run, call=self),
            cost=(flops, (x, *read, *outs)),
        )


def _run(cluster_number, wait, operands, refs, outs, memory, barriers, *, call):
    x, layer, matrices, further = operands
    further, smem, number = [*refs, *further], memory | dict(here=barriers), layer[0]
    subcluster = lax.axis_index("subcluster")
    tile = cluster_number * lax.axis_size("subcluster") + subcluster
    tiles, first_block = call.ring.sums * (tile,), subcluster * PARTS
    is_early = tile < clusters_at_once(1) if call.staggered else None
    product = Product(call.ring, x, matrices, number, tiles, smem, first_block, is_early=is_early)
    cluster.prepare(smem["arrived"])
    live = None if call.live is None else further[call.live]

    def begin():
        if not call.starts_next:
            launch_next()
        wait()

    def multiply():
        is_8_bits = call.ring.is_8_bits
        if not is_8_bits:  # else the exchange of scales comes first
            product.expect()
        product.fetch_matrices()
        begin()
        scaled = product.with_scales()
        if is_8_bits:
            scaled.expect()
        scaled.fetch_tokens()
        store = call.finish(further, outs, number, scaled)
        scaled.send()
        store(scaled.receive())

    def leave_out():
        begin()
        call.leave_out(further, outs, number, product)

    if live is None:
        multiply()
    else:
        lax.cond(tile * COLUMNS < live[number], multiply, leave_out)
    cluster.release(smem["arrived"])


def only_live(live, number, first, tokens):
    """A function that sets those of 16 columns from `first` on to zero that are not live."""
    if live is None:
        return lambda values: values
    is_live = token_columns.are_before(live[number], first, tokens)
    return lambda values: jnp.where(is_live, values, 0.0)
