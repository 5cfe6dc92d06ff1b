"""The report of a finished run: what it is, what it cost and how sparse it became, as Markdown.

A run that began as another model has both side by side.
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import jax

from twell_jax import config as config_lib
from twell_jax.analysis.estimate import ERRORS, PASSES, Estimate
from twell_jax.config import Config
from twell_jax.train import pace
from twell_jax.train.pace import Record

# What scores a model on tasks, by its name; the result is by task and metric.
type Score = Callable[[str], Mapping[str, float]]
# Of the model that the run began with, and of the run.
type Scores = tuple[Mapping[str, float], Mapping[str, float]]
type Row = tuple[float | None, float | None, str]  # before, now, and how they are written

_UNKNOWN = "-"


@dataclass(frozen=True)
class Found:
    """What is known of a finished run.

    Attributes:
      steps, evaluations: its records, at least one of each.
      first: its first record, which tells of the model that it began with, if there was one.
      plots: names of images beside the report.
      gain: what kernels are estimated to gain; None if that is not known.
      scores: on tasks, if there are any.
    """

    steps: Sequence[Record]
    evaluations: Sequence[Record]
    first: Record
    plots: Sequence[str] = ()
    gain: Estimate | None = None
    scores: Scores | None = None


def markdown(config: Config, found: Found) -> str:
    """The report."""
    directory = config.run_dir.rstrip("/").rpartition("/")[2]
    model = config.model
    parts = [
        f"# {directory}",
        f"{model.layers} layers, d_model {model.d_model}, d_ff {model.d_ff}, {model.activation}; "
        f"{config.steps:,} steps of {config.batch_tokens:,} tokens.",
        *([f"It began as `{config.init_from}`."] if config.init_from else []),
        "## Result",
        _result(config, found),
        *_remarks(config, found),
        *(f"![{name}]({name})" for name in found.plots),
        "## Layers",
        _layers(config, found),
        *_samples(found),
        "## Settings",
        _fenced(config_lib.to_yaml(config).rstrip(), "yaml"),
        _versions(),
    ]
    return "\n\n".join(parts) + "\n"


def source_name(first: Record) -> str | None:
    """What the model is called that a run began with; None if it drew its own."""
    if "source_ce" not in first:
        return None
    return "dense" if first.get("source_activation") == "silu" else "before"


def _result(config: Config, found: Found) -> str:
    """Quality, sparsity and speed; beside the model that the run began with, if there was one."""
    last, first = found.evaluations[-1], found.first
    rows: dict[str, Row] = {
        "held-out cross-entropy, nats/token": (
            first.get("source_ce"), last["held_out_ce"], "{:.3f}"
        ),
        "bits/byte": (first.get("source_bits_per_byte"), last.get("bits_per_byte"), "{:.3f}"),
        "unigram baseline, nats/token": (last["unigram_ce"], last["unigram_ce"], "{:.3f}"),
    }  # fmt: skip
    if found.scores:
        before, now = found.scores
        rows |= {name: (before.get(name), score, "{:.3f}") for name, score in now.items()}
    rows |= _of_neurons(config, found) | _of_speed(found)
    rows["minutes in all"] = (None, _per(last, "seconds", 60), "{:.1f}")
    rows["kilojoules in all"] = (None, _per(last, "joules", 1000), "{:,.1f}")
    source, lines = source_name(first), []
    for name, (old, new, form) in rows.items():
        if old is not None or new is not None:
            lines.append([name, *([_cell(old, form)] if source else []), _cell(new, form)])
    return _table(["", *([source] if source else []), "this run"], lines)


def _of_neurons(config: Config, found: Found) -> dict[str, Row]:
    """How sparse a training step was, at the end and, if that is known, before the first one."""
    d_ff, start = config.model.d_ff, found.steps[0]
    now, old = _use(found.steps[-1], d_ff), dict[str, float | None]()
    activation = found.first.get("source_activation")
    if activation == "silu":
        old = {"nnz": d_ff, "zeros": 0.0, "union": 1.0, "dead": 0.0}
    elif activation == config.model.activation and start["step"] == 1:
        old = _use(start, d_ff) | {"dead": None}  # which takes more than a step to tell
    names = {
        "active neurons of a token": ("nnz", "{:.1f}"),
        "zeros among the hidden activations": ("zeros", "{:.1%}"),
        "neurons that 256 tokens use (U)": ("union", "{:.1%}"),
        "dead neurons": ("dead", "{:.1%}"),
    }
    return {name: (old.get(key), now[key], form) for name, (key, form) in names.items()}


def _use(step: Record, d_ff: int) -> dict[str, float | None]:
    nnz = statistics.mean(step["nnz"])
    union, dead = _mean(step.get("mean_union")), _mean(step["dead"])
    return {"nnz": nnz, "zeros": 1 - nnz / d_ff, "union": union, "dead": dead}


def _of_speed(found: Found) -> dict[str, Row]:
    """What was measured in training, where that began with dense gradients, and is estimated."""
    before, now = pace.phases(found.steps)
    rows: dict[str, Row] = {
        name: (_median(before, key), _median(now, key), form)
        for name, key, form in (
            ("tokens/s in training", "tokens_per_second", "{:,.0f}"),
            ("joules/token in training", "joules_per_token", "{:.3g}"),
        )
    }
    old = 1.0 if source_name(found.first) == "dense" else None
    error = f"{100 * ERRORS['model']:.0f} %"
    for work, gain in (found.gain.model if found.gain else {}).items():
        rows[f"{work} on an H100 or H200, estimated, +- {error}"] = (old, gain, "{:.2f}x")
    return rows


def _remarks(config: Config, found: Found) -> list[str]:
    """What the table leaves open, and the commands that tell it."""
    remarks = []
    if faster := pace.against_dense_start(found.steps):
        remarks.append(f"{faster}.")
    if found.gain:
        remarks.append(str(found.gain))
    else:
        remarks.append(f"`python -m twell_jax.analyze {config.run_dir}` estimates the speed-up.")
    if not found.scores:
        models = [config.run_dir, *([config.init_from] if config.init_from else [])]
        commands = " and ".join(f"`python -m twell_jax.evaluate {name}`" for name in models)
        remarks.append(f"Not scored on tasks: {commands} would do that (extra `eval`).")
    return remarks


def _layers(config: Config, found: Found) -> str:
    """What each layer measured in the last step, and what it is estimated to gain."""
    record = found.steps[-1]
    columns = {
        "active": ("nnz", "{:.1f}"),
        "most active": ("max_nnz", "{:.0f}"),
        "U": ("mean_union", "{:.1%}"),
        "dead": ("dead", "{:.1%}"),
    }
    known = {
        heading: (record[key], form) for heading, (key, form) in columns.items() if key in record
    }
    for name, gains in (found.gain.layers if found.gain else {}).items():
        if any(gains):
            heading = f"{PASSES[name]}, estimated, +- {100 * ERRORS[name]:.0f} %"
            known[heading] = gains, "{:.2f}x"
    return _table(
        ["layer", *known],
        [
            [str(layer), *(_cell(values[layer], form) for values, form in known.values())]
            for layer in range(config.model.layers)
        ],
    )


def _samples(found: Found) -> list[str]:
    """How the model, and the one that it began with, continued a held-out text."""
    first, last = found.first, found.evaluations[-1]
    written = {source_name(first): (first.get("source_prompt"), first.get("source_sample"))}
    written["this run"] = last.get("prompt"), last.get("sample")
    parts = [
        part
        for name, (prompt, text) in written.items()
        if prompt is not None and text is not None
        for part in (f"{name}, after {len(prompt)} characters of held-out text:",
                     _fenced(_legible(prompt + text)))
    ]  # fmt: skip
    return ["## Samples", *parts] if parts else []


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *lines))


def _cell(number: float | None, form: str) -> str:
    return _UNKNOWN if number is None or not math.isfinite(number) else form.format(number)


def _mean(values: Sequence[float] | None) -> float | None:
    return None if values is None else statistics.mean(values)


def _median(records: Sequence[Record], key: str) -> float | None:
    known = [record[key] for record in records if record.get(key)]
    return statistics.median(known) if known else None


def _per(record: Record, key: str, unit: float) -> float | None:
    return None if record.get(key) is None else record[key] / unit


def _legible(text: str) -> str:
    """The text, in which U+FFFD stands for what is no character of a page."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _fenced(text: str, language: str = "") -> str:
    """A block of code that no text can end: its fence is longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _versions() -> str:
    """What computed the run."""
    found = {}
    for name in ("twell-jax", "jax", "flax", "optax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    shown = ", ".join(f"{name} {number}" for name, number in found.items())
    return f"{shown}; {jax.device_count()} x {jax.devices()[0].device_kind}."
