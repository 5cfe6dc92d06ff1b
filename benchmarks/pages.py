"""Defines the pages of docs/results: a table for each benchmark.

A new benchmark adds its table to TABLES; the name of the benchmark in a record picks the table and
names the page, docs/results/NAME.md.
"""

from benchmarks import plots
from benchmarks.study import report
from benchmarks.tables import UNKNOWN, Cell, Row, Table, block, number, yes


def _milliseconds(row: Row) -> str:
    return f"{row['ms']:.3f} ms ({row['speedup']:.2f}x)"


def _energy(row: Row) -> str:
    return f"{row['joules_per_token'] * 1e3:,.2f} ({row['energy']:.2f}x)"


def _generate(key: str) -> Cell:
    """The rate of `generate` under a key, and its share of the rate of the steps alone."""
    return lambda row: f"{row[key]:,.0f} ({row[key] / row['tokens_per_second']:.0%})"


def mesh(row: Row) -> str:
    """The mesh of a row, data x fsdp."""
    return f"{row['devices'] // row['fsdp']} x {row['fsdp']}"


def _peak(row: Row) -> str:
    """A program that comes from the compilation cache states 0."""
    return f"{row['peak_bytes'] / 2**30:.1f} GiB" if row["peak_bytes"] else UNKNOWN


def _tokens_of_mesh(row: Row) -> str:
    share = f" ({100 * row['efficiency']:.0f} %)" if "efficiency" in row else ""
    return f"{row['tokens_per_second']:,.0f}{share}"


def _common_settings(rows: list[Row]) -> str:
    """The overrides that all variants share."""
    shared = [s for s in rows[0]["settings"] if all(s in row["settings"] for row in rows)]
    return f"All variants: `{' '.join(shared)}`." if shared else ""


def _equal_ce(rows: list[Row]) -> str:
    if "equal_ce" not in rows[0]:
        return "Not all runs are there yet, so nothing is compared."
    first = rows[0]
    at = f"{first['equal_seconds']:.0f} s"
    if "equal_joules" in first:
        at += f", the equal energy {first['equal_joules'] / 1e3:.1f} kJ"
    return f"The equal CE is {first['equal_ce']:.4f}, the equal time {at}."


TABLES: dict[str, Table] = {
    "ffn": Table(
        title="Feed-forward block, forward",
        about="D = 2048, H = 5632, bfloat16. Each line is one case, measured in one process; in "
        'brackets the speed-up over jitted dense XLA. "twell" and "unions" are the packed formats '
        'of the gate, "mosaic" are the kernels for up to 1023 tokens. "copies" of the recorded '
        'pattern are superposed. "dense rows" are tokens that fire nearly every neuron, or as many '
        'as "most nnz" says. "pruned" '
        "is a share of neurons that never fire: the kernels compute the layer without them, XLA "
        'and tokamax with them. "fp8" blocks quantise weights beforehand, x and (if dense) h in '
        'the block, with a scale for each row or for a tensor; "fast" sums in fewer bits than '
        'float32 has. "ellpack" and "bcoo" are other sparse formats, through XLA. "error" is that '
        'against float32, in the order of the columns, "against XLA in 8 bits" that against dense '
        "XLA with the same quantised weights.",
        columns={
            "M": number("m", "{}"),
            "pattern": number("pattern", "{}"),
            "copies": number("superposed", "{}"),
            "gated": yes("gated"),
            "activation": lambda row: row["activation"] if row["activation"] != "relu" else UNKNOWN,
            "pruned": lambda row: f"{row['pruned']:.0%}" if row["pruned"] else UNKNOWN,
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "most nnz": number("nnz_max", "{}"),
            "dense rows": number("heavy_rows", "{}"),
        },
        spread=_milliseconds,
        joined={
            "error": number("error", "{:.1e}"),
            "against XLA in 8 bits": number("twin_error", "{:.1e}"),
        },
        plots={"": plots.speedup},
    ),
    "gradients": Table(
        title="Feed-forward block, forward and backward",
        about="M = 16384, D = 2048, H = 5632, bfloat16; four layers one after the other, nothing "
        'rematerialised. "xla" is dense, "unions" has sparse gradients; in brackets the speed-up '
        'over dense XLA. "neurons" are in random order, as drawn, or in that of `order_by_use`, in '
        'which train.py puts them. "room" is the capacity of sparse gradients. "train.py takes" is '
        'what `sparse_gradients_every` comes to. "kept" is what the forward keeps for the backward '
        'besides x and the weights. "peak" is what XLA reserves for one layer. "error" is the '
        "largest of those of y and of the gradients.",
        columns={
            "pattern": number("pattern", "{}"),
            "gated": yes("gated"),
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "dense rows": number("heavy_rows", "{}"),
            "block": block,
            "neurons": number("order", "{}"),
            "room": number("gradient_capacity", "{}"),
            "forward and backward": _milliseconds,
            "train.py takes": number("chosen", "{}"),
            "kept": lambda row: f"{row['kept_bytes'] / 1e9:.2f} GB",
            "peak": lambda row: f"{row['peak_bytes'] / 1e9:.2f} GB",
            "error": lambda row: f"{max(row['errors']):.1e}",
        },
    ),
    "inference": Table(
        title="Whole models at inference",
        about="Random weights whose gates fire, layer by layer, as often as those of a trained "
        "model; the first token of every sequence fires most neurons. In brackets are ratios to "
        'the faster dense model of the same case. "mosaic" takes unions from 1024 tokens on, the '
        "dense block for fewer, and the kernels for few tokens up to 64. Energy is the GPU's own "
        'counter over 5 s, peak memory is what XLA states for the compiled call. "error" compares '
        "cross-entropies or logits with those of the dense bfloat16 model of the same function, "
        '"against float32" compares logits with those of the same weights in float32, "against XLA '
        'in 8 bits" with what XLA computes of the same 8-bit weights. '
        '"fp8" models have 8-bit weights: "all" are those of attention and of the feed-forward '
        "blocks, and the head. "
        '"torch, silu" is a plain dense decoder in torch, captured in a CUDA graph. "generate" is '
        "what `generate` reports of decoding, greedy or at temperature 0.8, the host's work "
        "included; in brackets its share of the rate of the steps alone.",
        columns={
            "model": number("model", "{}"),
            "direction": number("direction", "{}"),
            "sequences": lambda row: f"{row['batch']} x {row['context']}",
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "block": block,
            "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f} ({row['speedup']:.2f}x)",
            "generate, greedy": _generate("generate_greedy"),
            "generate, sampled": _generate("generate_sampled"),
            "mJ/token": _energy,
            "peak memory": _peak,
            "error": number("error", "{:.1e}"),
            "of logits": number("logits_error", "{:.1e}"),
            "against float32": number("float32_logits_error", "{:.1e}"),
            "against XLA in 8 bits": number("twin_logits_error", "{:.1e}"),
        },
    ),
    "soak": Table(
        title="Random rows, each against the dense block in float32",
        about="A call draws its pattern from one of ten families. The rows are those of y and, "
        "where gradients are sparse, also of all gradients. A row is wrong if its error is larger "
        'than rounding explains; "largest error" is in multiples of what is allowed.',
        columns={
            "pattern": number("family", "{}"),
            "M x D x H": lambda row: f"{row['m']} x {row['d']} x {row['h']}",
            "gated": yes("gated"),
            "block": block,
            "rows": number("rows", "{:,}"),
            "wrong": number("wrong", "{:,}"),
            "largest error": number("worst", "{:.2f}"),
        },
    ),
    "live": Table(
        title="Live width",
        about="D = 2048, H = 5632, bfloat16, skewed pattern with a mean of 29 non-zeros; four "
        "layers in one loop, the last neurons of each are dead. Each line is one case, measured in "
        'one process; in brackets the speed-up over dense XLA. "live" are the same kernels with '
        'the number of live neurons of each layer on the device; "gain" is the time without this '
        "number over the time with it.",
        columns={
            "M": number("m", "{}"),
            "dead by layer": lambda row: ", ".join(f"{share:.0%}" for share in row["dead"]),
        },
        spread=_milliseconds,
        joined={"gain": number("gain", "{:.2f}"), "error": number("error", "{:.1e}")},
    ),
    "losses": Table(
        title="Losses of one run, computed in several ways",
        about="The same data and seed. Differences are absolute ones of the training cross-entropy "
        "to the first variant, in means over a window of logged steps. The last two columns are "
        "the share of the layers' gradients that were sparse.",
        columns={
            "variant": number("variant", "{}"),
            "held-out CE": number("held_out_ce", "{:.4f}"),
            "mean difference": number("mean_difference", "{:.4f}"),
            "largest": number("largest_difference", "{:.4f}"),
            "last nnz by layer": lambda row: ", ".join(f"{nnz:.0f}" for nnz in row["nnz"][-1]),
            "sparse gradients, last": lambda row: f"{plots.sparse_share(row)[-1]:.0%}",
            "over the run": lambda row: f"{plots.sparse_share(row).mean():.0%}",
        },
        plots={"": plots.losses},
    ),
    "lasso": Table(
        title="L1 and the tile lasso",
        about="The same data and one seed, so small differences mean nothing. CE is held out, in "
        "nats per token; the others are means over layers on the same text. U is the share of the "
        "neurons that 256 consecutive tokens use between them.",
        columns={
            "variant": number("variant", "{}"),
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
        "have neither. Every run starts with nothing compiled and is stopped at about the same "
        "time. Seconds and the GPU's own count of energy include all pauses, to compile and to "
        "evaluate, but not loading the text. The last columns compare the runs at the time at "
        "which the first of them was last evaluated, and say when each reached the lowest "
        "held-out CE that all reached; in brackets how many times sooner, or with how many times "
        "less energy, than the first row.",
        columns={
            "run": number("variant", "{}"),
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
        about="Random weights whose gates fire as in the benchmark of inference, with a learning "
        'rate of almost 0. "sparse" has sparse gradients in the layers whose pattern fits; "xla" '
        "is the same ReLU model, dense throughout. The work of a device is the same on every mesh; "
        'in brackets is the efficiency against one device. "collectives" is how long the kernels '
        'of NCCL run, waiting included, "exposed" how long nothing else does, both in ms. '
        '"estimate" is the lower bound of `twell_jax.train.roofline` for the dense model.',
        columns={
            "model": number("config", "{}"),
            "block": block,
            "data x fsdp": mesh,
            "micro-batch": number("micro_batch", "{}"),
            "tokens a step": number("batch_tokens", "{:,}"),
            "sparse layers": number("sparse_layers", "{}"),
            "tokens/s": _tokens_of_mesh,
            "ms": number("ms", "{:.1f}"),
            "collectives": number("collective_ms", "{:.1f}"),
            "exposed": number("exposed_ms", "{:.1f}"),
            "estimate": number("estimate_ms", "{:.1f}"),
            "its collectives": number("estimate_collective_ms", "{:.1f}"),
            "peak memory": _peak,
        },
    ),
    "tune": Table(
        title="Tile sizes and pipelines of the kernels",
        about="Times of a kernel alone under each configuration that was tried.",
        columns={
            "kernel": number("kernel", "{}"),
            "M": number("m", "{}"),
            "D": number("d", "{}"),
            "H": number("h", "{}"),
            "configuration": number("config", "`{}`"),
            "ms": number("ms", "{:.3f}"),
        },
    ),
    "quantised": Table(
        title="Trained models with 8-bit weights",
        about="Held-out text of the run that trained the model, read densely by XLA in bfloat16, "
        'but for "float32". Weights of the named projections are e4m3 with a scale for each '
        "output, and what they are multiplied with is quantised token by token; "
        '"all" are those of attention and of the feed-forward blocks, and the head. In brackets '
        'is the standard error over sequences. "changed" are the activations that fire in one of '
        "the two models alone, as a share of those that fire in bfloat16.",
        columns={
            "run": number("run", "{}"),
            "weights": number("implementation", "{}"),
            "sequences": number("sequences", "{}"),
            "tokens": number("tokens", "{:,}"),
            "cross-entropy": number("ce", "{:.4f}"),
            "over bfloat16": lambda row: f"{row['increase']:+.3%} ({row['uncertainty']:.3%})",
            "fire, over bfloat16": number("fired", "{:.2%}"),
            "changed": number("changed", "{:.2%}"),
            "by layer": lambda row: ", ".join(f"{share:.1%}" for share in row["changed_by_layer"]),
        },
    ),
    "study": report.TABLE,
}
