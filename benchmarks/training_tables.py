"""The pages of benchmarks that train: `losses`, `precision`, `lasso`, `wallclock`, `training`."""

from benchmarks import plots
from benchmarks.tables import Row, Table, block, gib, milliseconds, number


def mesh(row: Row) -> str:
    """The mesh of a row, data x fsdp."""
    return f"{row['devices'] // row['fsdp']} x {row['fsdp']}"


def _tokens_of_mesh(row: Row) -> str:
    share = f" ({row['efficiency']:.0%})" if row["devices"] > 1 and "efficiency" in row else ""
    return f"{row['tokens_per_second']:,.0f}{share}"


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


def _common_settings(rows: list[Row]) -> str:
    """The overrides that all variants share."""
    shared = [s for s in rows[0]["settings"] if all(s in row["settings"] for row in rows)]
    return f"All variants: `{' '.join(shared)}`." if shared else ""


def _equal_ce(rows: list[Row]) -> str:
    if "equal_ce" not in rows[0]:
        return "There is no dense SiLU run, so nothing is compared at equal time or CE."
    first = rows[0]
    at = f"{first['equal_seconds']:.0f} s"
    if "equal_joules" in first:
        at += f", the equal energy {first['equal_joules'] / 1e3:.1f} kJ"
    own = [
        f"{row['variant']} {row['equal_ce']:.4f}"
        for row in rows
        if row["equal_ce"] > first["equal_ce"]
    ]
    but = f" (with {', '.join(own)})" if own else ""
    return f"The equal CE is {first['equal_ce']:.4f}{but}, the equal time {at}."


LOSSES = Table(
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
)

PRECISION = Table(
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
)

LASSO = Table(
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
)

WALLCLOCK = Table(
    title="Training over time",
    about="One model on the same text, in the same order, as a sparse run and as its dense "
    'twins by XLA, through train.py: "sparse" has L1 and sparse gradients, "relu" and "silu" '
    'have neither, "float8" has products of 8-bit operands. Every run starts with nothing '
    "compiled and is stopped at about the same time. Seconds and the GPU's own count of energy "
    "include all pauses, to compile and to evaluate, but not loading the text. The last "
    "columns compare the runs at the time at which the first of them was last evaluated, and "
    "say when each reached the lowest held-out CE that it and the first row reached; in brackets "
    "how many times sooner, or with how many times less energy, than the first row.",
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
)

STEPS = Table(
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
        "peak": gib("peak_bytes"),
    },
    lines=_over_dense,
)
