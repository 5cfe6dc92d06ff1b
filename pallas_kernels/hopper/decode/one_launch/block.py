"""What the functions of a thread block share: its operands, its memory, its part of the work."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import read
from pallas_kernels.hopper.decode.one_launch import lane, plan
from pallas_kernels.hopper.decode.one_launch.lane import LANES
from pallas_kernels.hopper.decode.one_launch.shape import GATE, UNITS, Shape

_MEETING = 8  # a named barrier that Mosaic GPU has no use for


@primitive
def meet(together) -> None:
    """Two warpgroups wait for each other; `together` is a barrier of both, for the twin.

    The instruction is a tenth of what waiting at such a barrier compiles to (`lane.keep_loop`).
    """
    del together

    @plgpu.inline_mgpu()
    def step(_):
        lane.ptx(f"bar.sync {_MEETING}, {2 * LANES};", has_side_effects=True, convergent=True)

    step()


@meet.in_jax
def _meet(together):
    plgpu.barrier_arrive(together)
    plgpu.barrier_wait(together)


class OfRows(NamedTuple):
    """What rows of the matrices are multiplied with, or what is added to them; None: nothing.

    Attributes:
      qkv: of query, key and value together, `[L, sum of N]`.
      out, down: `[L, D]`.
      activated: of each of `Operands.activated`, `[L, H]`.
      up: `[L, H]`.
    """

    qkv: Any
    out: Any
    activated: tuple
    up: Any
    down: Any


class Operands(NamedTuple):
    """References in GMEM.

    Attributes:
      words: int32 `[BUFFERS, words, 2]`, zeros but for exchange 0, the stream.
      table: of `Shape.table`, with the first sequence.
      scaled, squares: of the stream in front of the first layer; no squares with layer norms.
      qkv: three of `[L, N, D]`, bfloat16 or 8-bit floats.
      out: `[L, D, heads * size]`.
      head_scales: of the norms of queries and keys, `[L, size]` each; or None.
      activated: `[L, H, D]` each, what all rows are multiplied with: in a sparse block the gate
        projection, or the up projection without a gate; in a dense one, both.
      up: the up projection if only some of its rows are multiplied, else None.
      row_scales: of 8-bit floats, float32; none of `down`.
      biases: bfloat16.
      down: `[L, H, D]`.
      live: int32 `[L]`, neurons of a layer from this number on are never active; or None.
      scales: `[L, D]` each, of the norm in front of the block and of the one behind it.
      norm_biases: likewise, of layer norms; or None.
      k, v: the cache, `[L, B, capacity, kv_heads, size]`, or `Quantised` with scales
        `[L, B, kv_heads, capacity]`.
      lengths: int32 `[B]`.
      rope: cosine and sine, float32 `[B, rotated / 2]` each.
    """

    words: Any
    table: Any
    scaled: Any
    squares: Any
    qkv: tuple
    out: Any
    head_scales: Any
    activated: tuple
    up: Any
    row_scales: OfRows
    biases: OfRows
    down: Any
    live: Any
    scales: tuple
    norm_biases: tuple | None
    k: Any
    v: Any
    lengths: Any
    rope: tuple


class Unit(NamedTuple):
    """A unit of attention; int32 scalars.

    Attributes:
      sequence, stored: among those of the launch and of the cache.
      group, head: of query heads, and their key/value head.
      split: of them. The first one also has the new token, and merges all.
      start, length: the first stored token that the new one attends to, and the length of the
        sequence before it.
      first, end: of the stages of keys that the split has, maybe none.
    """

    sequence: jax.Array
    stored: jax.Array
    group: jax.Array
    head: jax.Array
    split: jax.Array
    start: jax.Array
    length: jax.Array
    first: jax.Array
    end: jax.Array


class Block(NamedTuple):
    """What a thread block's functions share.

    Attributes:
      shape: of the step.
      refs: its operands.
      smem: references to shared memory, by the names of `Shape.scratch_words`.
      rings: the stages as rows of a matrix, by the bytes of a number.
      kv_ring, down_ring: the stages as keys or values, and as rows of `down`.
      full, empty: barriers of the stages.
      together: the barrier of the two warpgroups that compute.
      wg: int32 scalar, the warpgroup.
      first, many: of each of `Shape.shares`, int32 scalars: where it begins, and how many it has.
      tokens: int32 scalar, the batch, which the compiler does not know: it unrolls loops whose end
        it knows (`lane.keep_loop`).
      before: int32 scalar, the sequences that the cache has in front of these.
      live: int32 scalar, the live neurons of the layer; None if all are.
    """

    shape: Shape
    refs: Operands
    smem: dict[str, Any]
    rings: dict[int, Any]
    kv_ring: Any
    down_ring: Any
    full: Any
    empty: Any
    together: Any
    wg: jax.Array
    first: list[jax.Array]
    many: list[jax.Array]
    tokens: jax.Array
    before: jax.Array
    live: jax.Array | None = None

    def of_layer(self, layer) -> "Block":
        """With this block's groups of neurons in a layer: all blocks share the live ones evenly.

        Each has one, maybe without a live neuron, as the others wait for what it posts.
        """
        if self.refs.live is None:
            return self
        shape, first, many = self.shape, [*self.first], [*self.many]
        live = jnp.clip(read(self.refs.live.at[pl.ds(layer, 1)]), 0, shape.neurons)
        of_layer = self._replace(first=first, many=many, live=live)
        first[GATE], end = plan.part(lax.axis_index("block"), shape.blocks, of_layer.groups)
        many[GATE] = end - first[GATE]
        return of_layer

    @property
    def groups(self):
        """Groups of `plan.ROWS` neurons that all blocks have together."""
        if self.live is None:
            return self.shape.neurons // plan.ROWS
        return jnp.maximum(pl.cdiv(self.live, plan.ROWS), self.shape.blocks)

    def meet(self) -> None:
        """The warpgroups that compute wait for each other."""
        meet(self.together)

    def thread(self) -> jax.Array:
        """The number of each lane among the 256 that compute."""
        return lane.numbers() + LANES * self.wg

    def unit(self, i) -> Unit:
        """This block's i-th unit of attention."""
        shape, number = self.shape, self.first[UNITS] + i
        of_all, split = lax.div(number, shape.key_splits), lax.rem(number, shape.key_splits)
        sequence, group = lax.div(of_all, shape.groups), lax.rem(of_all, shape.groups)
        head = lax.div(group, shape.groups // shape.kv_heads)
        length = read(self.refs.lengths.at[pl.ds(sequence, 1)])
        start = jnp.int32(0)
        if shape.window is not None:
            start = jnp.maximum(length + 1 - shape.window, 0)
        skipped = lax.div(start, shape.keys)
        first, end = plan.part(split, shape.key_splits, pl.cdiv(length, shape.keys) - skipped)
        stored = self.before + sequence
        return Unit(
            sequence, stored, group, head, split, start, length, skipped + first, skipped + end
        )
