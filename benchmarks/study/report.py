"""Shows a record of the study, for `benchmarks.render`: tables, correlations and plots."""

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.study import downstream, plots, values
from benchmarks.tables import Cell, Row, Table, markdown, number


def mean(form: str, value: Callable[[Row], float]) -> Cell:
    """A cell with the mean over a variant's runs."""
    return lambda group: form.format(np.mean([value(run) for run in group["runs"]]))


def spread(form: str, value: Callable[[Row], float]) -> Cell:
    """A cell with the mean over a variant's runs and, if there are several, their range."""

    def cell(group: Row) -> str:
        found = [form.format(value(run)) for run in sorted(group["runs"], key=value)]
        between = f" ({found[0]}-{found[-1]})" if len(found) > 1 else ""
        return mean(form, value)(group) + between

    return cell


def of_newer(part: str, cell: Cell) -> Cell:
    """`cell` of the runs whose rows have a part, and how many these are if older ones lack it."""

    def of_those(group: Row) -> str:
        runs = [run for run in group["runs"] if part in run]
        if not runs:
            raise KeyError(part)
        text = cell({**group, "runs": runs})
        seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
        return text if runs == group["runs"] else f"{text}, {seeds}"

    return of_those


def describe(rows: list[Row]) -> str:
    """What the table leaves out: whole models, layers, and what their speed-ups correlate with."""
    parts = describe_models(rows), describe_layers(rows), describe_correlations(rows)
    return "\n\n".join(part for part in parts if part)


def describe_models(rows: list[Row]) -> str:
    """The table of whole models; empty for old records."""
    known = all("downstream" in row for row in rows)
    return f"{_OF_MODELS.about}\n\n{_OF_MODELS.render(rows)}" if known else ""


def describe_layers(rows: list[Row]) -> str:
    """A table of the layers' speed-ups, means over the seeds; empty if none was measured."""
    lines = []
    for group in values.by_variant(rows):
        if all(run["speedup"] and run.get("training") for run in group["runs"]):
            forward, training = (
                np.mean([run[passes]["factor"] for run in group["runs"]], axis=0)
                for passes in ("speedup", "training")
            )
            cells = [f"{f:.2f} / {t:.2f}" for f, t in zip(forward, training, strict=True)]
            lines.append([group["variant"], *cells])
    if not lines:
        return ""
    titles = ["variant", *(f"layer {layer}" for layer in range(len(lines[0]) - 1))]
    about = "Speed-ups of the layers, forward / both passes, means over the seeds:"
    return f"{about}\n\n{markdown(titles, lines)}"


def describe_correlations(rows: list[Row]) -> str:
    """A list of the correlations over all gated variants and over each; empty if there are none."""
    groups = values.by_variant(rows)
    cases = [("all gated", rows), *((group["variant"], group["runs"]) for group in groups)]
    lines = [
        f"- {name}: " + ", ".join(f"{r:.3f} with {x}" for x, r in found.items())
        for name, selected in cases
        if (found := values.correlations(selected))
    ]
    return "\n".join(["Correlations of the layers' speed-ups:", "", *lines]) if lines else ""


_OF_MODELS = Table(
    title="Whole models",
    about="Tokens per second of the training, by dense XLA; speed-ups of whole models, forward and "
    f"both passes; right answers to questions of {downstream.ANSWERS} answers:",
    case={"variant": number("variant")},
    results={
        "tokens/s": mean("{:,.0f}", lambda run: run["tokens_per_second"]),
        "forward": spread("{:.2f}x", partial(values.speedup_of_model, passes="forward")),
        "both passes": spread("{:.2f}x", partial(values.speedup_of_model, passes="training")),
        **{
            task: spread("{:.1%}", partial(values.accuracy, task=task)) for task in downstream.TASKS
        },
    },
    lines=values.by_variant,
)

TABLE = Table(
    title="What sparsity costs, and what it gains",
    about="Variants of a model of 120M parameters, each trained on 33 million tokens; "
    "[the page of the study](../study.md) says how. Means are over the layers, times are sums over "
    "them.",
    case={
        "variant": number("variant"),
        "seeds": lambda group: str(len({run["seed"] for run in group["runs"]})),
        "of H": lambda group: str(group["runs"][0]["d_ff"]),
    },
    results={
        "held-out CE": spread("{:.3f}", lambda run: run["held_out_ce"]),
        "halfway": spread("{:.3f}", values.halfway),
        "nnz": spread("{:.1f}", values.nnz),
        "zeros": mean("{:.1%}", lambda run: float(np.mean(run["sparsity"]))),
        "dead": spread("{:.1%}", values.dead),
        "first token": mean(
            "{:.0f}", lambda run: float(np.array(run["nnz_by_position"])[:, 0].mean())
        ),
        "256 tokens share": spread("{:.1%}", values.union),
        "XLA, ms": mean("{:.2f}", lambda run: values.total(run, "speedup", "xla_ms")),
        "kernels, ms": mean("{:.2f}", lambda run: values.total(run, "speedup", "mosaic_ms")),
        "speed-up": spread("{:.2f}x", values.speedup),
        "without the dead": spread("{:.2f}x", values.speedup_without_dead),
        "both passes": spread("{:.2f}x", values.speedup_in_training),
        "both, without the dead": of_newer(
            "skipping", spread("{:.2f}x", values.speedup_in_training_without_dead)
        ),
    },
    lines=values.by_variant,
    notes=describe,
    plots={
        "-cross-entropy": plots.cross_entropy,
        "-depth": plots.depth,
        "-position": plots.position,
        "-speedup": plots.speedup,
    },
)
