"""The block of `twell_jax.torch` on a GPU, beside torch's dense block, eager and compiled.

    python -m benchmarks.torch_block [--directions ...] [--published CHECKOUT] [--out DIRECTORY]

All are called from Python as a model calls them, first forward through `LAYERS` layers, then, with
gradients, backward through all; so what the host takes for a call is part of the time. The weights
of w_down are a view of `[D, H]`, as models have them; in rows "kernels, laid out" they are `[H, D]`
in memory, as after `lay_out`, and so they are for the published kernels, of which there are rows,
too, with a checkout of them. Rows "kernels, by use" have the neurons as after `order_by_use`, rows
"kernels, prepared" both.
"forward, CUDA graph" has all layers in a graph, as servers do for few tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import torch

from benchmarks import published, record, torch_decoder
from benchmarks.ffn import LAYERS, describe, draw
from benchmarks.torch_ffn import compiled, dense_block
from twell_jax import order_by_use
from twell_jax import sparse_ffn as in_jax
from twell_jax.torch import sparse_ffn

FORWARD, GRAPH, BOTH = "forward", "forward, CUDA graph", "forward and backward"
# Mean non-zeros, where they are drawn. Of the last, 256 tokens use all neurons.
PATTERNS = {"recorded": 0, "skewed": 29, "uniform": 1497}
SPARSE = ("recorded", "skewed")
CASES = [  # direction, pattern, tokens, and that each so many-th token is dense
    *((GRAPH, "recorded", m, 0) for m in (1, 8, 64)),
    *((FORWARD, pattern, m, 0) for m in (16384, 8192, 4096, 2048) for pattern in SPARSE),
    *((BOTH, pattern, m, 0) for m in (16384, 8192, 4096) for pattern in SPARSE),
    *((direction, "recorded", 16384, 512) for direction in (FORWARD, BOTH)),
    *((direction, "uniform", m, 0) for direction in (FORWARD, BOTH) for m in (16384, 8192)),
]
BASELINE = "torch, compiled"
WRONG = 0.1  # relative error of a token's y

type Operands = list[torch.Tensor]


def main() -> None:
    parser = record.parser(__doc__)
    directions = (FORWARD, GRAPH, BOTH)
    parser.add_argument("--directions", nargs="+", choices=directions, default=directions)
    parser.add_argument("--published", type=Path, metavar="CHECKOUT")
    args = parser.parse_args()
    cases = (case for case in CASES if case[0] in args.directions)
    rows = (row for case in cases for row in measure(*case, checkout=args.published))
    record.write_as_they_come("torch_block", rows, args.out)


def measure(
    direction: str, pattern: str, m: int, dense_every: int, *, checkout: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Yields a row for each implementation.

    "errors" are those of y and of the gradients, "wrong_rows" the tokens whose y is further off
    than `WRONG`.
    """
    x, layers = draw(m, pattern, PATTERNS[pattern], 1, dense_every, True)
    _, stats = jax.jit(in_jax)(x, *layers[0])
    case = describe(direction, x, layers[0], pattern, dense_every, stats)
    tokens = torch.from_dlpack(x).clone()
    triples = [_as_in_models(*map(torch.from_dlpack, layer)) for layer in layers]
    run = partial(_passes, torch.randn_like(tokens) if direction == BOTH else None)
    (reference,) = run(dense_block, [_leaves(tokens.float(), triples[0], direction)])
    torch.compiler.reset()  # it compiles a function for so many shapes, and no more
    blocks: dict[str, Callable] = {"torch": dense_block}
    blocks[BASELINE], worked = compiled(dense_block, *_leaves(tokens, triples[0], direction))
    blocks["kernels"] = partial(sparse_ffn, implementation="mosaic")
    laid_out, by_use, prepared = "kernels, laid out", "kernels, by use", "kernels, prepared"
    further = {GRAPH: [laid_out], FORWARD: [laid_out, prepared], BOTH: [by_use, prepared]}
    blocks |= dict.fromkeys(further[direction], blocks["kernels"])
    if checkout is not None and direction != GRAPH:
        form = published.differentiable if direction == BOTH else published.forward
        blocks["published"] = form(checkout)
    rows = []
    for name, block in blocks.items():
        given, expected = triples, reference
        if name in (by_use, prepared):
            orders = [_order(x, layer) for layer in layers]
            given = [_moved(*pair) for pair in zip(given, orders, strict=True)]
            expected = [*reference[:2], *(a[orders[0]] for a in reference[2:])]
        if name in (laid_out, prepared, "published"):
            given = [_contiguous(*triple) for triple in given]
        leaves = [_leaves(tokens, triple, direction) for triple in given]
        row = _timed(partial(run, block), leaves, expected, captured=direction == GRAPH)
        rows.append(case | {"implementation": name} | row)
    (baseline,) = (row for row in rows if row["implementation"] == BASELINE)
    baseline["compiled"] = worked
    for row in rows:
        yield row | {"baseline": BASELINE, "speedup": baseline["ms"] / row["ms"]}


def _order(x: jax.Array, layer: Sequence[jax.Array]) -> torch.Tensor:
    _, stats = jax.jit(in_jax)(x, *layer)
    return torch.from_dlpack(order_by_use(stats.tiles, stats.nnz)).long()


def _moved(triple: Operands, order: torch.Tensor) -> Operands:
    return _as_in_models(*(a[order] for a in triple))


def _timed(
    run: Callable, layers: list[Operands], reference: Operands, *, captured: bool
) -> dict[str, Any]:
    (out,) = run(layers[:1])
    call = partial(run, layers)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ys = call()  # noqa: F841 (memory that the graph writes)
        call = graph.replay
    ms = torch_decoder.milliseconds(call, calls=8) / LAYERS
    off = (out[0].float() - reference[0]).norm(dim=1) / reference[0].norm(dim=1)
    return {
        "ms": ms,
        "errors": [_error(*pair) for pair in zip(out, reference, strict=True)],
        "wrong_rows": int((~(off < WRONG)).sum()),
    }


def _passes(dy: torch.Tensor | None, block: Callable, layers: list[Operands]) -> list[Operands]:
    """y of each layer, and the gradients for its operands if there is that for y."""
    with torch.set_grad_enabled(dy is not None):
        ys = [block(*operands) for operands in layers]
    if dy is None:
        return [[y] for y in ys]
    leaves = [a for operands in layers for a in operands]
    found = iter(torch.autograd.grad(ys, leaves, [dy.to(y.dtype) for y in ys]))
    return [[y, *(next(found) for _ in operands)] for y, operands in zip(ys, layers, strict=True)]


def _as_in_models(w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> Operands:
    """Copies, of w_down a view of its transpose."""
    return [w_gate.clone(), w_up.clone(), w_down.t().contiguous().t()]


def _contiguous(w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> Operands:
    return [w_gate, w_up, w_down.contiguous()]


def _leaves(tokens: torch.Tensor, triple: Operands, direction: str) -> Operands:
    """The operands of a block in the dtype of the tokens; of both passes all have gradients."""
    operands = [a.detach().to(tokens.dtype) for a in (tokens, *triple)]
    return [a.requires_grad_(direction == BOTH) for a in operands]


def _error(out: torch.Tensor, reference: torch.Tensor) -> float:
    out, reference = out.double(), reference.double()
    return ((out - reference).norm() / reference.norm()).item()


if __name__ == "__main__":
    main()
