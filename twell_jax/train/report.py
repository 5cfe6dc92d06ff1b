"""The report of a finished run: what it is, what it cost and how sparse it became, as Markdown."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from twell_jax import config as config_lib
from twell_jax.config import Config

type Record = Mapping[str, Any]  # a line of metrics.jsonl

_UNKNOWN = "-"


def markdown(
    config: Config,
    steps: Sequence[Record],
    evaluations: Sequence[Record],
    first: Record,
    plots: Sequence[str],
) -> str:
    """The report.

    Args:
      config: the run.
      steps, evaluations: its records, at least one of each.
      first: its first record, which has the cross-entropy of the model that it began with, if there
        was one.
      plots: names of images beside the report.
    """
    directory = config.run_dir.rstrip("/").rpartition("/")[2]
    model, last = config.model, evaluations[-1]
    parts = [
        f"# {directory}",
        f"{model.layers} layers, d_model {model.d_model}, d_ff {model.d_ff}, {model.activation}; "
        f"{config.steps:,} steps of {config.batch_tokens:,} tokens.",
        *([f"It began as `{config.init_from}`."] if config.init_from else []),
        "## Result",
        _result(config, steps, last, first),
        "## Layers",
        _layers(config, steps[-1]),
        *(f"![{name}]({name})" for name in plots),
    ]
    if "sample" in last:
        parts += ["## A sample", _fenced(last["prompt"] + last["sample"]), "The first "
                  f"{len(last['prompt'])} characters are held-out text."]  # fmt: skip
    parts += ["## Settings", _fenced(config_lib.to_yaml(config).rstrip(), "yaml"), _versions()]
    return "\n\n".join(parts) + "\n"


def _result(config: Config, steps: Sequence[Record], last: Record, first: Record) -> str:
    """Quality, sparsity and speed; beside the model that the run began with, if there was one."""
    record, d_ff = steps[-1], config.model.d_ff
    nnz = statistics.mean(record["nnz"])
    joules = [step["joules_per_token"] for step in steps if step.get("joules_per_token")]
    rows = {
        "held-out cross-entropy, nats/token": (first.get("source_ce"), last["held_out_ce"], ".3f"),
        "bits/byte": (first.get("source_bits_per_byte"), last.get("bits_per_byte"), ".3f"),
        "unigram baseline, nats/token": (None, last["unigram_ce"], ".3f"),
        "active neurons of a token": (None, nnz, ".1f"),
        "zeros among the hidden activations": (None, 1 - nnz / d_ff, ".1%"),
        "neurons that 256 tokens use (U)": (None, _mean(record.get("mean_union")), ".1%"),
        "dead neurons": (None, statistics.mean(record["dead"]), ".1%"),
        "tokens/s in training": (
            None,
            statistics.median(step["tokens_per_second"] for step in steps),
            ",.0f",
        ),
        "joules/token in training": (None, statistics.median(joules) if joules else None, ".3g"),
        "minutes in all": (None, _minutes(last), ".1f"),
    }
    before = "source_ce" in first
    lines = []
    for name, (old, new, form) in rows.items():
        if old is not None or new is not None:
            lines.append([name, *([_cell(old, form)] if before else []), _cell(new, form)])
    return _table(["", *(["before"] if before else []), "this run"], lines)


def _layers(config: Config, record: Record) -> str:
    """What each layer measured in a step."""
    columns = {
        "active": ("nnz", ".1f"),
        "most active": ("max_nnz", ".0f"),
        "U": ("mean_union", ".1%"),
        "dead": ("dead", ".1%"),
    }
    known = {
        heading: (record[key], form) for heading, (key, form) in columns.items() if key in record
    }
    return _table(
        ["layer", *known],
        [
            [str(layer), *(_cell(values[layer], form) for values, form in known.values())]
            for layer in range(config.model.layers)
        ],
    )


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *lines))


def _cell(number: float | None, form: str) -> str:
    return _UNKNOWN if number is None or not math.isfinite(number) else format(number, form)


def _mean(values: Sequence[float] | None) -> float | None:
    return None if values is None else statistics.mean(values)


def _minutes(record: Record) -> float | None:
    seconds = record.get("seconds")
    return None if seconds is None else seconds / 60


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
