"""All layers of a decoding step in one launch.

A thread block runs on each SM from the first layer to the last. One warpgroup copies what the block
reads, in the order in which it will be needed, through a ring in shared memory that runs ahead of
the other two, across phases and layers: it waits for room alone, never for activations. The other
two multiply, and exchange what all blocks need (`exchange`). A layer is six exchanges:

    1 query, key, value   2 what is attended to   3 the stream behind `out`
    4 which gates are open   5 the activations of these   6 the stream behind the block

An exchange reuses the memory of the one eight before. Whoever posts number n has read all that it
needs up to n - 3, and no block gets two ahead of one that has not posted exchange 4, which all do.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common.scalars import read
from pallas_kernels.hopper.step import attention, exchange, lane, open_rows, products
from pallas_kernels.hopper.step.lane import LANES
from pallas_kernels.hopper.step.plan import ROWS
from pallas_kernels.hopper.step.products import BLOCK_WARPS, FEATURES, TOKENS
from pallas_kernels.hopper.step.shape import Shape

FLIGHT = 2  # stages that are on their way; more would keep what blocks exchange waiting
OF_LAYER = 6  # exchanges
UNITS, QKV, OUT, GATE = range(4)  # of `Shape.shares`


class Operands(NamedTuple):
    """References in GMEM.

    Attributes:
      words: int32 `[BUFFERS, words, 2]`, zeros but for exchange 0, the stream.
      table: of `Shape.table`.
      scaled, squares: of the stream in front of the first layer.
      qkv: three of `[L, N, D]`.
      out: `[L, D, heads * size]`.
      gate, up, down: `[L, H, D]`; without a gate projection, `gate` is that of `up`, and `up` None.
      scales: `[L, D]` each, of the norm in front of the block and of the one behind it.
      k, v: the cache, `[L, B, capacity, kv_heads, size]`.
      lengths: int32 `[B]`.
      rope: cosine and sine, float32 `[B, size / 2]` each.
    """

    words: Any
    table: Any
    scaled: Any
    squares: Any
    qkv: tuple
    out: Any
    gate: Any
    up: Any
    down: Any
    scales: tuple
    k: Any
    v: Any
    lengths: Any
    rope: tuple


class Block(NamedTuple):
    """What a thread block's functions share.

    Attributes:
      shape: of the step.
      refs: its operands.
      smem: references to shared memory, by the names of `Shape.scratch_words`.
      ring, kv_ring: the stages, as parts of matrices and as keys or values.
      full, empty: barriers of the stages.
      together: the barrier of the two warpgroups that compute.
      wg: int32 scalar, the warpgroup.
      first, many: of each of `Shape.shares`, int32 scalars: where it begins, and how many it has.
    """

    shape: Shape
    refs: Operands
    smem: dict[str, Any]
    ring: Any
    kv_ring: Any
    full: Any
    empty: Any
    together: Any
    wg: jax.Array
    first: list[jax.Array]
    many: list[jax.Array]

    def meet(self) -> None:
        """The warpgroups that compute wait for each other."""
        plgpu.barrier_arrive(self.together)
        plgpu.barrier_wait(self.together)

    def thread(self) -> jax.Array:
        """The number of each lane among the 256 that compute."""
        return lane.numbers() + LANES * self.wg


def kernel(operands: Operands, outs, scratch, *, shape: Shape, eps: float) -> None:
    """See the module; `outs` are x, scaled and squares of the stream behind the last layer."""
    block_number, wg = lax.axis_index("block"), lax.axis_index("wg")
    place = [read(operands.table.at[block_number, pl.ds(i, 1)]) for i in range(8)]
    ring, kv_ring = scratch.pop("ring")
    full, empty, together = (scratch.pop(name) for name in ("full", "empty", "together"))
    block = Block(
        shape, operands, scratch, ring, kv_ring, full, empty, together, wg, place[::2], place[1::2]
    )

    def copy():
        plgpu.set_max_registers(40, action="decrease")
        _copy(block)

    def compute():
        plgpu.set_max_registers(232, action="increase")
        _compute(block, outs, block_number, eps)

    lax.cond(wg == 2, copy, compute)


def _copy(block: Block) -> None:
    """Copies all stages of this block, in order."""
    shape, refs = block.shape, block.refs

    def room(number):
        slot = lax.rem(number, shape.slots)

        @pl.when(number >= shape.slots)
        def _():
            plgpu.barrier_wait(block.empty.at[slot])

        @pl.when(number >= FLIGHT)
        def _():
            plgpu.barrier_wait(block.full.at[lax.rem(number - FLIGHT, shape.slots)])

        return slot

    def copy(matrix, layer, row, stages, number):
        @pl.loop(0, stages)
        def _(stage):
            slot = room(number + stage)
            # Past the last feature, a copy fills in zeros.
            part = matrix.at[layer, pl.ds(row, ROWS), pl.ds(stage * FEATURES, FEATURES)]
            plgpu.copy_gmem_to_smem(part, block.ring.at[slot], block.full.at[slot])

        return number + stages

    def groups(which, layer, number, one):
        def group(i, number):
            return one(layer, (block.first[which] + i) * ROWS, number)

        return lax.fori_loop(0, block.many[which], group, number)

    def of_qkv(layer, row, number):
        stages, before = stages_of(shape.width), 0
        for matrix in refs.qkv:
            rows = matrix.shape[1]
            is_here = (row >= before) & (row < before + rows)

            @pl.when(is_here)
            def _(matrix=matrix, before=before):
                copy(matrix, layer, row - before, stages, number)

            before += rows
        return number + stages

    def of_out(layer, row, number):
        return copy(refs.out, layer, row, stages_of(shape.attended), number)

    def of_gate(layer, row, number):
        return copy(refs.gate, layer, row, stages_of(shape.width), number)

    def unit(layer, number, i):
        sequence, head, length = _unit(block, i)

        def pair(j, number):
            for cache in (refs.k, refs.v):
                slot = room(number)
                keys = cache.at[layer, sequence, pl.ds(j * shape.keys, shape.keys), head]
                plgpu.copy_gmem_to_smem(keys, block.kv_ring.at[slot], block.full.at[slot])
                number += 1
            return number

        return lax.fori_loop(0, pl.cdiv(length, shape.keys), pair, number)

    def layer(layer, number):
        number = groups(QKV, layer, number, of_qkv)
        number = lax.fori_loop(0, block.many[UNITS], lambda i, n: unit(layer, n, i), number)
        number = groups(OUT, layer, number, of_out)
        return groups(GATE, layer, number, of_gate)

    lax.fori_loop(0, shape.layers, layer, jnp.int32(0))


def stages_of(features: int) -> int:
    """Stages of a group of rows with so many features."""
    return -(-features // FEATURES)


def _unit(block: Block, i):
    """Sequence, key/value head and length of this block's i-th unit of attention."""
    number, heads = block.first[UNITS] + i, block.shape.kv_heads
    sequence, head = lax.div(number, heads), lax.rem(number, heads)
    return sequence, head, read(block.refs.lengths.at[pl.ds(sequence, 1)])


def _compute(block: Block, outs, block_number, eps: float) -> None:
    shape, refs, smem = block.shape, block.refs, block.smem
    open_rows.clear(smem["hidden"], block.thread())
    first_stream(block)

    def layer(layer, number):
        before = layer * OF_LAYER  # the exchange that has the stream
        sums_of = dict(batch=shape.batch, inverse=lambda token: inverse_rms(block, token, eps))
        number = product(block, QKV, shape.width, number, publish(block, before + 1, **sums_of))
        number = attend(block, layer, before + 1, number)
        receive(block, before + 2, shape.attended, lambda pair: None)
        add = publish(block, before + 3, batch=shape.batch, stream=before)
        number = product(block, OUT, shape.attended, number, add)
        receive(block, before + 3, shape.width, scale_of(refs.scales[0], layer))
        keep = open_rows.keep_masks(block, before + 4, sums_of["inverse"])
        number = product(block, GATE, shape.width, number, keep)
        open_rows.add(block, layer, before + 4, sums_of["inverse"], publish)
        receive(block, before + 6, shape.width, scale_of(refs.scales[1], layer))
        return number

    lax.fori_loop(0, shape.layers, layer, jnp.int32(0))

    @pl.when(block_number == 0)
    def _():
        last_stream(block, outs)


def product(block: Block, which: int, features: int, number, functions):
    """Multiplies this block's rows.

    Args:
      block: the block.
      which: of `Shape.shares`.
      features: of a row.
      number: of the next stage; the result is that of the one after the product's.
      functions: for each group of rows, `prepare(row)` is called before its product, and
        `finish(i, row, part, prepared)` behind it.
    """
    prepare, finish = functions
    stages = stages_of(features)
    block.meet()  # the tokens are in shared memory
    tokens = [
        products.tokens_of_stage(
            block.smem["x"], s, block.wg, batch=block.shape.batch, features=features
        )
        for s in range(stages)
    ]

    def group(i, number):
        row = (block.first[which] + i) * ROWS
        prepared = prepare(row)
        sums = products.zeros()
        for stage in range(stages):
            slot = lax.rem(number + stage, block.shape.slots)
            plgpu.barrier_wait(block.full.at[slot])
            sums = products.add_product(block.ring.at[slot], tokens[stage], sums, block.wg)
            plgpu.barrier_arrive(block.empty.at[slot])
        products.put(block.smem["parts"], lax.rem(i, 2), sums, block.wg)
        block.meet()
        finish(i, row, lax.rem(i, 2), prepared)
        return number + stages

    number = lax.fori_loop(0, block.many[which], group, number)
    block.meet()  # nobody reads the tokens any more
    return number


def publish(block: Block, exchange_number, *, batch: int, inverse=None, stream=None):
    """`product`'s functions that post the sums of rows: a lane has two rows of a token.

    Args:
      block: the block.
      exchange_number: where they are posted.
      batch: tokens.
      inverse: a function of tokens whose result the sums are multiplied with.
      stream: the exchange that has what they are added to, which the block has taken before.
    """
    features = block.shape.projected if stream is None else block.shape.width
    words, parts = block.refs.words, block.smem["parts"]

    def places(row):
        number = lane.numbers()
        token, pair = number >> 3, number & 7
        place = jnp.where(token < batch, token * (features // 2) + row // 2 + pair, -1)
        return token, pair, place

    def prepare(row):
        return () if stream is None else exchange.read(words, stream, places(row)[2])

    def finish(i, row, part, before):
        del i

        @pl.when(block.wg == 0)
        def _():
            token, pair, place = places(row)
            low, high = (
                products.sum_of_warps(
                    parts, part, jnp.where(place < 0, -1, (2 * pair + j) * TOKENS + token)
                )
                for j in (0, 1)
            )
            if inverse is not None:
                factor = inverse(jnp.where(place < 0, 0, token))
                low, high = low * factor, high * factor
            if stream is not None:
                old = lane.unpack(before)
                low, high = low + old[0], high + old[1]
            exchange.post(words, exchange_number, place, lane.pack(low, high))

    return prepare, finish


def receive(block: Block, exchange_number, features: int, scale) -> None:
    """Takes tokens into shared memory; with a scale, also the squares that their norm needs."""
    shape, thread = block.shape, block.thread()
    pairs = [thread + 2 * LANES * i for i in range(-(-features // 2 // (2 * LANES)))]
    scales = [scale(pair_of(pair, features)) for pair in pairs]
    block.meet()  # nobody reads what was there
    for first in range(0, shape.batch, 4):  # so that the words fit into registers
        tokens = range(first, min(first + 4, shape.batch))
        places = [
            jnp.where(pair < features // 2, token * (features // 2) + pair, -1)
            for token in tokens
            for pair in pairs
        ]
        words = exchange.take(block.refs.words, exchange_number, places)
        for i, token in enumerate(tokens):
            mine = words[i * len(pairs) : (i + 1) * len(pairs)]
            put_token(block, token, pairs, mine, scales, features)


def put_token(block: Block, token: int, pairs, words, scales, features: int) -> None:
    """Stores a token, scaled for its norm, and the sums of its squares by warps."""
    squares = lane.full(0.0, jnp.float32)
    row = token * block.shape.row_words
    for pair, word, scale in zip(pairs, words, scales, strict=True):
        if scale is not None:
            low, high = lane.unpack(word)
            squares += low * low + high * high
            by = lane.unpack(scale)
            word = lane.pack(low * by[0], high * by[1])
        places = jnp.where(pair < features // 2, row + pair, -1)
        lane.scatter(block.smem["x"], places, word)
    if scales[0] is not None:
        total, thread = lane.warp_sum(squares), block.thread()
        places = jnp.where(thread & 31 == 0, token * BLOCK_WARPS + (thread >> 5), -1)
        lane.scatter(block.smem["squares"], places, total)


def pair_of(pair, features: int):
    """The pair, or -1 past the last."""
    return jnp.where(pair < features // 2, pair, -1)


def scale_of(scales, layer):
    """A function of pairs of features that loads a layer's scales."""
    return lambda pair: lane.load(scales.at[layer], pair)[0]


def inverse_rms(block: Block, token, eps: float):
    """Of each lane's token."""
    total = lane.gather(block.smem["squares"], token * BLOCK_WARPS)
    for warp in range(1, BLOCK_WARPS):
        total += lane.gather(block.smem["squares"], token * BLOCK_WARPS + warp)
    return lax.rsqrt(total / block.shape.width + eps)


def first_stream(block: Block) -> None:
    """Puts the tokens in front of the first layer into shared memory."""
    shape, thread = block.shape, block.thread()
    features = shape.width // 2
    for token in range(shape.batch):
        for i in range(-(-features // (2 * LANES))):
            pair = thread + 2 * LANES * i
            word = lane.load(block.refs.scaled.at[token], pair_of(pair, shape.width))[0]
            places = jnp.where(pair < features, token * shape.row_words + pair, -1)
            lane.scatter(block.smem["x"], places, word)
        places = jnp.where(thread == 0, 0, -1)
        total = lax.bitcast_convert_type(
            lane.load(block.refs.squares.at[token], places)[0], jnp.float32
        )
        places = jnp.where(thread < BLOCK_WARPS, token * BLOCK_WARPS + thread, -1)
        lane.scatter(block.smem["squares"], places, total)


def last_stream(block: Block, outs) -> None:
    """Stores the stream behind the last layer."""
    shape, thread = block.shape, block.thread()
    x, scaled, squares = outs
    features = shape.width // 2
    block.meet()
    for token in range(shape.batch):
        for i in range(-(-features // (2 * LANES))):
            pair = pair_of(thread + 2 * LANES * i, shape.width)
            old = jnp.where(pair < 0, -1, token * features + pair)
            word = exchange.take(block.refs.words, shape.layers * OF_LAYER, [old])[0]
            lane.store(x.at[token], pair, word)
            mine = jnp.where(pair < 0, -1, token * shape.row_words + pair)
            lane.store(scaled.at[token], pair, lane.gather(block.smem["x"], mine))
        place = jnp.where(thread < BLOCK_WARPS, thread, -1)
        mine = jnp.where(place < 0, -1, token * BLOCK_WARPS + place)
        total = lane.gather(block.smem["squares"], mine)
        lane.store(squares.at[token], place, lax.bitcast_convert_type(total, jnp.int32))


def attend(block: Block, layer, exchange_number, number):
    """What this block's units attend to; their keys and values also go to the cache."""
    shape, smem = block.shape, block.smem

    def unit(i, number):
        sequence, head, length = _unit(block, i)
        place_new(block, layer, exchange_number, sequence, head, length)
        block.meet()
        q = attention.queries(smem["q"], shape.size)

        def stage(j, carry):
            number, state = carry
            slots = [lax.rem(number + k, shape.slots) for k in (0, 1)]
            for slot in slots:
                plgpu.barrier_wait(block.full.at[slot])
            state = attention.attend(
                *(block.kv_ring.at[slot] for slot in slots),
                q, attention.State(*state), length - j * shape.keys, block.wg, size=shape.size,
            )  # fmt: skip
            for slot in slots:
                plgpu.barrier_arrive(block.empty.at[slot])
            return number + 2, tuple(state)

        start = number, tuple(attention.State.empty())
        steps = pl.cdiv(length, shape.keys)
        number, state = lax.fori_loop(0, steps, stage, start)
        put_state(block, attention.State(*state))
        block.meet()
        add_new(block, exchange_number + 1, sequence, head)
        block.meet()  # before the next unit's query comes
        return number

    return lax.fori_loop(0, block.many[UNITS], unit, number)


def place_new(block: Block, layer, exchange_number, sequence, head, length) -> None:
    """Rotates query and key of the new token; `q` gets them and the value, the cache the latter.

    A lane has two features of a vector and their partners in its second half.
    """
    shape, refs, smem = block.shape, block.refs, block.smem
    quarter = shape.size // 4
    for start in range(0, (shape.group + 2) * quarter, 2 * LANES):
        index = block.thread() + start
        shift = quarter.bit_length() - 1
        vector, j = index >> shift, index & (quarter - 1)
        is_there = vector < shape.group + 2
        is_key, is_value = vector == shape.group, vector == shape.group + 1
        of_query = head * shape.group + vector
        stored = jnp.where(is_key, shape.heads, shape.heads + shape.kv_heads) + head
        of = jnp.where(is_key | is_value, stored, of_query)
        place = sequence * (shape.projected // 2) + of * (shape.size // 2) + j
        places = [jnp.where(is_there, place + k, -1) for k in (0, quarter)]
        turn = jnp.where(is_there, sequence * (shape.size // 2) + 2 * j, -1)
        cos, sin = (
            [lax.bitcast_convert_type(one, jnp.float32) for one in lane.load(table, turn, 2)]
            for table in refs.rope
        )
        a, b = exchange.take(refs.words, exchange_number, places)
        (a0, a1), (b0, b1) = lane.unpack(a), lane.unpack(b)
        low = lane.pack(a0 * cos[0] - b0 * sin[0], a1 * cos[1] - b1 * sin[1])
        high = lane.pack(b0 * cos[0] + a0 * sin[0], b1 * cos[1] + a1 * sin[1])
        low, high = jnp.where(is_value, a, low), jnp.where(is_value, b, high)
        row = vector * (shape.size // 2 + 4) + j
        for k, word in ((0, low), (quarter, high)):
            lane.scatter(smem["q"], jnp.where(is_there, row + k, -1), word)
            for cache, is_its in ((refs.k, is_key), (refs.v, is_value)):
                slot = cache.at[layer, sequence, length, head]
                lane.store(slot, jnp.where(is_its & is_there, j + k, -1), word)


def put_state(block: Block, state: attention.State) -> None:
    """Stores what each warp knows."""
    shape, smem, thread = block.shape, block.smem, block.thread()
    key_tiles = 512 // shape.size
    warp, head, quad = thread >> 5, (thread >> 2) & 7, thread & 3
    tile, features = warp & (key_tiles - 1), (warp >> (key_tiles.bit_length() - 1)) * 64
    is_there = head < shape.group
    row = tile * shape.group + head
    for i, value in enumerate(state.values):
        feature = features + 8 * (i // 2) + 2 * quad + i % 2
        lane.scatter(smem["values"], jnp.where(is_there, row * shape.size + feature, -1), value)
    total = attention.sum_of_quad(state.total)
    is_one = is_there & (quad == 0) & (features == 0)
    for i, value in enumerate((state.top, total)):
        lane.scatter(smem["tops"], jnp.where(is_one, 2 * row + i, -1), value)


def add_new(block: Block, exchange_number, sequence, head) -> None:
    """Adds up what the warps have and the new token; a warp has a head."""
    shape, smem, thread = block.shape, block.smem, block.thread()
    key_tiles, words = 512 // shape.size, shape.size // 2 + 4
    own, number = thread >> 5, thread & 31
    is_there = own < shape.group
    mine = jnp.where(is_there, own, 0)
    pairs = [number + 32 * i for i in range(shape.size // 64)]
    key, value = ([lane.gather(smem["q"], r * words + pair) for pair in pairs]
                  for r in (shape.group, shape.group + 1))  # fmt: skip
    score = lane.full(0.0, jnp.float32)
    for pair, word in zip(pairs, key, strict=True):
        q, k = lane.unpack(lane.gather(smem["q"], mine * words + pair)), lane.unpack(word)
        score += q[0] * k[0] + q[1] * k[1]
    score = lane.warp_sum(score) * (attention.LOG2_E / shape.size**0.5)
    rows = [i * shape.group + mine for i in range(key_tiles)]
    tops, totals = ([lane.gather(smem["tops"], 2 * row + i) for row in rows] for i in (0, 1))
    top = score
    for one in tops:
        top = jnp.maximum(top, one)
    factor = lane.exp2(score - top)
    factors = [lane.exp2(one - top) for one in tops]
    total = factor
    for f, one in zip(factors, totals, strict=True):
        total += f * one
    for pair, word in zip(pairs, value, strict=True):
        sums = [factor * half for half in lane.unpack(word)]
        for f, row in zip(factors, rows, strict=True):
            for i in (0, 1):
                sums[i] += f * lane.gather(smem["values"], row * shape.size + 2 * pair + i)
        place = sequence * (shape.attended // 2) + (head * shape.group + own) * (shape.size // 2)
        places = jnp.where(is_there, place + pair, -1)
        packed = lane.pack(sums[0] / total, sums[1] / total)
        exchange.post(block.refs.words, exchange_number, places, packed)
