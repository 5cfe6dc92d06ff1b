"""All layers of a decoding step in one launch.

A thread block runs on each SM from the first layer to the last. One warpgroup copies what the block
reads, in the order in which it will be needed, through a ring in shared memory that runs ahead of
the other two, across phases and layers: it waits for room alone, never for activations. The other
two multiply, and exchange what all blocks need (`exchange`). A layer is seven exchanges:

    1 query, key, value   2 what splits of the keys attend to, if there are any
    3 what is attended to   4 the stream behind `out`
    sparse: 5 which gates are open   6 the activations of these
    dense: 5 all activations   6 parts of the product with `down`
    7 the stream behind the feed-forward block

An exchange reuses the memory of the one sixteen before, which is of two layers before or more. All
blocks post exchange 5, and have then read all that they need of the layers before. No block gets
to the next layer before that: the others' masks are missing, or parts of the stream.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common.dependent_launch import await_previous
from pallas_kernels.hopper.common.scalars import read
from pallas_kernels.hopper.decode.one_launch import dense_rows, open_rows
from pallas_kernels.hopper.decode.one_launch.block import Block, Operands
from pallas_kernels.hopper.decode.one_launch.copies import copy_all
from pallas_kernels.hopper.decode.one_launch.heads import attend
from pallas_kernels.hopper.decode.one_launch.norms import Norm, factor_of
from pallas_kernels.hopper.decode.one_launch.shape import GATE, OUT, QKV, Shape
from pallas_kernels.hopper.decode.one_launch.stream import product, publish
from pallas_kernels.hopper.decode.one_launch.tokens import first_stream, last_stream, receive

OF_LAYER = 7  # exchanges


def kernel(operands: Operands, outs, scratch, *, shape: Shape, eps: float) -> None:
    """See the module; `outs` are x, scaled and squares of the stream behind the last layer, or x
    alone with layer norms."""
    await_previous()
    number, wg = lax.axis_index("block"), lax.axis_index("wg")
    columns = operands.table.shape[1]
    *place, tokens, before = (read(operands.table.at[number, pl.ds(i, 1)]) for i in range(columns))
    *rings, kv_ring, down_ring = scratch.pop("ring")
    scratch["parts"], scratch["columns" if shape.is_sparse else "x"] = scratch["parts"]
    full, empty, together = (scratch.pop(name) for name in ("full", "empty", "together"))
    block = Block(
        shape,
        operands,
        scratch,
        dict(zip((2, 1), rings, strict=True)),
        kv_ring,
        down_ring,
        full,
        empty,
        together,
        wg,
        place[::2],
        place[1::2],
        tokens,
        before,
    )

    def copy():
        plgpu.set_max_registers(24, action="decrease")
        copy_all(block)

    def compute():
        plgpu.set_max_registers(240, action="increase")
        _compute(block, outs, eps)

    lax.cond(wg == 2, copy, compute)


def _compute(block: Block, outs, eps: float) -> None:
    shape, scales, norm_biases = block.shape, block.refs.scales, block.refs.norm_biases
    if shape.is_sparse:
        open_rows.clear(block.smem["hidden"], block.thread())
    later = eps if norm_biases is None else None  # a layer norm comes before the product
    of_qkv, of_gate = (factor_of(block, which, later) for which in (QKV, GATE))

    def norm(which, layer):
        bias = None if norm_biases is None else norm_biases[which].at[layer]
        return Norm(scales[which].at[layer], bias, eps)

    def layer(layer, carry):
        number, tokens = carry
        before = layer * OF_LAYER  # the exchange that has the stream
        of_layer = block.of_layer(layer)
        row_scales, biases = (
            jax.tree.map(lambda of: of.at[layer], of_rows)
            for of_rows in (block.refs.row_scales, block.refs.biases)
        )
        functions = publish(
            block, before + 1, shape.projected,
            factor=of_qkv, scales=row_scales.qkv, bias=biases.qkv,
        )  # fmt: skip
        number = product(block, QKV, tokens, number, functions)
        number = attend(block, layer, before + 1, number, eps)
        tokens = receive(block, before + 3, OUT)
        functions = publish(
            block, before + 4, shape.width,
            factor=factor_of(block, OUT, None), scales=row_scales.out, bias=biases.out,
            stream=before,
        )  # fmt: skip
        number = product(block, OUT, tokens, number, functions)
        tokens = receive(block, before + 4, GATE, norm(0, layer))
        if shape.is_sparse:
            functions = open_rows.keep_masks(of_layer, before + 5, of_gate, row_scales, biases)
            number = product(of_layer, GATE, tokens, number, functions)
            open_rows.add(of_layer, layer, tokens, before + 5, of_gate, row_scales, biases)
        else:
            functions = dense_rows.post_hidden(of_layer, before + 5, of_gate, row_scales, biases)
            matrices = 2 if shape.gated else 1
            number = product(of_layer, GATE, tokens, number, functions, matrices)
            number = dense_rows.add(of_layer, before + 5, number, biases.down)
        return number, receive(block, before + 7, QKV, norm(1, layer))

    lax.fori_loop(0, shape.layers, layer, (jnp.int32(0), first_stream(block)))
    pl.when(lax.axis_index("block") == 0)(lambda: last_stream(block, outs, shape.layers * OF_LAYER))
