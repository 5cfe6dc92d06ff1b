"""Words that thread blocks post for all others, with the number of what they belong to.

A word is 8 bytes: 32 bits and the number of its exchange, written and read at once, so that there
is no flag to wait for and nothing to fence. Whoever takes a word polls until the number is there.
Words of one exchange lie in one of `BUFFERS` parts of memory, which take turns; see `kernel`. Those
of tokens lie as products read them: `place_of`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.decode import on_host
from pallas_kernels.hopper.decode.one_launch import lane
from pallas_kernels.hopper.decode.one_launch.lane import WORD, ptx

BUFFERS = 16
_LOAD = "ld.relaxed.gpu.global"
_MOST_POLLS = 1 << 22  # seconds, after which a fault ends the program


def place_of(token, word, features: int):
    """Where a word of a token with so many features is among those of an exchange.

    64 words lie together, which are posted, and taken by a warp, at once: of each of eight tokens
    eight, 0, 4, 1, 5, 2, 6, 3, 7, so that a lane has two neighbours as its part of an operand.
    """
    chunk = (token >> 3) * (features // 16) + (word >> 3)
    return chunk * 64 + (token & 7) * 8 + (word & 3) * 2 + ((word >> 2) & 1)


def as_placed(words: jax.Array) -> jax.Array:
    """The words of tokens, int32 `[M, features / 2]`, M a multiple of 8, as `place_of` says."""
    chunks = words.reshape(len(words) // 8, 8, -1, 2, 4)
    return chunks.transpose(0, 2, 1, 4, 3).reshape(-1)


@primitive
def post(words_ref, exchange, places: jax.Array, values: jax.Array) -> None:
    """Posts words.

    Args:
      words_ref: GMEM, int32 `[BUFFERS, words, 2]`.
      exchange: int32 scalar, its number, above 0.
      places: of the words among those of the exchange; lanes with a negative one post nothing.
      values: int32, the words.
    """
    size = words_ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, WORD, WORD))
    def step(_, ref, exchange, places, values):
        number, place = lane.scalar(exchange), lane.word(places)
        ptx(
            "{.reg .pred p; .reg .b64 q; setp.ge.s32 p, $3, 0; mov.b64 q, {$1, $2}; "
            "@p st.relaxed.gpu.global.b64 [$0], q;}",
            _address(ref, number, place, size),
            lane.word(values),
            number,
            place,
            has_side_effects=True,
        )

    step(words_ref, exchange, places, values)


@primitive
def take(words_ref, exchange, places: list[jax.Array]) -> list[jax.Array]:
    """Waits for words, and returns them: int32, 0 where places are negative.

    Args:
      words_ref: as of `post`.
      exchange: int32 scalar, its number.
      places: of the words. All are asked for at once, again and again until all are there.
    """
    size, n = words_ref.shape[1], len(places)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, n * [WORD]), return_type=n * [lane.struct()]
    )
    def step(_, ref, exchange, places):
        number = lane.scalar(exchange)
        places = [lane.word(one) for one in places]
        addresses = [_address(ref, number, place, size) for place in places]
        # Results, addresses, places
        flags = [f"setp.ge.s32 p, ${2 * n + i}, 0;" for i in range(n)]
        loads = [f"{flag} @p {_LOAD}.b64 v{i}, [${n + i}];" for i, flag in enumerate(flags)]
        return [lane.array(one) for one in _poll(loads, [*addresses, *places], number, n)]

    return step(words_ref, exchange, places)


@primitive
def take_row(
    words_ref,
    exchange,
    first: jax.Array,
    left: jax.Array | None,
    distances: list[int],
    count: int,
) -> list[jax.Array]:
    """Waits for words of a row, and returns them: int32, 0 past the end of the row.

    It needs fewer registers than `take`, and less code.

    Args:
      words_ref, exchange: as of `post`.
      first: a place of each lane, a multiple of `count`.
      left: how many words the row has from there on, maybe none; None if it has all.
      distances: of the words from `first`. All are asked for at once.
      count: how many words are taken from each on, 1 or 2.
    """
    size, n = words_ref.shape[1], count * len(distances)
    ends = [] if left is None else [left]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, WORD, len(ends) * [WORD]),
        return_type=n * [lane.struct()],
    )
    def step(_, ref, exchange, first, ends):
        number = lane.scalar(exchange)
        address = _address(ref, number, lane.word(first), size)
        kind, loads = (".b64", ".v2.b64")[count - 1], []
        for i, distance in enumerate(distances):
            words = ", ".join(f"v{count * i + j}" for j in range(count))
            words = words if count == 1 else f"{{{words}}}"
            load = f"{_LOAD}{kind} {words}, [${n} + {8 * distance}];"
            loads.append(f"setp.gt.s32 p, ${n + 1}, {distance}; @p {load}" if ends else load)
        ends = [lane.word(one) for one in ends]
        found = _poll(loads, [address, *ends], number, n, sets_all=not ends)
        return [lane.array(one) for one in found]

    return step(words_ref, exchange, first, ends)


@primitive
def read(words_ref, exchange, places: jax.Array) -> jax.Array:
    """Words that this block has taken before; 0 where places are negative.

    They are loaded without a test, so nothing waits before they are used.
    """
    size = words_ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, WORD), return_type=lane.struct())
    def step(_, ref, exchange, places):
        place = lane.word(places)
        found = ptx(
            "{.reg .pred p; .reg .b32 w; mov.b32 w, 0; setp.ge.s32 p, $2, 0; "
            "@p ld.relaxed.gpu.global.b32 w, [$1]; mov.b32 $0, w;}",
            _address(ref, lane.scalar(exchange), place, size),
            place,
            result_types=const(0).type,
            has_side_effects=True,
        )
        return lane.array(found)

    return step(words_ref, exchange, places)


def _address(ref, number: ir.Value, place: ir.Value, size: int) -> ir.Value:
    buffer = arith.andi(number, const(BUFFERS - 1))
    index = arith.addi(arith.muli(buffer, const(size)), place)
    return simt.gmem_address(ref, arith.muli(index, const(8)))


def _poll(
    loads: list[str],
    operands: list[ir.Value],
    number: ir.Value,
    n: int,
    *,
    sets_all: bool = False,
) -> list[ir.Value]:
    """Repeats `loads`, which set some of `v0` ... `v{n - 1}`, until all have the exchange's number.

    Their operands follow on the results, of which there are `n`. `sets_all`: none is left out.
    """
    wanted = f"${n + len(operands)}"
    # Results are written last: they may lie in the registers of operands.
    none = "" if sets_all else " ".join(f"mov.b64 v{i}, none;" for i in range(n))
    tests = " ".join(
        f"mov.b64 {{w{i}, t}}, v{i}; xor.b32 t, t, {wanted}; or.b32 missing, missing, t;"
        for i in range(n)
    )
    results = " ".join(f"mov.b32 ${i}, w{i};" for i in range(n))
    found = ptx(
        f"""{{.reg .pred p, more; .reg .b64 v<{n}>, none;
            .reg .b32 w<{n}>, t, missing, polls, zero;
            mov.b32 polls, 0; mov.b32 zero, 0; mov.b64 none, {{zero, {wanted}}}; {none}
            poll: {" ".join(loads)}
            add.u32 polls, polls, 1; setp.gt.u32 more, polls, {_MOST_POLLS}; @more trap;
            mov.b32 missing, 0; {tests} setp.ne.u32 more, missing, 0; @more bra poll;
            {results}}}""",
        *operands,
        number,
        result_types=[const(0).type] * n,
        has_side_effects=True,
    )
    return list(found)


@post.in_jax
def _post(words_ref, exchange, places, values):
    board = on_host.log("exchange")

    def note(first, exchange, places, values):
        found = {int(p): v for p, v in zip(places, values, strict=True) if p >= 0}
        board.note((_launch(first), int(exchange), found))
        return np.int32(1)

    _in_order(words_ref, note, jax.ShapeDtypeStruct((), jnp.int32), exchange, places, values)


@take.in_jax
def _take(words_ref, exchange, places):
    """What the reference has is exchange 0."""
    board, stacked = on_host.log("exchange"), jnp.stack(places)

    def find(first, exchange, places):
        known = dict(enumerate(first.tolist())) if exchange == 0 else {}
        wanted = {int(place) for place in places.reshape(-1) if place >= 0}

        def is_there(entries):
            for launch, number, found in entries:
                if (launch, number) == (_launch(first), exchange):
                    known.update(found)
            return wanted <= known.keys()

        board.wait_until(is_there)
        return np.array([known[p] if p >= 0 else 0 for p in places.reshape(-1)], np.int32)

    result = jax.ShapeDtypeStruct((stacked.size,), jnp.int32)
    found = _in_order(words_ref, find, result, exchange, stacked)
    return list(found.reshape(stacked.shape))


@take_row.in_jax
def _take_row(words_ref, exchange, first, left, distances, count):
    each = [distance + i for distance in distances for i in range(count)]
    places = [first + d if left is None else jnp.where(d < left, first + d, -1) for d in each]
    return _take(words_ref, exchange, places)


@read.in_jax
def _read(words_ref, exchange, places):
    return _take(words_ref, exchange, [places])[0]


def _launch(first: np.ndarray) -> int:
    """Tells the launches of a step apart: by the stream in front of their first layer."""
    return hash(first.tobytes())


def _in_order(words_ref, call, result, *operands):
    """What `call` returns on the host for exchange 0 and the operands; the interpreter keeps the
    order of a thread's accesses."""
    place = 2 * lax.axis_index("block") + lax.axis_index("wg")
    before = words_ref[1, place, 0]

    def call_now(_, *operands):
        return call(*map(np.asarray, operands)), np.int32(0)

    results = result, jax.ShapeDtypeStruct((), jnp.int32)
    found, zero = io_callback(call_now, results, before, words_ref[0, :, 0], *operands)
    words_ref[1, place, 0] = before + zero  # see `memory._memory`
    return found
