"""The block of `twell_jax.torch` on a GPU, beside torch's dense block, eager and compiled.

    python -m benchmarks.torch_block [--out DIRECTORY]

All are called from Python, one layer of `LAYERS` after the other, as a model calls them; so what
the host takes for a call is part of the time. The weights of w_down are a view of `[D, H]`, as
models have them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import torch

from benchmarks import record, torch_decoder
from benchmarks.ffn import LAYERS, describe, draw
from benchmarks.torch_ffn import compiled, dense_block
from twell_jax import sparse_ffn as in_jax
from twell_jax.torch import sparse_ffn

FORWARD, BOTH = "forward", "forward and backward"
PATTERNS = {"recorded": 0, "skewed": 29}  # mean non-zeros, where they are drawn
CASES = [
    *((FORWARD, pattern, m) for m in (1024, 2048, 4096, 8192, 16384) for pattern in PATTERNS),
    *((BOTH, pattern, m) for m in (4096, 8192, 16384) for pattern in PATTERNS),
]
BASELINE = "torch, compiled"

type Operands = list[torch.Tensor]


def main() -> None:
    rows = (row for case in CASES for row in measure(*case))
    record.command("torch_block", __doc__, rows)


def measure(direction: str, pattern: str, m: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each implementation; "errors" are those of y and of the gradients."""
    x, layers = draw(m, pattern, PATTERNS[pattern], 1, 0, True)
    _, stats = jax.jit(in_jax)(x, *layers[0])
    case = describe(direction, x, layers[0], pattern, 0, stats)
    tokens = torch.from_dlpack(x).clone()
    triples = [_as_in_models(*map(torch.from_dlpack, layer)) for layer in layers]
    dy = torch.randn_like(tokens)
    function = partial(_both, dy) if direction == BOTH else _forward
    reference = function(dense_block, *_leaves(tokens.float(), triples[0], direction))
    blocks: dict[str, Callable] = {"torch": dense_block}
    blocks[BASELINE], worked = compiled(dense_block, *_leaves(tokens, triples[0], direction))
    blocks["kernels"] = partial(sparse_ffn, implementation="mosaic")
    times: dict[str, float] = {}
    rows = []
    for name, block in blocks.items():
        leaves = [_leaves(tokens, triple, direction) for triple in triples]
        out = function(block, *leaves[0])
        pairs = zip(out, reference, strict=True)
        run = partial(_in_turn, function, block, leaves)
        times[name] = torch_decoder.milliseconds(run, calls=8) / LAYERS
        row = {"implementation": name, "ms": times[name]}
        errors = {"errors": [_error(ours, theirs) for ours, theirs in pairs]}
        rows.append(case | row | errors | ({"compiled": worked} if name == BASELINE else {}))
    for row in rows:
        yield row | {"baseline": BASELINE, "speedup": times[BASELINE] / row["ms"]}


def _as_in_models(w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> Operands:
    """Copies, of w_down a view of its transpose."""
    return [w_gate.clone(), w_up.clone(), w_down.t().contiguous().t()]


def _leaves(tokens: torch.Tensor, triple: Operands, direction: str) -> Operands:
    """The operands of a block in the dtype of the tokens; of both passes all have gradients."""
    operands = [a.detach().to(tokens.dtype) for a in (tokens, *triple)]
    return [a.requires_grad_(direction == BOTH) for a in operands]


def _forward(block: Callable, *operands: torch.Tensor) -> Operands:
    with torch.no_grad():
        return [block(*operands)]


def _both(dy: torch.Tensor, block: Callable, *operands: torch.Tensor) -> Operands:
    y = block(*operands)
    return [y, *torch.autograd.grad(y, operands, dy.to(y.dtype))]


def _in_turn(function: Callable, block: Callable, leaves: list[Operands]) -> None:
    for operands in leaves:
        function(block, *operands)


def _error(out: torch.Tensor, reference: torch.Tensor) -> float:
    out, reference = out.double(), reference.double()
    return ((out - reference).norm() / reference.norm()).item()


if __name__ == "__main__":
    main()
