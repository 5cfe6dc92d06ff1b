"""The dense feed-forward block by torch: in the dtype of x, or with FP8 operands.

FP8 products are `torch._scaled_mm`; torch.compile fuses what is between them, if it can here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from benchmarks import record, torch_decoder

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


class Scaled(NamedTuple):
    """A matrix `values * scale`: e4m3 `[N, K]`, and float32 `[N, 1]`, or `[]` for the tensor."""

    values: torch.Tensor
    scale: torch.Tensor


def measure(
    x: jax.Array, layers: list, calls: int, *, fp8: bool, rows: bool = True, fast: bool = True
) -> tuple[np.ndarray, dict[str, Any]]:
    """Times the block with each layer's weights in turn, as one CUDA graph.

    Args:
      x: bfloat16 `[M, D]` on a GPU; each layer quantises it anew, and its h.
      layers: triples of bfloat16 `[H, D]`, quantised beforehand.
      calls: how many calls are queued at a time.
      fp8: whether operands are FP8.
      rows: whether each row of an operand has a scale of its own.
      fast: whether tensor cores may keep their sums in fewer bits than float32 has.

    Returns:
      y of the first layer in float32; "ms" per layer, and "compiled", whether torch.compile worked.
    """
    tokens, *weights = map(torch.from_dlpack, (x, *(w for layer in layers for w in layer)))
    triples = [weights[i : i + 3] for i in range(0, len(weights), 3)]
    function: Callable = dense_block
    if fp8:
        triples = [prepare(triple, rows=rows) for triple in triples]

        def function(x, gate, up, down):
            return fp8_block(x, gate, up, down, rows=rows, fast=fast)

    with torch.inference_mode():
        function, is_compiled = compiled(function, tokens, *triples[0])
        run = torch_decoder.captured(lambda: [function(tokens, *triple) for triple in triples])
        y = run()[0].float().cpu().numpy()
        ms = torch_decoder.milliseconds(run, calls) / len(triples)
    return y, {"ms": ms, "compiled": is_compiled}


def compiled(function: Callable, *operands: Any) -> tuple[Callable, bool]:
    """The function by torch.compile and True; itself and False where that fails on the operands."""
    fused = torch.compile(function, dynamic=False)
    try:
        fused(*operands)
    except Exception as problem:  # it needs Triton and a C compiler, and raises many kinds
        print(record.failure(problem), flush=True)
        return function, False
    return fused, True


def prepare(triple: list[torch.Tensor], *, rows: bool) -> list[Scaled]:
    """Weights as the products take them: gate and up `[H, D]`, down `[D, H]`."""
    w_gate, w_up, w_down = triple
    return [quantised(w.contiguous(), rows=rows) for w in (w_gate, w_up, w_down.T)]


def dense_block(x, w_gate, w_up, w_down) -> torch.Tensor:
    """relu(x w_gate^T) * (x w_up^T) w_down."""
    return (torch.relu(x @ w_gate.T) * (x @ w_up.T)) @ w_down


def fp8_block(x, gate: Scaled, up: Scaled, down: Scaled, *, rows: bool, fast: bool) -> torch.Tensor:
    """relu(x gate^T) * (x up^T) down^T, with x and h quantised as the weights are."""
    q = quantised(x, rows=rows)
    h = torch.relu(product(q, gate, fast)) * product(q, up, fast)
    return product(quantised(h, rows=rows), down, fast)


def quantised(a: torch.Tensor, *, rows: bool) -> Scaled:
    """A matrix with a scale for each row, or one for all."""
    largest = a.abs().amax(-1, keepdim=True) if rows else a.abs().amax()
    scale = (largest.float() / LARGEST).clamp(min=1e-12)
    return Scaled((a.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale)


def product(a: Scaled, b: Scaled, fast: bool) -> torch.Tensor:
    """a b^T, rounded to bfloat16."""
    return torch._scaled_mm(
        a.values,
        b.values.T,
        scale_a=a.scale,
        scale_b=b.scale.T if b.scale.ndim else b.scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
