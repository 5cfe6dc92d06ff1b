"""Defines the pages of docs/results: a table for each benchmark, and remarks on some records.

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
        'which train.py puts them. "room" is `gradient_capacity`. "train.py takes" is what '
        '`sparse_gradients_every` comes to. "kept" is what the forward keeps for the backward '
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


_H100, _H200 = "nvidia-h100-80gb-hbm3-20261121", "nvidia-h200-20261121"
_ORDERED = "nvidia-h200-20261124"
_BEFORE_KEPT = (
    "Before sparse gradients kept the gates and h of tokens outside the unions "
    "([decision 0006](../design/0006-heavy-rows.md))."
)
_ORDERED_STEPS = (
    "The first with neurons in the order in which train.py puts them, and with times from the end "
    "of a step to the end of the next one. One kernel computed all gradients for the weights of a "
    "block; today's two take less time ([decision 0012](../design/0012-weight-gradients.md))."
)
_LARGEST = "One micro-batch a step, the largest that fits by XLA's count, in steps of {} sequences."

REMARKS = {  # for readers of a record, by its file name without `.json`
    f"ffn-goals-{_H100}": "Calls are queued behind a waiting GPU: these are GPU times at high "
    "clocks.",
    f"ffn-{_H100}": "An earlier run: `union_down` did not fetch its indices ahead, jobs were dealt "
    "out in turn, and unions took up to 3 % more time. The run ended before M = 4096.",
    f"ffn-twell-{_H100}": 'A run before there were unions: with more than 64 tokens "mosaic" is '
    "TwELL. The kernels for few tokens could not multiply dense gates yet "
    "([0008](../design/0008-few-tokens.md)).",
    f"gradients-98fbd7c-{_H100}": "A design that was dropped "
    "([decision 0010](../design/0010-peak-memory.md)).",
    "gradients-nvidia-h200-20261123": "Before two kernels made the plan of unions, and before "
    "crowded patterns, and those without room, had larger dense products.",
    "gradients-nvidia-h200-20261123-2": "The host still chose the backward, and tokens outside the "
    "unions always had products. The run ended before its last three patterns.",
    "gradients-nvidia-h200-20261123-3": "Before two kernels made the lists of tokens, and before "
    "barriers made the products of the dense fallback follow one another "
    "([decision 0010](../design/0010-peak-memory.md)). The tree was that of commit 5bbfaf8.",
    "gradients-nvidia-h200-20261123-5": "Before more patterns counted as crowded "
    "([decision 0009](../design/0009-sparse-gradients.md)). The run ended within its last two "
    "patterns.",
    "gradients-nvidia-h200-20261123-6": "The run ended before the block without a gate, by a "
    "mistake in the benchmark.",
    f"gradients-{_ORDERED}": _BEFORE_KEPT,
    f"inference-1p5b-{_H100}": "A later run, with jobs from a queue.",
    f"inference-cached-{_H100}": "A run before the cache was updated in place "
    "([decision 0017](../design/0017-decoding-in-a-loop.md)).",
    "ffn-prompts-nvidia-h200-20261125": "The run ended before the block without a gate for 1023 "
    "tokens. tokamax was not installed.",
    "inference-cached-nvidia-h200-20261125": "The run ended before prefill of 32 sequences. TwELL "
    "served one prompt, as the dense block does now. The "
    "host limits `generate` for 1 and 8 sequences, to 1.6 ms a step and more, with five launches "
    "a layer. The other GPU of the machine trained models.",
    "inference-prefill-nvidia-h200-20261125": "The first in which kernels that do not need each "
    "other run at the same time ([decision 0022](../design/0022-prompts.md)). The dense block of "
    "[decision 0039](../design/0039-dense-block.md) serves one prompt.",
    "inference-decode-nvidia-h200-20261125": "The run ended before 32 sequences. A layer had five "
    "launches. The thread that enqueues kernels was pinned to the core that was the quickest when "
    "the run began; a process that trained on the other GPU might use it, too.",
    "inference-decode-nvidia-h200-20261126": "The run ended before 32 sequences. Kernels share "
    "launches ([decision 0040](../design/0040-shared-launches.md)).",
    "inference-decode-nvidia-h200-20261126-2": "Attention for one sequence has clusters of four "
    "blocks instead of eight ([decision 0040](../design/0040-shared-launches.md)).",
    "inference-decode-nvidia-h200-20261126-3": "The run ended before 32 sequences. A launch has no "
    "more clusters than the GPU holds ([decision 0040](../design/0040-shared-launches.md)).",
    "inference-decode-nvidia-h100-80gb-hbm3-20261126": "A step has two launches fewer than in "
    "the last record of 2026-11-25. 16 processes ran tests on the other GPU and on 22 of the 32 "
    "cores.",
    "inference-decode-nvidia-h100-80gb-hbm3-20261125-2": "Kernels share launches, of which a layer "
    "has three or four ([decision 0040](../design/0040-shared-launches.md)). 16 "
    "processes ran tests on the other GPU and on 22 of the 32 cores.",
    "inference-decode-nvidia-h100-80gb-hbm3-20261125": "The run ended before 32 sequences. A layer "
    "had five launches.",
    "ffn-few-nvidia-h100-80gb-hbm3-20261125-3": "tokamax was not installed.",
    "ffn-few-nvidia-h100-80gb-hbm3-20261125-2": "tokamax was not installed.",
    "ffn-few-nvidia-h100-80gb-hbm3-20261125": "All four blocks of a tile had to have a token with "
    "6 of 16 gates open ([0008](../design/0008-few-tokens.md)). tokamax was not installed.",
    "ffn-few-nvidia-h200-20261125-2": "Before the gate's kernel multiplied tiles with dense gates "
    "([0008](../design/0008-few-tokens.md)). tokamax was not installed.",
    "ffn-few-nvidia-h200-20261125": "Rows of dense gates were prefetched and listed, and a quartet "
    "loaded one tile of w_up at a time ([0008](../design/0008-few-tokens.md)). tokamax was not "
    "installed.",
    "inference-decode-nvidia-h200-20261123": "Before `generate` ran four steps in one program.",
    "inference-decode-nvidia-h200-20261123-2": "The run ended before its last rows.",
    f"inference-twell-{_H100}": "With TwELL, before a bug was found "
    "([decision 0014](../design/0014-in-place-behind-a-barrier.md)).",
    "live-nvidia-h200-20261123-2": "`gate_union` set rows that are not live to zero in every block "
    "of rows, not only in the last one ([0030](../design/0030-live-width.md)).",
    "live-nvidia-h200-20261123": "The loop copied y of each layer into an array of all layers, and "
    "XLA replaced what describes neurons that are not live.",
    "quantised-cpu-20261123": "The model of `make demo` after its 300 steps.",
    "quantised-nvidia-h200-20261123": "A model of the [study](../study.md) with an L1 of 1e-3, "
    "after 1000 steps of 32,768 tokens.",
    f"training-0p5b-{_H100}": _LARGEST.format(4),
    f"training-1p5b-{_H100}": _LARGEST.format(2),
    f"training-0p5b-{_H200}": _LARGEST.format(8),
    f"training-1p5b-{_H200}": _LARGEST.format(4) + " The record names commit 92c900d, but ran on "
    "138ade9; between them are tests and the order in which the benchmark allocates.",
    f"training-0p5b-{_ORDERED}": _ORDERED_STEPS,
    f"training-2b-{_ORDERED}": _ORDERED_STEPS,
    "training-nvidia-h100-80gb-hbm3-20261120": "Four micro-batches a step, random weights that "
    "fire half of the neurons.",
    "wallclock-nvidia-h200-20261123": "Before all sparse layers had the same room: the sparse run "
    "has pauses of 202 s, the others of 15 s "
    "([decision 0028](../design/0028-room-by-measurement.md)). The SiLU run had the second GPU of "
    "the machine, at the same time as the ReLU run.",
    "wallclock-nvidia-h200-20261123-2": "The SiLU run had the second GPU of the machine, at the "
    "same time as the sparse run.",
    "wallclock-nvidia-h200-20261125": "Other than above: a target of 6 % for U with half a lasso, "
    "dead neurons skipped, and 800 steps of 65,536 tokens to the end of the decay "
    "([the study](../study.md) says more). Other processes had the second GPU. The ReLU run was "
    "stopped at step 233 and continued; its steps 201 to 250 and 301 to 350 took 9 and 10 s longer "
    "than others.",
}
