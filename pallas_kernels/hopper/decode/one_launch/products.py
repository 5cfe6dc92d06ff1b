"""Products of tokens with 16 rows of a matrix, by `mma.sync`: of tiles of eight tokens.

The eight warps of a block share the features: of a stage, `[16, 512]` bfloat16 or `[16, 1024]`
8-bit floats, each multiplies an eighth, and `parts` gets the sums of each warp. Rows are the rows
of the product, tokens its columns. Both are words: two bfloat16, or four 8-bit floats. Sums are a
list of float32 `[512]` in the layout `SUMS`, one for each tile.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import TILED, tiled
from pallas_kernels.hopper.decode.one_launch import lane, memory
from pallas_kernels.hopper.decode.one_launch.lane import LANES, WORD, ptx
from pallas_kernels.hopper.decode.one_launch.plan import ROWS

TOKENS = 8  # of a tile, the columns of a product
STAGE_WORDS = 256  # of a row
BLOCK_WARPS = 8
LOG2_E = 1.4426950408889634
_OF_WARP = STAGE_WORDS // BLOCK_WARPS
WORDS = _OF_WARP // 4  # of a row that a lane has of a stage
SUMS = plgpu.Layout.WG_STRIDED((4 * LANES,), vec_size=1)  # four float32 of each lane
_STRUCT = plgpu.ShapeDtypeStruct((4 * LANES,), jnp.float32, layout=SUMS)
_TILE = 1024  # bytes of 8 rows of 128 bytes in shared memory
_KINDS = {  # of products, by what they multiply
    "float8_e4m3fn": "m16n8k32.row.col.f32.e4m3.e4m3.f32",
    "bfloat16": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "float16": "m16n8k16.row.col.f32.f16.f16.f32",
}


def zeros(tiles: int) -> list[jax.Array]:
    """Sums of nothing."""
    return tiles * [plgpu.layout_cast(jnp.zeros((4 * LANES,), jnp.float32), SUMS)]


def first_word(wg: jax.Array) -> jax.Array:
    """The first word of a row that each lane has as an operand; `wg`: int32 scalar, the
    warpgroup."""
    number = lane.numbers()
    return ((number >> 5) + 4 * wg) * _OF_WARP + (number & 3)


def distances(stages: int) -> list[int]:
    """Those from `first_word` of all words that a lane has, `WORDS` for each stage."""
    return [
        start + 4 * i for start in range(0, stages * STAGE_WORDS, STAGE_WORDS) for i in range(WORDS)
    ]


@primitive
def add_product(
    stage_ref, tokens: list[list[jax.Array]], sums: list[jax.Array], wg: jax.Array
) -> list[jax.Array]:
    """Adds the products of the warps' features.

    Args:
      stage_ref: SMEM, bfloat16 `[16, 512]` or float8_e4m3fn `[16, 1024]`, with the transforms
        `tiled`.
      tokens: of each tile the words of the stage, of the same dtype; lanes 4 t ... 4 t + 3 of a
        warp have token t.
      sums: before.
      wg: int32 scalar, the warpgroup.
    """
    tiles, dtype = len(sums), stage_ref.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tiled(dtype)), tiles * [WORDS * [WORD]], tiles * [SUMS], SCALAR),
        return_type=tiles * [_STRUCT],
    )
    def step(_, ref, tokens, sums, wg):
        number, warp = simt.lane_and_warp()
        warp = arith.addi(warp, arith.muli(lane.scalar(wg), const(4)))
        row, part = arith.andi(number, const(7)), arith.shrui(number, const(3))
        lower, chunk = arith.andi(part, const(1)), arith.shrui(part, const(1))
        tile = arith.addi(arith.muli(lower, const(BLOCK_WARPS)), warp)
        base = arith.addi(simt.smem_address(ref), arith.muli(tile, const(_TILE)))
        base = arith.addi(base, arith.muli(row, const(128)))
        words = [[lane.word(one) for one in of_tile] for of_tile in tokens]
        totals = [_values(one) for one in sums]
        for i in range(0, WORDS, 2):
            # The 16-byte chunk c of row r of a tile lies at place c XOR r.
            place = arith.xori(arith.addi(chunk, const(i)), row)
            fragment = _load(arith.addi(base, arith.muli(place, const(16))))
            totals = _multiply(fragment, [of_tile[i : i + 2] for of_tile in words], totals, dtype)
        return [_of_values(one) for one in totals]

    return step(stage_ref, tokens, sums, wg)


@add_product.in_jax
def _add_product(stage_ref, tokens, sums, wg):
    """Of each warp, 16 x 8 sums follow each other."""
    w = stage_ref[...].astype(jnp.float32)
    features = w.shape[1] // BLOCK_WARPS
    of_warps = [
        lax.dynamic_slice_in_dim(w, (warp + 4 * wg) * features, features, axis=1)
        for warp in range(4)
    ]
    x = [_rows_of(words, stage_ref.dtype) for words in tokens]
    return [_added(one, jnp.stack(of_warps), of_tile) for one, of_tile in zip(sums, x, strict=True)]


@primitive
def add_words(
    rows: list[list[jax.Array]], tokens: list[list[jax.Array]], sums: list[jax.Array], *, dtype
) -> list[jax.Array]:
    """Adds the products of 16 rows over the words of a stage that lanes have.

    Args:
      rows: of lanes 4 g ... 4 g + 3 those of row g, and of row g + 8.
      tokens, sums: as of `add_product`.
      dtype: of what the words hold, of 16 bits or float8_e4m3fn.
    """
    tiles = len(sums)

    @plgpu.inline_mgpu(
        arg_types=(2 * [WORDS * [WORD]], tiles * [WORDS * [WORD]], tiles * [SUMS]),
        return_type=tiles * [_STRUCT],
    )
    def step(_, rows, tokens, sums):
        rows, words = ([[lane.word(one) for one in of] for of in part] for part in (rows, tokens))
        totals = [_values(one) for one in sums]
        for i in range(0, WORDS, 2):
            fragment = [of[i + half] for half in (0, 1) for of in rows]
            totals = _multiply(fragment, [of_tile[i : i + 2] for of_tile in words], totals, dtype)
        return [_of_values(one) for one in totals]

    return step(rows, tokens, sums)


@add_words.in_jax
def _add_words(rows, tokens, sums, *, dtype):
    w = jnp.concatenate([_rows_of(words, dtype) for words in rows], 1)
    return [_added(one, w, _rows_of(words, dtype)) for one, words in zip(sums, tokens, strict=True)]


@primitive
def add_rows(
    w_smem, h_smem, sums: list[jax.Array], wg: jax.Array, *, dtype=jnp.bfloat16
) -> list[jax.Array]:
    """Adds products of 16 columns of 256 rows with these rows' activations.

    A warp multiplies 32 of the rows.

    Args:
      w_smem: int32 `[256, 8]`, 16-bit `[256, 16]`.
      h_smem: int32 `[256, words]`, 16-bit, for each row those of the tokens: at least the tiles'
        and an odd multiple of four, so that lanes read different banks.
      sums, wg: as of `add_product`; the columns are the rows of the product.
      dtype: of what the words hold.
    """
    tiles, pitch = len(sums), 4 * h_smem.shape[1]  # bytes

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), tiles * [SUMS], SCALAR),
        return_type=tiles * [_STRUCT],
    )
    def step(_, w, h, sums, wg):
        number, warp = simt.lane_and_warp()
        first = arith.muli(arith.addi(warp, arith.muli(lane.scalar(wg), const(4))), const(32))
        row, part = arith.andi(number, const(7)), arith.shrui(number, const(3))
        right, below = arith.andi(part, const(1)), arith.shrui(part, const(1))
        of_w = arith.addi(arith.addi(first, row), arith.muli(below, const(8)))
        w_address = arith.addi(simt.smem_address(w), arith.muli(of_w, const(32)))
        w_address = arith.addi(w_address, arith.muli(right, const(16)))
        of_h = arith.addi(first, arith.andi(number, const(15)))
        h_address = arith.addi(simt.smem_address(h), arith.muli(of_h, const(pitch)))
        totals = [_values(one) for one in sums]
        for half in range(2):  # of the warp's rows
            fragment = _load(w_address, ".trans", 512 * half)
            tokens = [
                _load(h_address, ".trans", 16 * pitch * half + 16 * tile, 2)
                for tile in range(tiles)
            ]
            totals = _multiply(fragment, tokens, totals, dtype)
        return [_of_values(one) for one in totals]

    return step(w_smem, h_smem, sums, wg)


@add_rows.in_jax
def _add_rows(w_smem, h_smem, sums, wg, *, dtype=jnp.bfloat16):
    number = jnp.arange(2 * LANES)
    w, h = (
        jnp.stack([memory.gather(ref, number * ref.shape[1] + i) for i in range(ref.shape[1])], 1)
        for ref in (w_smem, h_smem)
    )
    w, h = (jnp.stack(lane.unpack(words, dtype), -1).reshape(8, 32, -1) for words in (w, h))
    w, h = (lax.dynamic_slice_in_dim(a, 4 * wg, 4).swapaxes(1, 2) for a in (w, h))
    return [_added(one, w, h[:, TOKENS * tile :][:, :TOKENS]) for tile, one in enumerate(sums)]


def tokens_of_rows(x_smem, stage, wg: jax.Array, *, batch: int) -> list[list[jax.Array]]:
    """What `add_columns` takes of the tokens for a stage.

    Args:
      x_smem: int32 `[batch, words]`; a row has four words more than a multiple of 32, so that
        lanes read different banks.
      stage: int32 scalar, its number.
      wg: int32 scalar, the warpgroup.
      batch: tokens; the others are zeros.
    """
    number = lane.numbers()
    first = stage * 64 + ((number >> 5) + 4 * wg) * 8 + (number & 3)
    found = []
    for tile in range(-(-batch // TOKENS)):
        token = TOKENS * tile + ((number >> 2) & 7)
        places = [token * x_smem.shape[1] + first + 4 * half for half in range(2)]
        places = [jnp.where(token < batch, place, -1) for place in places]
        found.append([memory.gather(x_smem, place) for place in places])
    return found


@primitive
def add_columns(
    stage_ref, tokens: list[list[jax.Array]], sums: list[list[jax.Array]], wg: jax.Array
) -> list[list[jax.Array]]:
    """Adds products of 64 columns of 128 rows; a warp multiplies 16 of the rows.

    Args:
      stage_ref: SMEM, bfloat16 `[128, 64]`, with transforms `TILED`.
      tokens: of `tokens_of_rows`.
      sums: of each 16 columns, which are the rows of the product.
      wg: int32 scalar, the warpgroup.
    """
    tiles = len(tokens)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(TILED), tiles * [2 * [WORD]], len(sums) * [tiles * [SUMS]], SCALAR
        ),
        return_type=len(sums) * [tiles * [_STRUCT]],
    )  # fmt: skip
    def step(_, ref, tokens, sums, wg):
        number, warp = simt.lane_and_warp()
        warp = arith.addi(warp, arith.muli(lane.scalar(wg), const(4)))
        row, part = arith.andi(number, const(7)), arith.shrui(number, const(3))
        right, below = arith.andi(part, const(1)), arith.shrui(part, const(1))
        tile = arith.addi(arith.muli(warp, const(2)), below)
        base = arith.addi(simt.smem_address(ref), arith.muli(tile, const(_TILE)))
        base = arith.addi(base, arith.muli(row, const(128)))
        words, found = [[lane.word(one) for one in of_tile] for of_tile in tokens], []
        for i, of_columns in enumerate(sums):
            place = arith.xori(arith.addi(right, const(2 * i)), row)
            fragment = _load(arith.addi(base, arith.muli(place, const(16))), ".trans")
            totals = _multiply(fragment, words, [_values(one) for one in of_columns])
            found.append([_of_values(one) for one in totals])
        return found

    return step(stage_ref, tokens, sums, wg)


@add_columns.in_jax
def _add_columns(stage_ref, tokens, sums, wg):
    w = stage_ref[...].astype(jnp.float32).reshape(8, 16, len(sums), ROWS)
    w = lax.dynamic_slice_in_dim(w, 4 * wg, 4).transpose(2, 0, 3, 1)
    x = [_rows_of(words, jnp.bfloat16) for words in tokens]
    return [
        [_added(one, of, of_tile) for one, of_tile in zip(of_columns, x, strict=True)]
        for of_columns, of in zip(sums, w, strict=True)
    ]


@primitive
def put(parts_ref, which: jax.Array, sums: list[jax.Array], wg: jax.Array) -> None:
    """Stores the sums of each warp to SMEM `parts_ref`, float32 `[parts, 8, 16 * 8]`, where each
    tile has a part: those from `which` times the tiles on."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, len(sums) * [SUMS], SCALAR))
    def step(_, ref, which, sums, wg):
        number, warp = simt.lane_and_warp()
        warp = arith.addi(warp, arith.muli(lane.scalar(wg), const(4)))
        first = const(len(sums) * BLOCK_WARPS)
        warp = arith.addi(warp, arith.muli(lane.scalar(which), first))
        row, quad = arith.shrui(number, const(2)), arith.andi(number, const(3))
        offset = arith.addi(arith.muli(row, const(32)), arith.muli(quad, const(8)))
        offset = arith.addi(offset, arith.muli(warp, const(4 * ROWS * TOKENS)))
        address = arith.addi(simt.smem_address(ref), offset)
        for tile, c in enumerate(map(_values, sums)):
            of_tile = tile * BLOCK_WARPS * 4 * ROWS * TOKENS
            for distance, pair in ((0, c[:2]), (8 * 32, c[2:])):
                ptx(
                    f"st.shared.v2.f32 [$0 + {of_tile + distance}], {{$1, $2}};",
                    address,
                    *pair,
                    has_side_effects=True,
                )

    step(parts_ref, which, sums, wg)


@put.in_jax
def _put(parts_ref, which, sums, wg):
    for tile, one in enumerate(sums):
        part = which * len(sums) + tile
        first = (part * BLOCK_WARPS + 4 * wg) * ROWS * TOKENS
        for i, of_warp in enumerate(one.reshape(4, LANES)):
            memory.scatter(parts_ref, first + i * LANES + jnp.arange(LANES), of_warp)


def sum_of_warps(
    parts_ref, which: jax.Array, tiles: int, row: jax.Array, token: jax.Array
) -> jax.Array:
    """What the warps have of each lane's row, of 16, and token, of the tiles, in a fixed order.

    `which` is as of `put`.
    """
    part = which * tiles if tiles == 1 else which * tiles + (token >> 3)
    place = part * BLOCK_WARPS * ROWS * TOKENS + row * TOKENS + (token & (TOKENS - 1))
    return sum(memory.gather_each(parts_ref, place, BLOCK_WARPS, ROWS * TOKENS), start=_zero())


def _rows_of(words: list[jax.Array], dtype) -> jax.Array:
    """What lanes 4 r ... 4 r + 3 of each warp have of row r, float32 `[4, 8, features]`."""
    stacked = jnp.stack([one.reshape(4, 8, 4) for one in words], 2)
    return _numbers_of(stacked, dtype).reshape(4, 8, -1)


def _added(sums, w, x) -> jax.Array:
    """With the products of `w: [4, 16, features]` and `x: [4, 8, features]`."""
    return sums + jnp.einsum("wrf,wtf->wrt", w, x).reshape(-1)


def _numbers_of(words: jax.Array, dtype) -> jax.Array:
    """What words hold, float32, along a new last axis."""
    if jnp.dtype(dtype).itemsize == 2:
        return jnp.stack(lane.unpack(words, dtype), -1)
    return lax.bitcast_convert_type(words, dtype).astype(jnp.float32)


def _load(address, order: str = "", distance: int = 0, count: int = 4) -> list[ir.Value]:
    """So many 8 x 8 matrices from shared memory."""
    results = ", ".join(f"${i}" for i in range(count))
    return ptx(
        f"ldmatrix.sync.aligned.m8n8.x{count}{order}.shared.b16 {{{results}}}, "
        f"[${count} + {distance}];",
        address,
        result_types=[const(0).type] * count,
        has_side_effects=True,
        convergent=True,
    )


def _multiply(fragment, tokens, totals, dtype=jnp.bfloat16) -> list[list[ir.Value]]:
    """The totals of each tile with its product."""
    return [
        ptx(
            f"""mma.sync.aligned.{_KINDS[jnp.dtype(dtype).name]}
            {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};""",
            *fragment,
            *words,
            *of_tile,
            result_types=[ir.F32Type.get()] * 4,
            has_side_effects=True,
            convergent=True,
        )
        for words, of_tile in zip(tokens, totals, strict=True)
    ]


def _zero() -> jax.Array:
    return lane.full(0.0, jnp.float32)


def _values(sums: mgpu.FragmentedArray) -> list[ir.Value]:
    return [vector.extract(register, [], [0]) for register in sums.registers.flat]


def _of_values(values) -> mgpu.FragmentedArray:
    one = ir.VectorType.get((1,), ir.F32Type.get())
    registers = [vector.broadcast(one, value) for value in values]
    array = lane.np.empty(4, dtype=object)
    array[:] = registers
    return mgpu.FragmentedArray(_registers=array, _layout=SUMS.to_mgpu(), _is_signed=None)
