"""The kernels by `mma.sync` on a Hopper GPU, as GPUs without WGMMA would run them.

    python -m benchmarks.engines [--back-end MMA | Ampere] [--out DIRECTORY]

"product" multiplies x with the gate's weights: by the engine of the back end and by Hopper's, each
with an epilogue that stores the tile, by XLA and, where torch with CUDA is installed, by Triton
without WGMMA and TMA. The block is that of unions, through `LAYERS` sets of weights; its baseline
is the time of the three or nine products of its dense twin, each as the fastest by `mma.sync`. That
of few tokens, which memory limits on any card, is compared with XLA's.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from benchmarks import ffn, gradients, record
from benchmarks.ffn import DTYPE, LAYERS, D, H, describe, draw
from pallas_kernels.hopper.common import engine, lanes, matmul, simt
from pallas_kernels.hopper.common.engine import Engine
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import ACC_ROWS
from twell_jax import sparse_ffn
from twell_jax.analysis import timing

try:
    import torch

    from benchmarks import triton_product
except ModuleNotFoundError:
    torch = triton_product = None

M, FEW = 16384, (1, 8, 32)
PATTERNS = {"recorded": 0, "skewed": 29}  # mean non-zeros, where they are drawn
ENGINES = {"MMA": engine.MMA, "Ampere": engine.CP_ASYNC}  # by back end
PRODUCTS = {"forward": 3, "forward and backward": 9}  # of the dense block
EXACT = 256  # rows of a product that are compared


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--back-end", choices=ENGINES, default="MMA")
    args = parser.parse_args()
    name = record.force(args.back_end, "engines")
    record.write_as_they_come("engines", measure(args.back_end), args.out, name)


def measure(back_end: str, m: int = M, d: int = D, h: int = H) -> Iterator[dict[str, Any]]:
    """Yields the rows of products, then those of blocks, those of few tokens last."""
    found = list(products(ENGINES[back_end], m, d, h))
    yield from found
    fastest = min(row["ms"] for row in found if "mma.sync" in row["implementation"])
    for pattern, nnz in PATTERNS.items():
        for row in blocks(pattern, nnz, m, d, h):
            baseline = PRODUCTS[row["direction"]] * fastest
            yield row | {
                "baseline": "products by mma.sync",
                "baseline_ms": baseline,
                "speedup": baseline / row["ms"],
            }
    for tokens in FEW:
        case = {"m": tokens, "pattern": "skewed", "nnz": PATTERNS["skewed"], "d": d, "h": h}
        for row in ffn.measure(**case, only_mosaic=True):
            yield row if "failed" in row else row | {"errors": [row["error"]]}


def products(of_back_end: Engine, m: int, d: int, h: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each implementation, those of Triton last."""
    x, ((w, *_), *_) = draw(m, "skewed", 29, 1, 0, True, d=d, h=h)
    some = x[:EXACT].astype(jnp.float32)
    reference = jnp.dot(some, w.T.astype(jnp.float32), precision="highest")
    case = {"direction": "product", "m": m, "d": d, "h": h, "dtype": x.dtype.name}

    def row(name: str, out: jax.Array, measured: dict[str, Any]) -> dict[str, Any]:
        error = record.relative_error(out[:EXACT], reference)
        rate = 2 * m * d * h / measured["ms"] / 1e9
        return case | {"implementation": name, "errors": [error], "tflop_per_s": rate} | measured

    calls: dict[str, Callable] = {
        "mma.sync": engine.by(of_back_end, product),
        "wgmma": engine.by(engine.WGMMA, product),
        "xla": lambda x, w: jnp.dot(x, w.T),
    }
    for name, call in calls.items():
        run = jax.jit(call)
        yield row(name, run(x, w), {"ms": timing.milliseconds(run, x, w, calls=8)})
    if triton_product is not None and torch.cuda.is_available():
        for measured, out in triton_product.measure(*map(torch.from_dlpack, (x, w))):
            yield row("triton, mma.sync", jnp.from_dlpack(out[:EXACT].contiguous()), measured)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w^T` by the kernel of the gates, with an epilogue that stores whole tiles."""
    schedule = matmul.Schedule()
    assert len(x) % matmul.BLOCK_ROWS == 0 and len(w) % schedule.columns == 0

    def store(acc, slab, tile, out):
        _store_tile(acc, out, slab * ACC_ROWS, tile * schedule.columns)

    return matmul.matmul(
        x,
        (w,),
        store,
        out_type=jax.ShapeDtypeStruct((len(x), len(w)), x.dtype),
        scratch_types={},
        schedule=schedule,
    )


def _store_tile(acc, out, first_row, first_column) -> None:
    """Stores an accumulator to a part of `out` (GMEM, bfloat16), 16 bytes of each lane at once."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), SCALAR, SCALAR))
    def step(_, acc, out, first_row, first_column):
        lane, warp = simt.lane_and_warp()
        quad, quad_lane = arith.divui(lane, const(4)), arith.remui(lane, const(4))
        row = arith.addi(arith.muli(warp, const(16)), quad)
        row = arith.addi(first_row.registers.item(), row)
        column = arith.muli(quad_lane, const(8))
        column = arith.addi(first_column.registers.item(), column)
        registers = [
            lanes.ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", *lanes.elements(register))
            for register in acc.registers.flat
        ]
        for half in (0, 1):  # a lane's upper and lower row
            own = arith.addi(row, const(8 * half))
            address, _ = simt.element_address(out, own, column, jnp.dtype(DTYPE).itemsize)
            always = mgpu.c(1, ir.IntegerType.get_signless(1))
            lanes.store_row(address, registers[half::2], quad_lane, always)

    step(acc, out, first_row, first_column)


def blocks(pattern: str, nnz: float, m: int, d: int, h: int) -> Iterator[dict[str, Any]]:
    """Yields a row for XLA's dense block and one for unions, in each direction."""
    x, layers = draw(m, pattern, nnz, 1, 0, True, d=d, h=h)
    dy = jax.random.normal(jax.random.key(m), x.shape).astype(DTYPE)
    _, stats = jax.jit(partial(sparse_ffn, implementation="xla"))(x, *layers[0])
    reference = gradients.exact(x, layers[0], dy)
    for name in ("dense", "sparse"):
        block = partial(sparse_ffn, **gradients.BLOCKS[name])
        forward = jax.jit(lambda x, layers, block=block: [block(x, *layer)[0] for layer in layers])
        y = forward(x, layers[:1])[0]
        yield (
            describe("forward", x, layers[0], pattern, 0, stats)
            | gradients.BLOCKS[name]
            | {
                "ms": timing.milliseconds(forward, x, layers, calls=4) / LAYERS,
                "errors": [record.relative_error(y, reference[0])],
            }
        )
        measured = gradients.measure_block(
            name, 1.0 if name == "sparse" else None, x, layers, dy, reference
        )
        yield describe("forward and backward", x, layers[0], pattern, 0, stats) | measured


if __name__ == "__main__":
    main()
