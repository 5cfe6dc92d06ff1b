"""The launch."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import params
from pallas_kernels.hopper.common.primitives import interpretation
from pallas_kernels.hopper.common.support import sm_count
from pallas_kernels.hopper.common.tiles import TILED, tiled
from pallas_kernels.hopper.decode.one_launch.attention import transforms
from pallas_kernels.hopper.decode.one_launch.block import OfRows, Operands
from pallas_kernels.hopper.decode.one_launch.exchange import BUFFERS, as_placed
from pallas_kernels.hopper.decode.one_launch.kernel import kernel
from pallas_kernels.hopper.decode.one_launch.key_products import room_of
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import BLOCK_WARPS, STAGE_WORDS, TOKENS
from pallas_kernels.hopper.decode.one_launch.shape import (
    DOWN_COLUMNS,
    DOWN_ROWS,
    LEAST_SLOTS,
    MOST_TOKEN_WORDS,
    Shape,
)
from pallas_kernels.layers import Layers
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import E4M3, Cache, Operand, Quantised, values_of


def has_room(
    *,
    batch: int,
    capacity: int,
    width: int,
    neurons: int,
    heads: int,
    kv_heads: int,
    size: int,
    gated: bool,
    is_sparse: bool,
    in_8_bits: tuple[bool, bool, bool, bool],
) -> bool:
    """Whether a launch has room: registers for the tokens, shared memory for a ring.

    Args:
      batch: its sequences.
      capacity: of the cache.
      width, neurons: D and H.
      heads, kv_heads, size: of attention.
      gated, is_sparse: of the feed-forward blocks.
      in_8_bits: whether matrices of query, key and value are 8-bit floats, and `out`, and gate and
        up, and the cache.
    """
    qkv, out, inner, stored = (1 if is_8_bit else 2 for is_8_bit in in_8_bits)
    shape = Shape(
        min(sm_count(), neurons // ROWS), 1, batch, capacity, width, neurons, heads, kv_heads, size,
        gated, is_sparse, None, (qkv, out, inner), size, None, 1.0, stored,
    )  # fmt: skip
    return _has_room(shape)


@cache  # a model asks again and again
def _has_room(shape: Shape) -> bool:
    return shape.token_words <= MOST_TOKEN_WORDS and shape.slots >= LEAST_SLOTS


def decode_layers(
    stream: Stream,
    layers: Layers,
    k_cache: Cache,
    v_cache: Cache,
    lengths: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    launches: int,
    **options: Any,
) -> Stream:
    """All layers for one new token of each of B sequences.

    Args:
      stream: of the tokens, bfloat16, M of them: B rounded up to a multiple of 8. D is a multiple
        of 64, at least 512, or 1024 with 8-bit weights.
      layers: their weights, bfloat16, or `Quantised` but for `down`: those of query, key and value
        together, and those of gate and up. Query, key, value and `out` are read by rows of what
        they give, so those in bfloat16 are transposed first. That copies nothing if they lie so in
        memory, as `jax.experimental.layout.Layout((0, 2, 1))` has them. `heads * size` is at least
        what D is, H a multiple of 64 and at least 16 times the number of SMs.
      k_cache, v_cache: `jax.Ref`s, bfloat16 `[L, B, capacity, kv_heads, size]`, which get keys and
        values; or `Quantised` ones, with scales `[L, B, kv_heads, capacity]`. The size is a
        multiple of 16, up to 256, and of 32 in 8 bits.
      lengths: int32 `[B]`, of the sequences before.
      rope: cosine and sine, float32 `[B, n]` each, n a multiple of 2 and at most size / 2: features
        i and i + n of a head are rotated.
      launches, options: as of `DecodeKernels.decode_layers`.

    Returns:
      The stream in front of the norm that follows the last layer.
    """
    launch = jax.jit(partial(_launch, **options))  # traced once for all with as many sequences
    at_once = -(-len(stream.x) // (TOKENS * launches)) * TOKENS

    def part(first):
        these = slice(first, first + at_once)
        cos, sin = rope
        return launch(
            jax.tree.map(lambda rows: rows[these], stream), layers, k_cache, v_cache,
            lengths[these], (cos[these], sin[these]), jnp.int32(first),
        )  # fmt: skip

    parts = [part(first) for first in range(0, len(lengths), at_once)]
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)


def _launch(
    stream, layers, k_cache, v_cache, lengths, rope, first,
    *, heads, kv_heads, eps, rectifier, is_sparse, window=None, residual_scale=1.0,
):  # fmt: skip
    """`decode_layers` for some sequences, `first` of the cache and those behind it."""
    mlp = layers.mlp
    number, _, capacity, _, size = k_cache.shape
    _, neurons, width = mlp.down.shape
    shape = Shape(
        min(sm_count(), neurons // ROWS), number, len(lengths), capacity, width, neurons, heads,
        kv_heads, size, mlp.gate is not None, is_sparse, rectifier,
        (_itemsize(layers.qkv[0]), _itemsize(layers.out), _itemsize(mlp.up)),
        2 * rope[0].shape[1], window, residual_scale, _itemsize(k_cache),
    )  # fmt: skip
    operands = _operands(shape, stream, layers, k_cache, v_cache, lengths, rope, first)
    flat, structure = jax.tree.flatten(operands)

    def body(*refs, **scratch):
        given = jax.tree.unflatten(structure, refs[: len(flat)])
        kernel(given, refs[len(flat) :], scratch, shape=shape, eps=eps)

    squares = jax.ShapeDtypeStruct((len(stream.x), BLOCK_WARPS), jnp.float32)
    is_centred = layers.norm_biases is not None
    outs = (stream.x,) if is_centred else (*stream[:2], squares)
    call = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outs),
        scratch_types=_scratch(shape),
        **_grid(shape.blocks),
        num_threads=3,
        thread_name="wg",
        kernel_name="decode_step",
        compiler_params=params.UNORDERED,
    )
    x, *in_front_of_norm = call(*flat)
    if is_centred:
        last = (of[1][-1] for of in (layers.scales, layers.norm_biases))
        return Stream.of(x, *last, eps=eps)
    return Stream(x, *in_front_of_norm)


def _operands(shape: Shape, stream, layers, k_cache, v_cache, lengths, rope, first) -> Operands:
    batch, mlp = shape.batch, layers.mlp
    x = stream.x.reshape(len(stream.x), shape.width // 2, 2)
    x = as_placed(jax.lax.bitcast_convert_type(x, jnp.int32))
    words = jnp.zeros((BUFFERS, shape.words, 2), jnp.int32).at[0, : len(x), 0].set(x)
    squares = None
    if stream.squares is not None:
        squares = jnp.sum(stream.squares, axis=1, keepdims=True)[:batch]
        # A load takes the first of eight sums; the others are of no warp.
        squares = jnp.pad(squares, ((0, 0), (0, 3)))
    read_whole = 1 if shape.is_sparse else len(mlp.inner)  # of what tokens are multiplied with
    activated, others = mlp.inner[:read_whole], mlp.inner[read_whole:]
    up = others[0] if others else None
    inner_biases = layers.inner_biases or len(mlp.inner) * (None,)
    of_qkv = [scales for w in layers.qkv if (scales := _scales(w)) is not None]
    row_scales = OfRows(
        jnp.concatenate(of_qkv, axis=1) if of_qkv else None,
        _scales(layers.out), tuple(map(_scales, activated)), _scales(up), None,
    )  # fmt: skip
    biases = OfRows(
        layers.qkv_bias, layers.out_bias, tuple(inner_biases[:read_whole]),
        inner_biases[-1] if others else None, layers.down_bias,
    )  # fmt: skip
    return Operands(
        words, jnp.asarray(shape.table).at[:, -1].set(first), stream.scaled[:batch], squares,
        tuple(map(_by_rows, layers.qkv)), _by_rows(layers.out), layers.head_scales,
        tuple(map(values_of, activated)), None if up is None else values_of(up), row_scales, biases,
        mlp.down, mlp.live, layers.scales, layers.norm_biases, k_cache, v_cache, lengths, rope,
    )  # fmt: skip


def _by_rows(matrix: Operand) -> jax.Array:
    return matrix.values if isinstance(matrix, Quantised) else jnp.swapaxes(matrix, 1, 2)


def _itemsize(matrix: Operand) -> int:
    return 1 if isinstance(matrix, Quantised) else 2


def _scales(matrix: Operand | None) -> jax.Array | None:
    return matrix.scale[..., 0] if isinstance(matrix, Quantised) else None


def _grid(blocks: int) -> dict:
    """The interpreter runs the blocks of a cluster side by side, and clusters one by one."""
    if interpretation() is None:
        return dict(grid=(blocks,), grid_names=("block",))
    return dict(grid=(1,), grid_names=("all",), cluster=(blocks,), cluster_names=("block",))


def _scratch(shape: Shape) -> dict:
    smem, stored = plgpu.SMEM, jnp.bfloat16 if shape.stored_bytes == 2 else E4M3
    stages = {
        "ring": plgpu.RefUnion(
            smem((shape.slots, ROWS, 2 * STAGE_WORDS), jnp.bfloat16, transforms=TILED),
            smem((shape.slots, ROWS, 4 * STAGE_WORDS), E4M3, transforms=tiled(E4M3)),
            smem(
                (shape.slots, shape.keys, room_of(shape.size)),
                stored,
                transforms=transforms(shape.size, stored),
            ),
            smem((shape.slots, DOWN_ROWS, DOWN_COLUMNS), jnp.bfloat16, transforms=TILED),
        ),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=shape.slots),
        "empty": plgpu.Barrier(num_arrivals=2, num_barriers=shape.slots),
        "together": plgpu.Barrier(num_arrivals=2),
    }
    words = {
        name: smem(size, jnp.dtype(kind)) for name, (size, kind) in shape.scratch_words.items()
    }
    there = words.pop("columns" if shape.is_sparse else "x")
    words["parts"] = plgpu.RefUnion(words["parts"], there)
    return stages | words
