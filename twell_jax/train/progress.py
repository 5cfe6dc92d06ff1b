"""Shows a run: a live progress line, plots while it goes on, and its result at the end."""

import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TextIO, cast

import jax
from rich import progress as rich_progress
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from twell_jax.analysis.estimate import Estimate
from twell_jax.config import Config, ConfigError
from twell_jax.train import metrics, pace, report
from twell_jax.train.durable import write_atomically
from twell_jax.train.run_directory import RunPaths
from twell_jax.train.sample import Sample

_COMPILING = "compiling"
_SPEED_OVER = 3600  # seconds; of shorter ones, slow steps leave too few to estimate the ETA


log = logging.getLogger(__name__)


def patient_console(quiet: bool) -> Console:
    """A console on standard output, for which it may be closed or full: then a warning says so."""
    # Without standard output there is none to wrap, and the console prints nothing.
    output = sys.stdout and cast(TextIO, _Patient(sys.stdout))
    return Console(file=output, quiet=quiet, highlight=False)


class _Patient:
    """A file in which nothing more is written once that fails, so that training goes on."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        self._tried(partial(self._file.write, text))
        return len(text)

    def flush(self) -> None:
        self._tried(self._file.flush)

    def _tried(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except OSError as error:
            # What the file has yet to write, at the latest when Python ends, goes there, too.
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), self._file.fileno())
            log.warning(
                "standard output cannot be written (%s); the run goes on, and metrics.jsonl has "
                "its numbers",
                error.strerror,
            )


class Progress:
    """A live bar on a terminal, a line per logged step elsewhere; a context manager.

    Args:
      console: where to print.
      step: number of steps taken.
      steps: number of steps in all.
      d_ff: neurons per layer, to compute the share of zeros.
    """

    def __init__(self, console: Console, step: int, steps: int, d_ff: int) -> None:
        self._console, self._d_ff = console, d_ff
        self._bar = rich_progress.Progress(
            rich_progress.BarColumn(bar_width=12, table_column=Column(no_wrap=True)),
            _Facts(),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=_SPEED_OVER,
        )
        self._task = self._bar.add_task("", completed=step, total=steps, measured=[_COMPILING])

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show_compiling(self) -> None:
        """Says that the next step waits for a program."""
        self._bar.update(self._task, measured=[_COMPILING])
        if not self._console.is_terminal:
            self._print([_COMPILING])

    def show(self, record: dict[str, Any], logged: bool) -> None:
        """Shows the record of a step; without a live bar, prints a line if it is logged."""
        nnz = f"nnz {_mean(record['nnz']):.1f}"
        union = [f"U {_mean(record['mean_union']):.1%}"] if "mean_union" in record else []
        measured = [
            f"{record['tokens_per_second']:,.0f} tokens/s",
            f"dead {_mean(record['dead']):.1%}",
            f"L1 {record['l1']:.2f}",
        ]
        # Targets stand in place of the zeros, as the last ones may find no room.
        leading = [] if "union_target" in record else [self._zeros(record)]
        if "union_target" in record:
            union[0] += f" -> {record['union_target']:.1%}"
        if "sparsity_target" in record:
            leading = [f"{nnz} -> {record['sparsity_target']:g}"]
        else:
            measured.insert(2, nnz)
        measured = [f"CE {record['ce']:.3f}", *leading, *union, *measured]
        if record.keys() & {"sparsity_target", "union_target"}:
            measured.append(f"L1 coefficient {record['l1_coefficient']:.2e}")
        if "live" in record:
            measured.append(f"live {_mean(record['live']) / self._d_ff:.1%}")
            measured.append(f"missed {_mean(record['missed']) / self._d_ff:.2%}")
        if (utilisation := record["flops_utilisation"]) is not None:
            measured.append(f"MFU {utilisation:.0%}")
        self._bar.update(self._task, completed=record["step"], measured=measured)
        if logged and not self._console.is_terminal:
            self._print(measured)

    def _zeros(self, record: dict[str, Any]) -> str:
        return f"zeros {1 - _mean(record['nnz']) / self._d_ff:.1%}"

    def show_evaluation(
        self, held_out_ce: float, bits_per_byte: float | None = None, sample: Sample | None = None
    ) -> None:
        """Prints an evaluation after the last step shown, above the bar if any.

        That is the held-out cross-entropy, if known in bits per byte, too, and a line of a sample.
        """
        measured = [f"held-out CE {held_out_ce:.3f}"]
        if bits_per_byte is not None:
            measured.append(f"{bits_per_byte:.3f} bits/byte")
        self._print(measured)
        if sample is not None:  # repr, because models may write what a terminal obeys
            self._print_line(f"sample: {sample.prompt!r} -> {sample.text!r}")

    def _print(self, measured: list[str]) -> None:
        self._print_line("  ".join([*_position(self._bar.tasks[self._task]), *measured]))

    def _print_line(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


class _Facts(rich_progress.ProgressColumn):
    """Position and measurements; as width shrinks, the last ones are dropped."""

    def render(self, task: rich_progress.Task) -> "_AsManyAsFit":
        return _AsManyAsFit([*_position(task), *task.fields["measured"]])


@dataclass(frozen=True)
class _AsManyAsFit:
    """A line of the first of its parts, as many as there is room for, but at least one."""

    parts: Sequence[str]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(len(self.parts[0]), len("  ".join(self.parts)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self.parts[0]
        for part in self.parts[1:]:
            if len(f"{shown}  {part}") > options.max_width:
                break
            shown += f"  {part}"
        yield Text(shown, no_wrap=True, overflow="crop")


def _position(task: rich_progress.Task) -> list[str]:
    """Step of total, and the ETA, which is unknown until two steps are taken."""
    eta = rich_progress.TimeRemainingColumn().render(task)
    return [f"step {task.completed}/{task.total}", f"ETA {eta}"]


def show_result(
    config: Config,
    paths: RunPaths,
    unigram_ce: float,
    console: Console,
    gain: Estimate | None = None,
    score: report.Score | None = None,
    scored: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Prints the table, the held-out cross-entropy and the gain in speed; draws, and reports.

    Args:
      config: the run.
      paths: its directory.
      unigram_ce: cross-entropy of the unigram baseline, in nats per token.
      console: where to print.
      gain: what its model is estimated to gain on a GPU, if that is known.
      score: scores it on tasks. What it raises passes; the report is there by then, without them.
      scored: what `score` said of the model that it began with.

    Raises:
      ConfigError: metrics.jsonl does not hold the records of the run.
    """
    records = metrics.read(paths.metrics)
    steps = [record for record in records if "ce" in record]
    evaluations = [record for record in records if "held_out_ce" in record]
    if not (steps and evaluations):
        raise ConfigError(f"{paths.metrics}: the records of this run are gone; nothing to show")
    console.print(layer_table(steps[-1], config.model.d_ff))
    last = evaluations[-1]
    console.out(verdict(last["held_out_ce"], unigram_ce, last.get("bits_per_byte")))
    if faster := pace.against_dense_start(steps):
        console.out(faster)
    if gain and gain.model:
        console.out(str(gain))
    for path in redraw(config, paths, console):
        console.out(f"plot: {path}")
    drawn = redraw(config, paths, console, of_report=True)
    found = report.Found(steps, evaluations, records[0], [path.name for path in drawn], gain)
    write_atomically(paths.report, report.markdown(config, found))
    if score:
        found = replace(found, scores=(scored, score(config.run_dir)))
        write_atomically(paths.report, report.markdown(config, found))
    console.out(f"report: {paths.report}")


def redraw(
    config: Config, paths: RunPaths, console: Console, *, of_report: bool = False
) -> list[Path]:
    """Draws the plots of what a run has logged; the first of its processes does.

    Args:
      config: the run.
      paths: its directory.
      console: where to warn if plots cannot be drawn. That never ends a run.
      of_report: whether to draw the figure of its report instead.

    Returns:
      The paths of the plots that were drawn.
    """
    if jax.process_index() > 0:
        return []
    try:
        from twell_jax.train import plots  # loads matplotlib, which may itself fail

        return (plots.plot_report if of_report else plots.plot_run)(config, paths)
    except Exception as error:
        console.out(f"warning: plots not drawn: {type(error).__name__}: {error}")
        return []


class Painter:
    """Draws plots while a run goes on, in a thread; a context manager, which waits for the last.

    Args:
      config, paths, console: see `redraw`.
    """

    def __init__(self, config: Config, paths: RunPaths, console: Console) -> None:
        self._draw = partial(redraw, config, paths, console)
        self._thread = ThreadPoolExecutor(1, "painter")
        self._last: Future | None = None

    def redraw(self) -> None:
        """Begins to draw what is logged, unless it is still drawing what was before."""
        if self._last is None or self._last.done():
            self._last = self._thread.submit(self._draw)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()


def layer_table(record: dict[str, Any], d_ff: int) -> Table:
    """A table of each layer's statistics in a step, from its record in `metrics.jsonl`."""
    table = Table(title=f"step {record['step']}, {d_ff} neurons a layer")
    columns: dict[str, tuple[list, Callable, Callable]] = {
        "mean nnz": (record["nnz"], _mean, "{:.1f}".format),
        "max nnz": (record["max_nnz"], max, str),
        "zeros": (record["nnz"], _mean, lambda nnz: f"{1 - nnz / d_ff:.1%}"),
        "dead": (record["dead"], _mean, "{:.1%}".format),
    }
    if "mean_union" in record:  # not of few tokens, and not in records of version 0.2
        columns["U"] = (record["mean_union"], _mean, "{:.1%}".format)
    if "l1_multipliers" in record:
        columns["L1 multiplier"] = (record["l1_multipliers"], _mean, "{:.2f}".format)
    if "live" in record:
        columns |= {name: (record[name], _mean, "{:.0f}".format) for name in ("live", "missed")}
    if "sparse_gradients" in record:
        columns["gradients"] = (_kinds_of_gradients(record), _share_of_sparse, str)
    if "union" in record:
        columns |= {name: (record[name], _mean, "{:.0%}".format) for name in ("union", "listed")}
    if any(record["overflow"]):
        columns["overflow"] = (record["overflow"], _mean, "{:.0%}".format)
    for heading in ("layer", *columns):
        table.add_column(heading, justify="right")
    for layer in range(len(record["nnz"])):
        cells = [show(values[layer]) for values, _, show in columns.values()]
        table.add_row(str(layer), *cells)
    table.add_section()
    table.add_row("all", *(show(merge(values)) for values, merge, show in columns.values()))
    return table


def _kinds_of_gradients(record: dict[str, Any]) -> list[str]:
    """A word for each layer's gradients."""
    return ["sparse" if is_sparse else "dense" for is_sparse in record["sparse_gradients"]]


def _share_of_sparse(kinds: list[str]) -> str:
    return f"{1 - kinds.count('dense') / len(kinds):.0%} sparse"


def verdict(held_out_ce: float, unigram_ce: float, bits_per_byte: float | None) -> str:
    """A line with the held-out cross-entropy and the unigram baseline, in nats per token.

    `bits_per_byte` is the former in bits per byte of the text; None if that is not known.
    """
    perplexity = math.exp(held_out_ce) if held_out_ce < 700 else math.inf  # else exp overflows
    return (
        f"held-out CE {held_out_ce:.3f} nats/token (perplexity {perplexity:.2f}"
        + ("" if bits_per_byte is None else f", {bits_per_byte:.3f} bits/byte")
        + "); "
        f"unigram baseline {unigram_ce:.3f}"
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
