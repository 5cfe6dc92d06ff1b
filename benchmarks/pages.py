"""Defines the pages of docs/results: a table for each benchmark.

A new benchmark adds its table to TABLES; the name of the benchmark in a record picks the table and
names the page, docs/results/NAME.md.
"""

from benchmarks import plots, soak_tables
from benchmarks.study import report
from benchmarks.tables import (
    UNKNOWN,
    Cell,
    Row,
    Table,
    block,
    error,
    grouped,
    milliseconds,
    number,
    yes,
)


def _gib(key: str) -> Cell:
    """Bytes in GiB; a program that comes from the compilation cache states 0."""
    return lambda row: f"{row[key] / 2**30:.1f}" if row[key] else UNKNOWN


def _gigabytes(key: str) -> Cell:
    return lambda row: f"{row[key] / 1e9:.2f}"


def _energy(row: Row) -> str:
    return f"{row['joules_per_token'] * 1e3:,.2f} ({row['energy']:.2f}x)"


def _generate(row: Row) -> str:
    """The rates of `generate`, greedy and sampled, as shares of the rate of the steps alone."""
    rates = [row[f"generate_{how}"] for how in ("greedy", "sampled") if f"generate_{how}" in row]
    return " / ".join(f"{rate / row['tokens_per_second']:.0%}" for rate in rates) or UNKNOWN


def mesh(row: Row) -> str:
    """The mesh of a row, data x fsdp."""
    return f"{row['devices'] // row['fsdp']} x {row['fsdp']}"


def _tokens_of_mesh(row: Row) -> str:
    share = f" ({row['efficiency']:.0%})" if row["devices"] > 1 and "efficiency" in row else ""
    return f"{row['tokens_per_second']:,.0f}{share}"


def _gradients(row: Row) -> str:
    if "gradient_capacity" not in row:
        return row["implementation"]
    return f"{row['order']}, capacity {row['gradient_capacity']:g}"


def _chosen(row: Row) -> str:
    # Records of 2026-11-24 and before call the capacity "room".
    return row["chosen"].replace("room", "capacity")


def _over_dense(rows: list[Row]) -> list[Row]:
    """Each row with its speed-up over the dense ReLU model on the same mesh, if that is there."""
    dense = {
        mesh(row): row["tokens_per_second"]
        for row in rows
        if row["implementation"] == "xla, relu" and "tokens_per_second" in row
    }
    return [
        {**row, "speedup": row["tokens_per_second"] / dense[mesh(row)]}
        if "tokens_per_second" in row and mesh(row) in dense
        else row
        for row in rows
    ]


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


def _common_settings(rows: list[Row]) -> str:
    """The overrides that all variants share."""
    shared = [s for s in rows[0]["settings"] if all(s in row["settings"] for row in rows)]
    return f"All variants: `{' '.join(shared)}`." if shared else ""


def _equal_ce(rows: list[Row]) -> str:
    if "equal_ce" not in rows[0]:
        return "Not all runs are there, so nothing is compared at equal time or CE."
    first = rows[0]
    at = f"{first['equal_seconds']:.0f} s"
    if "equal_joules" in first:
        at += f", the equal energy {first['equal_joules'] / 1e3:.1f} kJ"
    return f"The equal CE is {first['equal_ce']:.4f}, the equal time {at}."


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
        "of `order_by_use`, in which train.py puts them. The last columns are in the order of "
        'those before, or have one value if all agree. "train.py takes" is what '
        '`sparse_gradients_every` comes to; "kept" is what the '
        'forward keeps for the backward besides x and the weights, and "peak" what XLA reserves '
        'for one layer, both in GB. "error" is the largest of those of y and of the gradients.',
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
        about="D = 2048, H = 5632, bfloat16; four layers one after the other, called from Python. "
        "Milliseconds of a layer, in brackets the speed-up over torch's compiled dense block. "
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
            "peak": _gib("peak_bytes"),
            "error": error("error"),
            "logits": error("logits_error"),
            "against float32": error("float32_logits_error"),
            "against XLA in 8 bits": error("twin_logits_error"),
        },
    ),
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
    "losses": Table(
        title="Losses of one run, computed in several ways",
        about="The same data and seed. Differences are absolute ones of the training cross-entropy "
        "to the first variant, in means over a window of logged steps. The last two columns are "
        "the share of the layers' gradients that were sparse.",
        case={"variant": number("variant")},
        results={
            "held-out CE": number("held_out_ce", "{:.4f}"),
            "mean difference": number("mean_difference", "{:.4f}"),
            "largest": number("largest_difference", "{:.4f}"),
            "last nnz by layer": lambda row: ", ".join(f"{nnz:.0f}" for nnz in row["nnz"][-1]),
            "sparse gradients, last": lambda row: f"{plots.sparse_share(row)[-1]:.0%}",
            "over the run": lambda row: f"{plots.sparse_share(row).mean():.0%}",
        },
        plots={"": plots.losses},
    ),
    "precision": Table(
        title="Training with products of 8-bit operands",
        about="Pairs of runs from the same seed on the same text, which differ in "
        "`model.matmul_dtype` alone. CE is held out, in nats per token; U is the share of the "
        "neurons that 256 tokens use between them. Speed includes what train.py does beside steps.",
        case={"seed": number("seed"), "variant": number("variant")},
        results={
            "held-out CE": number("held_out_ce", "{:.4f}"),
            "increase": number("increase", "{:+.2%}"),
            "nnz": number("nnz", "{:.1f}"),
            "U": number("union", "{:.1%}"),
            "tokens/s": number("tokens_per_second", "{:,.0f}"),
        },
        notes=_common_settings,
    ),
    "lasso": Table(
        title="L1 and the tile lasso",
        about="The same data and one seed, so small differences mean nothing. CE is held out, in "
        "nats per token; the others are means over layers on the same text. U is the share of the "
        "neurons that 256 consecutive tokens use between them.",
        case={"variant": number("variant")},
        results={
            "held-out CE": number("held_out_ce", "{:.3f}"),
            "U": number("union", "{:.2f}"),
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "dead": number("dead", "{:.0%}"),
            "U by layer": lambda row: ", ".join(f"{share:.2f}" for share in row["union_by_layer"]),
        },
        notes=_common_settings,
    ),
    "wallclock": Table(
        title="Training over time",
        about="One model on the same text, in the same order, as a sparse run and as its dense "
        'twins by XLA, through train.py: "sparse" has L1 and sparse gradients, "relu" and "silu" '
        'have neither, "float8" has products of 8-bit operands. Every run starts with nothing '
        "compiled and is stopped at about the same time. Seconds and the GPU's own count of energy "
        "include all pauses, to compile and to evaluate, but not loading the text. The last "
        "columns compare the runs at the time at which the first of them was last evaluated, and "
        "say when each reached the lowest held-out CE that all reached; in brackets how many times "
        "sooner, or with how many times less energy, than the first row.",
        case={"run": number("variant")},
        results={
            "seconds": number("seconds", "{:.0f}"),
            "steps": number("steps", "{:,}"),
            "tokens/s, with pauses": lambda row: f"{row['tokens'] / row['seconds']:,.0f}",
            "tokens/s at the end": lambda row: f"{row['logged']['tokens_per_second'][-1]:,.0f}",
            "last nnz": lambda row: f"{row['logged']['nnz'][-1]:.1f}",
            "layers with sparse gradients": lambda row: f"{row['logged']['sparse_layers'][-1]}",
            "mJ/token": lambda row: f"{1e3 * row['joules'] / row['tokens']:.2f}",
            "last held-out CE": lambda row: f"{row['evaluated']['held_out_ce'][-1]:.4f}",
            "at equal time": number("ce_at_equal_seconds", "{:.4f}"),
            "at equal energy": number("ce_at_equal_joules", "{:.4f}"),
            "s to equal CE": lambda row: (
                f"{row['seconds_to_equal_ce']:.0f} ({row['seconds_gain']:.2f}x)"
            ),
            "kJ to equal CE": lambda row: (
                f"{row['joules_to_equal_ce'] / 1e3:.1f} ({row['joules_gain']:.2f}x)"
            ),
        },
        notes=_equal_ce,
        plots={"": plots.wallclock},
    ),
    "training": Table(
        title="Whole training steps",
        about="Random weights with which as many neurons are active as in the benchmark of "
        'inference, with a learning rate of almost 0. "sparse" has sparse gradients in the layers '
        'whose pattern fits; "xla" is dense throughout. In brackets are the speed-up over "xla, '
        'relu" on the same mesh, and the efficiency against one device; the work of a device is '
        'the same on every mesh. "collectives" is how long the kernels of NCCL run, waiting '
        'included, "exposed" how long nothing else does, both in ms. "estimate" is the lower bound '
        "of `twell_jax.train.roofline` for the dense model. Peak memory is in GiB.",
        case={
            "model": number("config"),
            "data x fsdp": mesh,
            "micro-batch": number("micro_batch"),
            "tokens a step": number("batch_tokens", "{:,}"),
            "block": block,
        },
        results={
            "ms": milliseconds,
            "tokens/s": _tokens_of_mesh,
            "sparse layers": number("sparse_layers"),
            "collectives": number("collective_ms", "{:.1f}"),
            "exposed": number("exposed_ms", "{:.1f}"),
            "estimate": number("estimate_ms", "{:.1f}"),
            "its collectives": number("estimate_collective_ms", "{:.1f}"),
            "peak": _gib("peak_bytes"),
        },
        lines=_over_dense,
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
