"""Products of up to eight tokens with 16 rows of a matrix, by `mma.sync`.

The eight warps of a block share the features: of a stage, `[16, 512]` bfloat16 or `[16, 1024]`
8-bit floats, each multiplies an eighth, and `parts` gets the sums of each warp. Rows are the rows
of the product, tokens its columns. Both are words in memory: two bfloat16, or four 8-bit floats.
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

TOKENS = 8  # columns of a product
STAGE_WORDS = 256  # of a row
BLOCK_WARPS = 8
LOG2_E = 1.4426950408889634
_OF_WARP = STAGE_WORDS // BLOCK_WARPS
_STEPS = _OF_WARP // 8
SUMS = plgpu.Layout.WG_STRIDED((4 * LANES,), vec_size=1)  # four float32 of each lane
_TILE = 1024  # bytes of 8 rows of 128 bytes in shared memory
_KINDS = {  # of products, by the bytes of a number
    1: "m16n8k32.row.col.f32.e4m3.e4m3.f32",
    2: "m16n8k16.row.col.f32.bf16.bf16.f32",
}


def zeros() -> jax.Array:
    """Sums of nothing."""
    return plgpu.layout_cast(jnp.zeros((4 * LANES,), jnp.float32), SUMS)


def tokens_of_stage(x_smem, stage: int, wg: jax.Array, *, batch: int, words: int) -> list:
    """What `add_product` takes of the tokens for a stage.

    Args:
      x_smem: int32 `[batch, words]`; a row has four words more than a multiple of 32, so that
        lanes read different banks.
      stage: its number.
      wg: int32 scalar, the warpgroup.
      batch: tokens; the others are zeros.
      words: of a token; further ones are zeros.
    """
    number = lane.numbers()
    token, quad = (number >> 2) & 7, number & 3
    warp = (number >> 5) + 4 * wg
    first = stage * STAGE_WORDS + warp * _OF_WARP
    found = []
    for step in range(_STEPS):
        for half in range(2):
            place = first + 8 * step + 4 * half + quad
            is_there = (token < batch) & (place < words)
            places = jnp.where(is_there, token * x_smem.shape[1] + place, -1)
            found.append(memory.gather(x_smem, places))
    return found


@primitive
def add_product(stage_ref, tokens: list[jax.Array], sums: jax.Array, wg: jax.Array) -> jax.Array:
    """Adds the products of the warps' features.

    Args:
      stage_ref: SMEM, bfloat16 `[16, 512]` or float8_e4m3fn `[16, 1024]`, with the transforms
        `tiled`.
      tokens: of `tokens_of_stage`, of the same dtype.
      sums: float32 `[512]`, `SUMS`.
      wg: int32 scalar, the warpgroup.
    """
    result = plgpu.ShapeDtypeStruct((4 * LANES,), jnp.float32, layout=SUMS)
    dtype = stage_ref.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tiled(dtype)), len(tokens) * [WORD], SUMS, SCALAR),
        return_type=result,
    )
    def step(_, ref, tokens, sums, wg):
        number, warp = simt.lane_and_warp()
        warp = arith.addi(warp, arith.muli(lane.scalar(wg), const(4)))
        row, part = arith.andi(number, const(7)), arith.shrui(number, const(3))
        lower, chunk = arith.andi(part, const(1)), arith.shrui(part, const(1))
        tile = arith.addi(arith.muli(lower, const(BLOCK_WARPS)), warp)
        base = arith.addi(simt.smem_address(ref), arith.muli(tile, const(_TILE)))
        base = arith.addi(base, arith.muli(row, const(128)))
        words, totals = [lane.word(one) for one in tokens], _values(sums)
        for i in range(_STEPS):
            # The 16-byte chunk c of row r of a tile lies at place c XOR r.
            place = arith.xori(arith.addi(chunk, const(2 * i)), row)
            address = arith.addi(base, arith.muli(place, const(16)))
            totals = _multiply(address, words[2 * i : 2 * i + 2], totals, dtype)
        return _of_values(totals)

    return step(stage_ref, tokens, sums, wg)


@add_product.in_jax
def _add_product(stage_ref, tokens, sums, wg):
    """Of each warp, 16 x 8 sums follow each other."""
    w = stage_ref[...].astype(jnp.float32)
    totals = sums.reshape(4, ROWS, TOKENS)
    added, features = [], w.shape[1] // BLOCK_WARPS
    for warp in range(4):
        of_warp = lax.dynamic_slice_in_dim(w, (warp + 4 * wg) * features, features, axis=1)
        lanes = [one.reshape(4, 8, 4)[warp] for one in tokens]  # tokens, quads
        x = jnp.stack([_numbers_of(one, stage_ref.dtype) for one in lanes], 1)
        added.append(of_warp @ x.reshape(TOKENS, features).T)
    return (totals + jnp.stack(added)).reshape(-1)


@primitive
def add_words(
    rows: list[jax.Array], tokens: list[jax.Array], sums: jax.Array, *, dtype
) -> jax.Array:
    """Adds the products of 16 rows with eight tokens over 16 words that a warp has.

    Args:
      rows: of lane 4 g + q, words 4 q ... 4 q + 3 of row g, and of row g + 8.
      tokens: of lane 4 t + q, these words of token t.
      sums: as of `add_product`.
      dtype: of what the words hold, bfloat16 or float8_e4m3fn.
    """
    result = plgpu.ShapeDtypeStruct((4 * LANES,), jnp.float32, layout=SUMS)

    @plgpu.inline_mgpu(arg_types=(8 * [WORD], 4 * [WORD], SUMS), return_type=result)
    def step(_, rows, tokens, sums):
        rows, tokens = ([lane.word(one) for one in part] for part in (rows, tokens))
        totals = _values(sums)
        for i in (0, 2):  # Which features a step adds up is the same for rows and tokens.
            fragment = [rows[i], rows[4 + i], rows[i + 1], rows[5 + i]]
            totals = ptx(
                f"""mma.sync.aligned.{_KINDS[jnp.dtype(dtype).itemsize]}
                {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};""",
                *fragment,
                *tokens[i : i + 2],
                *totals,
                result_types=[ir.F32Type.get()] * 4,
                has_side_effects=True,
                convergent=True,
            )
        return _of_values(totals)

    return step(rows, tokens, sums)


@add_words.in_jax
def _add_words(rows, tokens, sums, *, dtype):
    upper, lower, x = (
        jnp.stack([_numbers_of(one, dtype) for one in part], 1).reshape(4, 8, -1)
        for part in (rows[:4], rows[4:], tokens)
    )
    w = jnp.concatenate([upper, lower], 1)  # warps, rows, features
    return sums + jnp.einsum("wrf,wtf->wrt", w, x).reshape(-1)


@primitive
def add_rows(w_smem, h_smem, sums: jax.Array, wg: jax.Array) -> jax.Array:
    """Adds products of 16 columns of 256 rows with these rows' activations.

    A warp multiplies 32 of the rows.

    Args:
      w_smem: int32 `[256, 8]`, bfloat16 `[256, 16]`.
      h_smem: int32 `[256, 4]`, bfloat16 `[256, 8]`, for each row those of the tokens.
      sums, wg: as of `add_product`; the columns are the rows of the product.
    """
    result = plgpu.ShapeDtypeStruct((4 * LANES,), jnp.float32, layout=SUMS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), SUMS, SCALAR), return_type=result
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
        h_address = arith.addi(simt.smem_address(h), arith.muli(of_h, const(16)))
        totals = _values(sums)
        for half in range(2):  # of the warp's rows: 512 bytes of `w_smem`, 256 of `h_smem`
            totals = ptx(
                f"""{{.reg .b32 a<4>, b<2>;
                ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
                {{a0, a1, a2, a3}}, [$4 + {512 * half}];
                ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{b0, b1}}, [$5 + {256 * half}];
                mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
                {{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{b0, b1}}, {{$6, $7, $8, $9}};}}""",
                w_address,
                h_address,
                *totals,
                result_types=[ir.F32Type.get()] * 4,
                has_side_effects=True,
                convergent=True,
            )
        return _of_values(totals)

    return step(w_smem, h_smem, sums, wg)


@add_rows.in_jax
def _add_rows(w_smem, h_smem, sums, wg):
    number = jnp.arange(2 * LANES)
    w, h = (
        jnp.stack([memory.gather(ref, number * ref.shape[1] + i) for i in range(ref.shape[1])], 1)
        for ref in (w_smem, h_smem)
    )
    w, h = (jnp.stack(lane.unpack(words), -1).reshape(2 * LANES, -1) for words in (w, h))
    added = []
    for warp in range(4):
        rows = [lax.dynamic_slice_in_dim(a, (warp + 4 * wg) * 32, 32) for a in (w, h)]
        added.append(rows[0].T @ rows[1])
    return (sums.reshape(4, ROWS, TOKENS) + jnp.stack(added)).reshape(-1)


def tokens_of_rows(x_smem, stage, wg: jax.Array, *, batch: int) -> list:
    """What `add_columns` takes of the tokens for a stage; `x_smem` as of `tokens_of_stage`."""
    number = lane.numbers()
    token, quad = (number >> 2) & 7, number & 3
    first = stage * 64 + ((number >> 5) + 4 * wg) * 8 + quad
    places = [token * x_smem.shape[1] + first + 4 * half for half in range(2)]
    return [memory.gather(x_smem, jnp.where(token < batch, place, -1)) for place in places]


@primitive
def add_columns(
    stage_ref, tokens: list[jax.Array], sums: list[jax.Array], wg: jax.Array
) -> list[jax.Array]:
    """Adds products of 64 columns of 128 rows; a warp multiplies 16 of the rows.

    Args:
      stage_ref: SMEM, bfloat16 `[128, 64]`, with transforms `TILED`.
      tokens: of `tokens_of_rows`.
      sums: float32 `[512]`, `SUMS`, of each 16 columns, which are the rows of the product.
      wg: int32 scalar, the warpgroup.
    """
    result = plgpu.ShapeDtypeStruct((4 * LANES,), jnp.float32, layout=SUMS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(TILED), 2 * [WORD], len(sums) * [SUMS], SCALAR),
        return_type=len(sums) * [result],
    )
    def step(_, ref, tokens, sums, wg):
        number, warp = simt.lane_and_warp()
        warp = arith.addi(warp, arith.muli(lane.scalar(wg), const(4)))
        row, part = arith.andi(number, const(7)), arith.shrui(number, const(3))
        right, below = arith.andi(part, const(1)), arith.shrui(part, const(1))
        tile = arith.addi(arith.muli(warp, const(2)), below)
        base = arith.addi(simt.smem_address(ref), arith.muli(tile, const(_TILE)))
        base = arith.addi(base, arith.muli(row, const(128)))
        words, found = [lane.word(one) for one in tokens], []
        for i, one in enumerate(sums):
            place = arith.xori(arith.addi(right, const(2 * i)), row)
            address = arith.addi(base, arith.muli(place, const(16)))
            found.append(_of_values(_multiply(address, words, _values(one), order=".trans")))
        return found

    return step(stage_ref, tokens, sums, wg)


@add_columns.in_jax
def _add_columns(stage_ref, tokens, sums, wg):
    w, added = stage_ref[...].astype(jnp.float32), []
    for warp in range(4):
        rows = lax.dynamic_slice_in_dim(w, (warp + 4 * wg) * 16, 16)
        lanes = [lane.unpack(one.reshape(4, 8, 4)[warp]) for one in tokens]  # tokens, quads
        pairs = jnp.stack([jnp.stack(halves, -1) for halves in lanes], 1).reshape(TOKENS, 16)
        added.append((rows.T @ pairs.T).reshape(len(sums), ROWS * TOKENS))
    return [one + jnp.stack([of[i] for of in added]).reshape(-1) for i, one in enumerate(sums)]


@primitive
def put(parts_ref, which: jax.Array, sums: jax.Array, wg: jax.Array) -> None:
    """Stores the sums of each warp to a part of SMEM `parts_ref`, float32 `[parts, 8, 16 * 8]`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SUMS, SCALAR))
    def step(_, ref, which, sums, wg):
        number, warp = simt.lane_and_warp()
        warp = arith.addi(warp, arith.muli(lane.scalar(wg), const(4)))
        warp = arith.addi(warp, arith.muli(lane.scalar(which), const(BLOCK_WARPS)))
        row, quad = arith.shrui(number, const(2)), arith.andi(number, const(3))
        offset = arith.addi(arith.muli(row, const(32)), arith.muli(quad, const(8)))
        offset = arith.addi(offset, arith.muli(warp, const(4 * ROWS * TOKENS)))
        address = arith.addi(simt.smem_address(ref), offset)
        c = _values(sums)
        for distance, pair in ((0, c[:2]), (8 * 32, c[2:])):
            ptx(
                f"st.shared.v2.f32 [$0 + {distance}], {{$1, $2}};",
                address,
                *pair,
                has_side_effects=True,
            )

    step(parts_ref, which, sums, wg)


@put.in_jax
def _put(parts_ref, which, sums, wg):
    first = (which * BLOCK_WARPS + 4 * wg) * ROWS * TOKENS
    for i, part in enumerate(sums.reshape(4, LANES)):
        memory.scatter(parts_ref, first + i * LANES + jnp.arange(LANES), part)


def sum_of_warps(parts_ref, which, places: jax.Array) -> jax.Array:
    """What the warps have at `places` of a part, in a fixed order; anything where they are
    negative."""
    first = which * BLOCK_WARPS * ROWS * TOKENS + jnp.maximum(places, 0)
    return sum(memory.gather_each(parts_ref, first, BLOCK_WARPS, ROWS * TOKENS), start=_zero())


def _numbers_of(words: jax.Array, dtype) -> jax.Array:
    """What words hold, float32, along a new last axis."""
    if jnp.dtype(dtype).itemsize == 2:
        return jnp.stack(lane.unpack(words), -1)
    return lax.bitcast_convert_type(words, dtype).astype(jnp.float32)


def _multiply(address, tokens, totals, dtype=jnp.bfloat16, order=""):
    return ptx(
        f"""{{.reg .b32 a<4>;
        ldmatrix.sync.aligned.m8n8.x4{order}.shared.b16 {{a0, a1, a2, a3}}, [$4];
        mma.sync.aligned.{_KINDS[jnp.dtype(dtype).itemsize]}
        {{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{$5, $6}}, {{$7, $8, $9, $10}};}}""",
        address,
        *tokens,
        *totals,
        result_types=[ir.F32Type.get()] * 4,
        has_side_effects=True,
        convergent=True,
    )


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
