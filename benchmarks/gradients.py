"""Feed-forward block, forward and backward: sparse gradients against those of jitted dense XLA.

    python -m benchmarks.gradients [--out DIRECTORY]

As in benchmarks.ffn, a measured function goes through `LAYERS` sets of weights. Rows also give the
bytes that a layer keeps for the backward, besides x and the weights, the peak memory that XLA
reserves for one layer's forward and backward, and which gradients train.py would plan. "planned"
is the block as train.py then calls it.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import record
from benchmarks.ffn import DTYPE, LAYERS, D, H, describe, draw
from twell_jax import order_by_use, sparse_ffn
from twell_jax.analysis import timing
from twell_jax.models import QUANTISED_OPTIONS
from twell_jax.train.gradient_plan import GradientPlan

M = 16384
_BLOCKS = {
    "dense": {"implementation": "xla"},
    "sparse": {"implementation": "mosaic", "packing": "unions", "gradients": "sparse"},
}
BLOCKS = {  # the arguments of `sparse_ffn` for each; the baseline first
    **_BLOCKS,
    **{f"{name}, float8": block | {"matmul_dtype": "float8"} for name, block in _BLOCKS.items()},
    "planned": {},
}
CASES = [
    {"pattern": "skewed", "nnz": 29, "in_8_bits": True},
    {"pattern": "skewed", "nnz": 60},
    {"pattern": "skewed", "nnz": 29, "capacities": (0.375,)},
    {"pattern": "recorded", "in_8_bits": True},
    *({"pattern": "recorded", "heavy_every": every} for every in (1024, 2048)),
    {"pattern": "padded"},
    *({"pattern": "skewed", "nnz": nnz} for nnz in (5, 120, 300)),
    *({"pattern": "uniform", "nnz": nnz} for nnz in (29, 120, 1500)),
    {"pattern": "skewed", "nnz": 29, "heavy_every": 1},
    {"pattern": "skewed", "nnz": 29, "gated": False},
]


def main() -> None:
    rows = (row for case in CASES for row in measure(**case))
    record.command("gradients", __doc__, rows)


def measure(
    *,
    pattern: str,
    m: int = M,
    d: int = D,
    h: int = H,
    nnz: float = 0,
    heavy_every: int = 0,
    gated: bool = True,
    capacities: tuple[float, ...] = (1.0, 0.5),
    in_8_bits: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yields a row for dense gradients, and rows for sparse ones.

    These are one with each of the capacities, and, for the same layers with their neurons "by use",
    one with the first of them and one as planned. `in_8_bits` repeats the dense row and the sparse
    one by use with products of 8-bit operands.
    """
    x, layers = draw(m, pattern, nnz, 1, heavy_every, gated, d=d, h=h)
    dy = jax.random.normal(jax.random.key(m), x.shape).astype(DTYPE)
    _, stats = jax.jit(sparse_ffn)(x, *layers[0])
    case = describe("forward and backward", x, layers[0], pattern, heavy_every, stats)
    reference = exact(x, layers[0], dy)
    dense = case | measure_block("dense", None, x, layers, dy, reference)
    baseline = {"baseline": "xla", "baseline_ms": dense["ms"]}
    yield dense | baseline | {"speedup": 1.0}
    ordered = [in_order(x, layer) for layer in layers]
    by_use = ordered, exact(x, ordered[0], dy)
    others = [("sparse", capacity, "as drawn", layers, reference) for capacity in capacities]
    others += [("sparse", capacities[0], "by use", *by_use)]
    planned = {
        "as drawn": planned_capacity(x, layers[0]),
        "by use": planned_capacity(x, ordered[0]),
    }
    others += [("planned", planned["by use"] or None, "by use", *by_use)]
    if in_8_bits:
        others += [("dense, float8", None, "as drawn", layers, reference)]
        others += [("sparse, float8", capacities[0], "by use", *by_use)]
    for name, capacity, order, of_order, reference in others:
        measured = measure_block(name, capacity, x, of_order, dy, reference)
        row = case | {"order": order} | measured
        if not name.startswith("dense"):
            row["chosen"] = f"capacity {planned[order]:g}" if planned[order] else "dense"
        yield row | baseline | {"speedup": dense["ms"] / row["ms"]}


def in_order(x: jax.Array, layer):
    """The layer with its neurons in the order that training would give them."""
    _, stats = jax.jit(sparse_ffn)(x, *layer)
    order = order_by_use(stats.tiles, stats.nnz)
    return jax.tree.map(lambda rows: rows[order], layer)


def exact(x, layer, dy):
    """y and the gradients of a layer, in float32."""
    float32 = jax.tree.map(lambda a: a.astype(jnp.float32), (x, *layer, dy))
    with jax.default_matmul_precision("highest"):
        return programs("dense")[1](*float32)[0]


def measure_block(name: str, capacity: float | None, x, layers, dy, reference) -> dict[str, Any]:
    """The entries of a row for these gradients. "errors" are those of y and of each gradient."""
    operands = x, *layers[0]
    ffn, _, layered = programs(name, capacity)
    both = compiled(name, capacity, *jax.tree.map(jax.typeof, (*operands, dy)))
    out, overflow = both(*operands, dy)
    pairs = zip(*map(jax.tree.leaves, (out, reference)), strict=True)
    row = (
        {"implementation": name}
        | BLOCKS[name]
        | {
            "ms": timing.milliseconds(layered, x, layers, dy, calls=4) / LAYERS,
            "errors": [record.relative_error(grad, ref) for grad, ref in pairs],
            "kept_bytes": kept_bytes(ffn, operands),
            "peak_bytes": both.memory_analysis().temp_size_in_bytes,
        }
    )
    if capacity:
        _, stats = jax.jit(sparse_ffn)(*operands)
        row |= {"gradient_capacity": capacity, "overflow": float(overflow)}
        row |= {"union": float(stats.union), "listed": float(stats.listed)}
    return row


@cache
def programs(name: str, capacity: float | None = None):
    """The block, and jitted forward and backward of one layer and of several."""
    options = BLOCKS[name] | ({"gradients": capacity} if capacity else {})
    ffn = partial(sparse_ffn, **options)
    in_8_bits = "matmul_dtype" in options
    jit = partial(jax.jit, compiler_options=QUANTISED_OPTIONS if in_8_bits else None)
    return ffn, jit(partial(forward_and_backward, ffn)), jit(partial(stack, ffn))


@cache  # unlike jit, this knows the peak memory, but would compile again for every row
def compiled(name: str, capacity: float | None, *types) -> jax.stages.Compiled:
    """The second of `programs`, for operands of these types."""
    _, both, _ = programs(name, capacity)
    return both.lower(*types).compile()


def planned_capacity(x, layer) -> float:
    """That of the gradients that train.py plans for a layer that measures this; 0 if dense."""
    _, stats = jax.jit(sparse_ffn)(x, *layer)
    plan = GradientPlan.dense(1).revised([float(stats.union)], [float(stats.listed)], [0])
    return plan.announced[0]


def forward_and_backward(ffn, x, w_gate, w_up, w_down, dy):
    """(y, the gradients of sum(y dy)), overflow. XLA would skip a matmul if y were not returned."""
    y, vjp, stats = jax.vjp(ffn, x, w_gate, w_up, w_down, has_aux=True)
    return (y, vjp(dy)), stats.overflow


def stack(ffn, x, layers: list, dy):
    """Forward and backward of each layer in turn, all on the same x."""
    return [forward_and_backward(ffn, x, *weights, dy)[0] for weights in layers]


def kept_bytes(ffn, operands) -> int:
    """The bytes that the forward keeps for the backward, besides its operands."""
    _, vjp, _ = jax.eval_shape(lambda *operands: jax.vjp(ffn, *operands, has_aux=True), *operands)
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(vjp))
    return size - sum(a.nbytes for a in jax.tree.leaves(operands))


if __name__ == "__main__":
    main()
