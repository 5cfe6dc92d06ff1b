"""A product of bfloat16 by Triton without WGMMA: what others make of `mma.sync`.

Triton multiplies by WGMMA on Hopper unless its environment says otherwise, before it compiles.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks import torch_decoder

os.environ["DISABLE_MMA_V3"] = "1"
_GROUP = 16  # tiles of rows that follow each other, for reuse in L2
TILES = (  # rows, columns, K, stages, warps: the fastest of 42, by a working measurement
    (128, 128, 64, 4, 4),
    (128, 256, 64, 4, 8),
    (256, 128, 64, 4, 8),
    (128, 128, 64, 3, 4),
)


@triton.jit
def _kernel(
    a, b, out, M, N, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BN)
    first = tl.program_id(0) // (GROUP * columns) * GROUP
    rows = min(tl.cdiv(M, BM) - first, GROUP)
    inside = tl.program_id(0) % (GROUP * columns)
    m = (first + inside % rows) * BM + tl.arange(0, BM)
    n = inside // rows * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_tile, b_tile = a + m[:, None] * K + k[None, :], b + n[None, :] * K + k[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, K // BK):
        total = tl.dot(tl.load(a_tile), tl.load(b_tile), total)
        a_tile += BK
        b_tile += BK
    tl.store(out + m[:, None] * N + n[None, :], total.to(tl.bfloat16))


def measure(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """For each of `TILES` what it is, with its milliseconds, and `a @ b.T`.

    Args:
      a, b: bfloat16 `[M, K]` and `[N, K]`; M and N are multiples of 256, K of 64.

    Raises:
      RuntimeError: it was compiled to WGMMA.
    """
    (m, k), n = a.shape, len(b)
    for rows, columns, step, stages, warps in TILES:
        out = torch.empty(m, n, dtype=a.dtype, device=a.device)

        def call(rows=rows, columns=columns, step=step, stages=stages, warps=warps, out=out):
            grid = (triton.cdiv(m, rows) * triton.cdiv(n, columns),)
            tile = {"BM": rows, "BN": columns, "BK": step, "GROUP": _GROUP}
            return _kernel[grid](a, b, out, m, n, k, **tile, num_warps=warps, num_stages=stages)

        code = call().asm["ptx"]
        if "mma.sync" not in code or "wgmma" in code:
            raise RuntimeError("Triton did not multiply by mma.sync")
        ms = torch_decoder.milliseconds(call, calls=8)
        yield (
            {"config": f"{rows} x {columns} x {step}, {stages} stages, {warps} warps", "ms": ms},
            out,
        )
