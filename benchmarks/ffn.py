"""Feed-forward block, forward: every implementation against jitted dense XLA in the same process.

    python -m benchmarks.ffn [--quick | --few | --prompts | --peers | --activations | --non-gated]
        [--out DIRECTORY]
    python -m benchmarks.ffn --borders D H [--out DIRECTORY]

The latter measures what `implementation="mosaic"` takes at another width, on both sides of each
border of a rule.

Like a model, a measured function runs the block with `LAYERS` sets of weights, one after the other,
so that weights come from memory and launch gaps count. Times are per layer.
"""

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import record
from benchmarks.patterns import recorded, with_padding
from pallas_kernels.kernels import MAX_FEW_TOKENS
from twell_jax import FFNStats, Rectifier, sparse_ffn
from twell_jax.analysis import patterns, timing
from twell_jax.ffn import dispatch
from twell_jax.ffn.dispatch import MANY_TOKENS

D, H, DTYPE, LAYERS = 2048, 5632, jnp.bfloat16, 4

GOALS = [  # the cases for which the project has goals
    *({"m": 16384, "pattern": "skewed", "nnz": nnz} for nnz in (24, 29, 60, 120, 300)),
    {"m": 16384, "pattern": "skewed", "nnz": 29, "heavy_every": 100},
    *(
        {"m": 16384, "pattern": "recorded", "superposed": copies, "heavy_every": every}
        for every in (0, 1024)
        for copies in (1, 2, 3)
    ),
    {"m": 16384, "pattern": "padded"},
    *({"m": 16384, "pattern": "uniform", "nnz": nnz} for nnz in (29, 120, 1500)),
    {"m": 16384, "pattern": "skewed", "nnz": 29, "heavy_every": 1},
    *({"m": m, "pattern": "skewed", "nnz": 29} for m in (1, 8, 32)),
]
PROMPTS = [  # 65 to 1023 tokens, most with one that has nearly all active, as a prompt's first
    *({"m": m, "pattern": "recorded", "heavy_every": m} for m in (256, 512, 1023, 65, 128, 768)),
    *({"m": m, "pattern": "skewed", "nnz": 29} for m in (256, 512, 1023)),
    *({"m": m, "pattern": "skewed", "nnz": 29, "heavy_every": 1} for m in (256, 512, 1023)),
    *({"m": m, "pattern": "recorded", "heavy_every": m, "gated": False} for m in (128, 512, 1023)),
]
FEW = [  # up to 64 tokens; nearly all neurons are active for one, none or all, or a part for one
    *({"m": m, "pattern": "skewed", "nnz": 29, "heavy_every": m} for m in (1, 2, 8, 32, 64)),
    *({"m": m, "pattern": "skewed", "nnz": 29} for m in (1, 2, 8, 32, 64)),
    *({"m": m, "pattern": "skewed", "nnz": 29, "heavy_every": 1} for m in (8, 64)),
    # Where many neurons are active.
    *({"m": m, "pattern": "skewed", "nnz": 280} for m in (1, 8, 16)),
    *({"m": 32, "pattern": "skewed", "nnz": nnz} for nnz in (120, 168, 224)),
    *({"m": 64, "pattern": "skewed", "nnz": nnz} for nnz in (60, 84, 112)),
    *(  # for one, a half, a quarter or an eighth is active
        {"m": m, "pattern": "skewed", "nnz": 29, "heavy_every": m, "heavy_thresholds": thresholds}
        for m in (1, 8, 64)
        for thresholds in (0.0, 0.1, 0.35)
    ),
]
WITH_PEERS = [  # the cases in which blocks of others are measured
    {"m": 16384, "pattern": "recorded", "peers": True},
    {"m": 16384, "pattern": "skewed", "nnz": 29, "peers": True},
]
WITH_ACTIVATIONS = [  # those that are not ReLU; "relu2" is what blocks without a gate use
    *(
        {"m": m, "pattern": pattern, "nnz": nnz, "activation": activation}
        for m, pattern, nnz in ((16384, "recorded", 0), (32, "skewed", 29), (1, "skewed", 29))
        for activation in ("relu2", "fatrelu", "drelu")
    ),
    {"m": 16384, "pattern": "recorded", "activation": "relu2", "gated": False},
]
WITHOUT_GATE = [  # those without a gate projection
    {"m": 16384, "pattern": pattern, "nnz": nnz, "gated": False}
    for pattern, nnz in (("skewed", 29), ("skewed", 120), ("recorded", 0))
]
BORDERS = [  # a usual pattern, one dense token, all dense; on both sides of each rule's border
    case | {"gated": gated, "only_mosaic": True}
    for gated in (False, True)
    for case in (
        *({"m": m} for m in (1, 8, 32, 64, 65, 256, 512, 1023)),
        *({"m": m, "heavy_every": m} for m in (1, 64)),
        {"m": 64, "heavy_every": 1},
        *({"m": m, "heavy_every": every} for every in (0, 1) for m in (1024, 1536, 2048) if gated),
    )
]
_ALL = [
    *GOALS,
    *PROMPTS,
    *FEW,
    *WITH_PEERS,
    *WITH_ACTIVATIONS,
    *({"m": 16384, "pattern": "skewed", "nnz": 29, "pruned": dead} for dead in (0.3, 0.5)),
    *WITHOUT_GATE,
    *(
        {"m": m, "pattern": pattern, "nnz": nnz}
        for m in (256, 512, 1024, 2048, 4096)
        for pattern, nnz in (("skewed", 29), ("skewed", 120), ("recorded", 0))
    ),
    *({"m": 16384, "pattern": pattern, "nnz": 10} for pattern in ("skewed", "uniform")),
    *({"m": 16384, "pattern": "uniform", "nnz": nnz} for nnz in (60, 300)),
    *(
        {"m": m, "pattern": "skewed", "nnz": nnz}
        for m in (1, 8, 32, 64)
        for nnz in (10, 60, 120, 300)
    ),
]
CASES = [case for place, case in enumerate(_ALL) if case not in _ALL[:place]]  # each once


def main() -> None:
    parser = record.parser(__doc__.split("\n")[0])
    choice = parser.add_mutually_exclusive_group()
    for option, cases, which in (
        ("--quick", GOALS, "the cases of the goals"),
        ("--few", FEW, "those of up to 64 tokens"),
        ("--prompts", PROMPTS, "those of 65 to 1023 tokens"),
        ("--peers", WITH_PEERS, "those with blocks of others"),
        ("--activations", WITH_ACTIVATIONS, "those without ReLU"),
        ("--non-gated", WITHOUT_GATE, "those without a gate projection"),
    ):
        choice.add_argument(
            option, dest="cases", action="store_const", const=cases, help=f"only {which}"
        )
    choice.add_argument("--borders", nargs=2, type=int, metavar=("D", "H"), help="at this width")
    parser.set_defaults(cases=CASES)
    args = parser.parse_args()
    _, why = dispatch.back_end(jax.ShapeDtypeStruct((H, D), DTYPE))
    if why:
        parser.error(f"there are no kernels to measure: {why}")
    cases = args.cases
    if args.borders:
        d, h = args.borders
        usual = {"pattern": "skewed", "nnz": 29 * h / H, "d": d, "h": h}
        cases = [usual | case for case in BORDERS]
    rows = (row for case in cases for row in measure(**case))
    record.write_as_they_come("ffn", rows, args.out)


def measure(
    *,
    m: int,
    d: int = D,
    h: int = H,
    pattern: str,
    nnz: float = 0,
    superposed: int = 1,
    heavy_every: int = 0,
    heavy_thresholds: float = -1.0,
    gated: bool = True,
    pruned: float = 0.0,
    peers: bool = False,
    activation: str = "relu",
    only_mosaic: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each implementation of a case; the first is the baseline.

    If `pruned` is not 0, this fraction of the neurons is never active, and the kernels compute
    the layer without them. With `peers` the blocks of PEERS stand beside unions, with
    `only_mosaic` what serves if no packing is named. Heavy tokens are those of
    `patterns.with_heavy_rows`.
    """
    drawn = m, pattern, nnz, superposed, heavy_every, gated
    x, layers = draw(
        *drawn, d=d, h=h, dead=pruned or patterns.DEAD, heavy_thresholds=heavy_thresholds
    )
    float32 = jax.tree.map(lambda a: a.astype(jnp.float32), (x, *layers[0]))
    with jax.default_matmul_precision("highest"):
        block = partial(sparse_ffn, **options(activation))
        reference, stats = jax.jit(block)(*float32)
    case = describe("forward", x, layers[0], pattern, heavy_every, stats) | {
        "nnz_max": int(stats.max_nnz),
        "superposed": superposed,
        "pruned": pruned,
        "activation": activation,
    }
    baseline_ms = None
    ours = ("mosaic",) if m < MANY_TOKENS else ()
    ours += ("twell", "unions") if m > MAX_FEW_TOKENS else ()
    if only_mosaic:
        others = ("mosaic",)
    elif activation != "relu":
        others = ours
    else:
        others = ("unions", *PEERS) if peers else (*ours, *(("tokamax",) if gated else ()))
    for name in ("xla", *others):
        named = BLOCKS.get(name, {"implementation": name})
        try:
            calls = max(2, min(50, 2**17 // m))
            out, measured = timed(name, x, layers, calls, activation, without=bool(pruned))
            error = record.relative_error(out, reference)
        except Exception as problem:  # the row says so, and the others are still measured
            if baseline_ms is None:
                raise
            yield case | named | {"failed": record.failure(problem)}
            continue
        baseline_ms = baseline_ms or measured["ms"]
        compared = {
            "baseline": "xla",
            "baseline_ms": baseline_ms,
            "speedup": baseline_ms / measured["ms"],
            "error": error,
        }
        yield case | named | measured | compared


def timed(
    name: str, x: jax.Array, layers: list, calls: int, activation: str, *, without: bool
) -> tuple[Any, dict[str, Any]]:
    """y of the first layer, and what was measured per layer, "ms" and more.

    With `without` the kernels compute the layers without their dead neurons.
    """
    if name in PEERS:
        module, options = PEERS[name]
        peer = importlib.import_module(f"benchmarks.{module}")  # torch need not be there
        return peer.measure(x, layers, calls, **options)
    run = partial(stack, name=name, activation=activation)
    if name == "tokamax":
        layers = jax.tree.map(jnp.transpose, layers)
    elif name != "xla" and without:
        layers = [without_dead(x, layer) for layer in layers]
    ms = timing.milliseconds(run, x, layers, calls=calls)
    enqueue_ms = timing.enqueue_milliseconds(run, x, layers)
    return run(x, layers[:1])[0], {"ms": ms / LAYERS, "enqueue_ms": enqueue_ms / LAYERS}


def draw(
    m, pattern, nnz, superposed, heavy_every, gated, *, d=D, h=H, dead=patterns.DEAD,
    heavy_thresholds=-1.0,
):  # fmt: skip
    """x `[m, d]` and the weights of each layer; see `measure`."""
    key = jax.random.key(m + int(nnz))
    if pattern in ("recorded", "padded"):
        x, w_gate = recorded(key, m, d, DTYPE, superposed=superposed)
        x = with_padding(x) if pattern == "padded" else x
    else:
        x, w_gate = patterns.independent(key, pattern, m, d, h, nnz, DTYPE, dead=dead)
    if heavy_every:
        x = patterns.with_heavy_rows(x, heavy_every, heavy_thresholds)
    return x, [weights(jax.random.fold_in(key, layer), w_gate, gated) for layer in range(LAYERS)]


def describe(direction, x, layer, pattern, heavy_every, stats: FFNStats) -> dict[str, Any]:
    """The entries of a row that describe its case."""
    w_gate, _, w_down = layer
    m, h = len(x), len(w_down)
    return {
        "direction": direction,
        "m": m,
        "d": x.shape[1],
        "h": h,
        "dtype": jnp.dtype(DTYPE).name,
        "gated": w_gate is not None,
        "pattern": pattern,
        "nnz_mean": float(stats.nnz),
        "heavy_rows": -(-m // heavy_every) if heavy_every else 0,
    }


def weights(key: jax.Array, w_gate: jax.Array, gated: bool):
    """One layer's (w_gate, w_up, w_down), with the neurons of `w_gate` in random order."""
    h, d = w_gate.shape
    key_order, key_up, key_down = jax.random.split(key, 3)
    w_gate = w_gate[jax.random.permutation(key_order, h)]
    w_down = (jax.random.normal(key_down, (h, d)) / h**0.5).astype(DTYPE)
    if not gated:
        return None, w_gate, w_down
    return w_gate, (jax.random.normal(key_up, (h, d)) / d**0.5).astype(DTYPE), w_down


def without_dead(x: jax.Array, layer):
    """The layer without dead neurons, except for some that make H a multiple of 128."""
    _, stats = jax.jit(sparse_ffn)(x, *layer)
    order = jnp.argsort(~stats.fired)
    kept = order[: -(-int(stats.fired.sum()) // 128) * 128]
    return jax.tree.map(lambda w: w[kept], layer)


def tokamax_ffn(x, w_gate, w_up, w_down):
    """The dense block by tokamax's gated linear unit and a matmul; weights are `[D, H]`."""
    import tokamax

    h = tokamax.gated_linear_unit(x, (w_gate, w_up), activation=_relu)
    return h @ w_down.T


def _relu(g):  # jax.nn.relu with its own derivative does not lower in tokamax's kernel
    return jnp.maximum(g, 0)


BLOCKS: dict[str, dict[str, Any]] = {  # the arguments of `sparse_ffn` for each
    "xla": {"implementation": "xla"},
    "mosaic": {"implementation": "mosaic"},
    "twell": {"implementation": "mosaic", "packing": "twell"},
    "unions": {"implementation": "mosaic", "packing": "unions"},
}

# Unions with 8-bit weights and blocks that others take, for each the module that measures it and
# its options. "fast" is accumulation in fewer bits than float32 has.
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "unions, fp8 gate": ("fp8_unions", {"projections": 1}),
    "unions, fp8 gate and up": ("fp8_unions", {"projections": 2}),
    "xla, fp8 rows": ("xla_fp8", {"rows": True, "fast": False}),
    "xla, fp8 rows, fast": ("xla_fp8", {"rows": True, "fast": True}),
    "xla, fp8 tensors": ("xla_fp8", {"rows": False, "fast": False}),
    "xla, fp8 tensors, fast": ("xla_fp8", {"rows": False, "fast": True}),
    "torch": ("torch_ffn", {"fp8": False}),
    "torch, fp8 rows": ("torch_ffn", {"fp8": True, "rows": True, "fast": False}),
    "torch, fp8 rows, fast": ("torch_ffn", {"fp8": True, "rows": True, "fast": True}),
    "torch, fp8 tensors": ("torch_ffn", {"fp8": True, "rows": False, "fast": False}),
    "torch, fp8 tensors, fast": ("torch_ffn", {"fp8": True, "rows": False, "fast": True}),
    "ellpack": ("sparse_peers", {"name": "ellpack"}),
    "bcoo": ("sparse_peers", {"name": "bcoo"}),
}


def options(activation: str) -> dict[str, Any]:
    """The arguments of `sparse_ffn` for an activation."""
    return {"activation": Rectifier(threshold=0.01) if activation == "fatrelu" else activation}


@partial(jax.jit, static_argnames=("name", "activation"))
def stack(x: jax.Array, layers: list, *, name: str, activation: str) -> list[jax.Array]:
    """The block with each layer's weights in turn, all on the same x."""
    if name == "tokamax":
        return [tokamax_ffn(x, *weights) for weights in layers]
    chosen = BLOCKS[name] | options(activation)
    return [sparse_ffn(x, *weights, **chosen)[0] for weights in layers]


if __name__ == "__main__":
    main()
