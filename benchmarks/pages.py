"""Defines the pages of docs/results: a table for each benchmark.

A new benchmark adds its table to TABLES; the name of the benchmark in a record picks the table and
names the page, docs/results/NAME.md.
"""

from benchmarks import plots, soak_tables, training_tables
from benchmarks.study import report
from benchmarks.tables import (
    UNKNOWN,
    Cell,
    Row,
    Table,
    block,
    error,
    gib,
    grouped,
    milliseconds,
    number,
    yes,
)


def _gigabytes(key: str) -> Cell:
    return lambda row: f"{row[key] / 1e9:.2f}"


def _energy(row: Row) -> str:
    return f"{row['joules_per_token'] * 1e3:,.2f} ({row['energy']:.2f}x)"


def _generate(row: Row) -> str:
    """The rates of `generate`, greedy and sampled, as shares of the rate of the steps alone."""
    rates = [row[f"generate_{how}"] for how in ("greedy", "sampled") if f"generate_{how}" in row]
    return " / ".join(f"{rate / row['tokens_per_second']:.0%}" for rate in rates) or UNKNOWN


def _gradients(row: Row) -> str:
    named = [row["implementation"]]
    if row["implementation"] == "planned":
        named = [row["order"], "as planned"]
    elif "gradient_capacity" in row:
        named = [row["order"], f"capacity {row['gradient_capacity']:g}"]
    return ", ".join([*named, *([row["matmul_dtype"]] if "matmul_dtype" in row else [])])


def _chosen(row: Row) -> str:
    # Records of 2026-11-24 and before call the capacity "room".
    return row["chosen"].replace("room", "capacity")


def _with_packings(rows: list[Row]) -> list[Row]:
    """Each row with its packing under this name; the first records had it as "implementation"."""
    return [
        {**row, "implementation": "mosaic", "packing": row["implementation"]}
        if row["implementation"] in ("twell", "unions")
        else row
        for row in rows
    ]


def _fastest(rows: list[Row]) -> list[Row]:
    """Of the tuning: the fastest configuration for each kernel and shape, and all times."""
    groups = grouped(rows, lambda row: (row["kernel"], row["m"], row["d"], row["h"]))
    measured = [[row for row in group if "ms" in row] for group in groups]  # some may not fit
    return [
        {**min(group, key=lambda row: row["ms"]), "all_ms": [row["ms"] for row in group]}
        for group in measured
        if group
    ]


TABLES: dict[str, Table] = {
    "ffn": Table(
        title="Feed-forward block, forward",
        about="bfloat16. Each case is measured in one process: milliseconds, "
        'in brackets the speed-up over jitted dense XLA, "xla". "twell" and "unions" are the '
        'packed formats of the gate, "mosaic" is what serves if none is named. "copies" of '
        'the recorded pattern are superposed. In "dense rows" nearly every neuron is active, or as '
        'many as "most nnz" says. "pruned" is a share of neurons that are never active: the '
        'kernels compute the layer without them, XLA and tokamax with them. "fp8" blocks quantise '
        "weights beforehand, x and (if dense) h in the block, with a scale for each row or for a "
        'tensor; "fast" sums in fewer bits than float32 has. "ellpack" and "bcoo" are other sparse '
        'formats, through XLA. "error" is that against float32, in the order of the columns or '
        'one if all agree, "against XLA in 8 bits" that against dense XLA with the same quantised '
        "weights.",
        case={
            "D x H": lambda row: f"{row['d']} x {row['h']}",
            "M": number("m"),
            "pattern": number("pattern"),
            "copies": number("superposed"),
            "gated": yes("gated"),
            "activation": lambda row: row["activation"] if row["activation"] != "relu" else UNKNOWN,
            "pruned": lambda row: f"{row['pruned']:.0%}" if row["pruned"] else UNKNOWN,
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "most nnz": number("nnz_max"),
            "dense rows": number("heavy_rows"),
        },
        name=block,
        results={
            "ms": milliseconds,
            "error": error("error"),
            "against XLA in 8 bits": error("twin_error"),
        },
        lines=_with_packings,
        plots={"": plots.speedup},
        drawn=plots.has_lines,
    ),
    "gradients": Table(
        title="Feed-forward block, forward and backward",
        about="M = 16384, D = 2048, H = 5632, bfloat16; four layers one after the other, nothing "
        'rematerialised. Milliseconds; "xla" is dense, the others have sparse gradients, in '
        "brackets their speed-up over dense XLA. Neurons are in random order, as drawn, or in that "
        'of `order_by_use`, in which train.py puts them. "float8" has 8-bit operands, with sparse '
        "gradients in the product of the forward gate alone. The last columns are in the order of "
        'those before, or have one value if all agree. "train.py takes" is what '
        '`sparse_gradients_every` comes to, and "as planned" the block with it, which, unlike the '
        'baseline, also computes the gradient of l1, as training does; "kept" is what the forward '
        'keeps for the backward besides x and the weights, and "peak" what XLA reserves for one '
        'layer, both in GB. "error" is the largest of those of y and of the gradients.',
        case={
            "pattern": number("pattern"),
            "gated": yes("gated"),
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "dense rows": number("heavy_rows"),
        },
        name=_gradients,
        results={
            "ms": milliseconds,
            "train.py takes": _chosen,
            "kept": _gigabytes("kept_bytes"),
            "peak": _gigabytes("peak_bytes"),
            "error": lambda row: error("error")({"error": max(row["errors"])}),
        },
    ),
    "torch_block": Table(
        title="The block in PyTorch",
        about="D = 2048, H = 5632, bfloat16; forward through four layers, then backward if that is "
        "measured, called from Python. Milliseconds of a layer, in brackets the speed-up over "
        "torch's compiled dense block. "
        '"error" is the largest of those of y and of the gradients; of wrong rows y is a tenth off '
        "or more.",
        case={
            "passes": number("direction"),
            "M": number("m"),
            "pattern": number("pattern"),
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "dense rows": number("heavy_rows"),
        },
        name=block,
        results={
            "ms": milliseconds,
            "error": lambda row: error("error")({"error": max(row["errors"])}),
            "wrong rows": lambda row: str(row.get("wrong_rows", "")),
        },
    ),
    "torch_scoring": Table(
        title="Whole models in PyTorch",
        about="A Llama of transformers in bfloat16 scores text, called from Python: as it is, and "
        "after `replace_mlps`. Random weights with which, layer by layer, as many neurons are "
        "active as in a trained model. In brackets is the speed-up over the faster dense model. "
        "Errors are those of the cross-entropies of all tokens and of the logits after each "
        "sequence, against the same model whose feed-forward modules compute in float32.",
        case={
            "model": number("model"),
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "sequences": lambda row: f"{row['batch']} x {row['context']}",
            "at a time": number("micro_batch"),
        },
        name=block,
        results={
            "ms": milliseconds,
            "tokens/s": number("tokens_per_second", "{:,.0f}"),
            "error": error("error"),
            "logits": error("logits_error"),
            "computed by": number("computed_by"),
        },
    ),
    "inference": Table(
        title="Whole models at inference",
        about="Random weights with which, layer by layer, as many neurons are active as in a "
        "trained model; for the first token of every sequence most are. In brackets are ratios to "
        'the faster dense model of the same case. "mosaic" takes unions from 1024 tokens on, the '
        "dense block for fewer, and the kernels for few tokens up to 64. Energy is the GPU's own "
        "counter over 5 s, peak memory is what XLA states for the compiled call, in GiB. "
        '"generate" is what `generate` reports of decoding, greedy and at temperature 0.8, the '
        "host's work included, as a share of the rate of the steps alone. Errors are those of "
        "logits: against the dense bfloat16 model of the same function, against the same weights "
        "in float32, and against what XLA computes of the same 8-bit weights. Of scoring the first "
        'is that of cross-entropies, and "logits" that of logits. "fp8" models have 8-bit '
        'weights: "all" are those of attention and of the feed-forward blocks, and the head. '
        '"torch, silu" is a plain dense decoder in torch, captured in a CUDA graph.',
        case={
            "model": number("model"),
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "direction": number("direction"),
            "sequences": lambda row: f"{row['batch']} x {row['context']}",
            "block": block,
        },
        results={
            "ms": milliseconds,
            "tokens/s": number("tokens_per_second", "{:,.0f}"),
            "generate": _generate,
            "mJ/token": _energy,
            "peak": gib("peak_bytes"),
            "error": error("error"),
            "logits": error("logits_error"),
            "against float32": error("float32_logits_error"),
            "against XLA in 8 bits": error("twin_logits_error"),
        },
    ),
    "start": Table(
        title="From the command to the second token",
        about="Seconds from the start of `python -m twell_jax.generate` to the second token, as "
        'medians. "fresh" starts find nothing that was kept of what JAX traces and compiles, those '
        '"again" do; "imports" are a part of both.',
        case={"model": number("model"), "start": number("start")},
        results={
            "s": number("seconds", "{:.1f}"),
            "least and most": lambda row: f"{min(row['runs']):.1f} / {max(row['runs']):.1f}",
        },
    ),
    "losses": training_tables.LOSSES,
    "precision": training_tables.PRECISION,
    "lasso": training_tables.LASSO,
    "wallclock": training_tables.WALLCLOCK,
    "training": training_tables.STEPS,
    "soak": soak_tables.PATTERNS,
    "soak_decoding": soak_tables.DECODING,
    "soak_shapes": soak_tables.SHAPES,
    "live": Table(
        title="Live width",
        about="D = 2048, H = 5632, bfloat16, skewed pattern with a mean of 29 non-zeros; four "
        "layers in one loop, the last neurons of each are dead. Each case is measured in one "
        'process: milliseconds, in brackets the speed-up over dense XLA. "live" are the same '
        'kernels with the number of live neurons of each layer on the device; "gain" is the time '
        "without this number over the time with it.",
        case={
            "M": number("m"),
            "dead by layer": lambda row: ", ".join(f"{share:.0%}" for share in row["dead"]),
        },
        name=block,
        results={
            "ms": milliseconds,
            "gain": lambda row: f"{row['gain']:.2f}" if block(row) == "live" else UNKNOWN,
            "error": error("error"),
        },
    ),
    "around": Table(
        title="Kernels around the block",
        about="Passes of a layer that bytes limit, in bfloat16: the gradients of an RMSNorm and "
        "its residual; gradients in 8 bits by rows and by columns, all parts but the last rotated "
        "back if there are heads. In brackets the speed-up over XLA on what defines the kernel. "
        "GB/s are the bytes that must be read and written, over the time. Errors are against "
        "float32, so those of 8 bits are of rounding.",
        case={
            "operation": number("operation"),
            "M": number("m"),
            "widths": lambda row: ", ".join(map(str, row["widths"])),
            "head": lambda row: str(row["head_dim"] or UNKNOWN),
        },
        name=block,
        results={
            "ms": milliseconds,
            "GB/s": number("gb_per_s", "{:,.0f}"),
            "error": error("error"),
        },
    ),
    "engines": Table(
        title="Kernels by mma.sync, on a Hopper GPU",
        about="D = 2048, H = 5632, bfloat16: the kernels as GPUs without WGMMA run them, in 99 KB "
        "of shared memory. These GPUs themselves were not measured. Products are of all tokens "
        "with the gate's weights; those of Triton, which then has no WGMMA either, are the fastest "
        "of some tiles. Blocks of many tokens are unions; in brackets their speed-up over the "
        'three or nine products of a dense block, each by mma.sync as above; "xla" is the dense '
        "block by Hopper's own products. Those of few tokens are compared with it. "
        '"error" is the largest of those of the results.',
        case={
            "direction": number("direction"),
            "M": number("m"),
            "pattern": number("pattern"),
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "implementation": lambda row: row["implementation"].replace("mosaic", "mma.sync"),
            "tile": number("config"),
        },
        results={
            "ms": milliseconds,
            "TFLOP/s": number("tflop_per_s", "{:.0f}"),
            "error": lambda row: error("error")({"error": max(row["errors"])}),
        },
    ),
    "tune": Table(
        title="Tile sizes and pipelines of the kernels",
        about="The fastest configuration of each kernel alone, of those that were tried, and the "
        "times of all.",
        case={
            "kernel": number("kernel"),
            "M": number("m"),
            "D": number("d"),
            "H": number("h"),
        },
        results={
            "fastest configuration": number("config", "`{}`"),
            "ms": number("ms", "{:.3f}"),
            "all, ms": lambda row: ", ".join(f"{ms:.3f}" for ms in row["all_ms"]),
        },
        lines=_fastest,
    ),
    "quantised": Table(
        title="Trained models with 8-bit weights",
        about="Held-out text of the run that trained the model, read densely by XLA in bfloat16, "
        'but for "float32". Weights of the named projections are e4m3 with a scale for each '
        "output, and what they are multiplied with is quantised token by token; "
        '"all" are those of attention and of the feed-forward blocks, and the head. In brackets '
        'is the standard error over sequences. "changed" are the activations that are non-zero in '
        "one of the two models alone, as a share of those that are in bfloat16.",
        case={
            "run": number("run"),
            "sequences": number("sequences"),
            "tokens": number("tokens", "{:,}"),
            "weights": number("implementation"),
        },
        results={
            "cross-entropy": number("ce", "{:.4f}"),
            "over bfloat16": lambda row: f"{row['increase']:+.3%} ({row['uncertainty']:.3%})",
            "non-zero, over bfloat16": number("fired", "{:.2%}"),
            "changed": number("changed", "{:.2%}"),
        },
    ),
    "study": report.TABLE,
}
