"""A kernel that multiplies up to 64 tokens with matrices that are read once, and finishes the sums.

A block lets the next kernel start at once and asks for its part of the matrix before it waits for
the kernel before it (programmatic dependent launch), so that memory does not stand still between
kernels. Matrices must therefore be finished earlier: inputs of the program, not results of the
computations just before.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.device import cluster, token_columns, versions
from pallas_kernels.hopper.frames.token_ring import COLUMNS, PARTS, Matrices, Product, TokenRing


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
      waits_first: whether the next kernel starts only after this one has waited for the kernel
        before, so that it can read that one's results at once.
      live: index of the further operand that says how many columns of each layer's matrices are
        multiplied, in whole tiles. None if there is none; the operand may be None, too.
      leave_out: called for other tiles, instead of `finish`.
    """

    name: str
    ring: TokenRing
    finish: Callable
    waits_first: bool = False
    live: int | None = None
    leave_out: Callable = store_zeros

    def __call__(self, x, weights, layer, operands, outs):
        matrices = Matrices.of(weights, side_by_side=self.ring.side_by_side)
        read = [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in weights]  # of one layer
        flops = 2 * len(x) * sum(w.size for w in read)
        kernel = plgpu.kernel(
            functools.partial(_kernel, call=self, count=len(operands)),
            out_type=outs,
            scratch_types=dict(smem=self.ring.scratch()),
            grid=(self.ring.tiles,),
            grid_names=("tile",),
            cluster=(PARTS,),
            cluster_names=("part",),
            kernel_name=self.name,
            **versions.cost(flops, (x, *read, *outs)),
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
            ),
        )
        return kernel(x, layer, matrices, *operands)


def _kernel(x, layer, matrices, *refs, smem, call, count):
    (operands, outs), number = (refs[:count], refs[count:]), layer[0]
    tile = lax.axis_index("tile")
    product = Product(call.ring, x, matrices, number, call.ring.sums * (tile,), smem)
    cluster.prepare(smem["arrived"])
    live = None if call.live is None else operands[call.live]

    def begin():
        if not call.waits_first:
            plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        if call.waits_first:
            plgpu.griddepcontrol_launch_dependents()

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
        store = call.finish(operands, outs, number, scaled)
        scaled.send()
        store(scaled.receive())

    def leave_out():
        begin()
        call.leave_out(operands, outs, number, product)

    if live is None:
        multiply()
    else:
        lax.cond(tile * COLUMNS < live[number], multiply, leave_out)


def only_live(live, number, first, tokens):
    """A function that sets those of 16 columns from `first` on to zero that are not live."""
    if live is None:
        return lambda values: values
    is_live = token_columns.are_before(live[number], first, tokens)
    return lambda values: jnp.where(is_live, values, 0.0)
