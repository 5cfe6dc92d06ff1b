"""Shows a run in the terminal: a live progress line, and a table at the end."""

import math
from collections.abc import Callable
from typing import Any

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Table


class Progress:
    """A live bar on a terminal, a line per logged step elsewhere; a context manager.

    Args:
      console: where to print.
      step: number of steps taken.
      steps: number of steps in all.
      d_ff: neurons per layer, to compute the sparsity.
    """

    def __init__(self, console: Console, step: int, steps: int, d_ff: int) -> None:
        self._console, self._d_ff = console, d_ff
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("step {task.completed}/{task.total}"),
            rich_progress.BarColumn(bar_width=20),
            rich_progress.TextColumn("{task.fields[measured]}  ETA"),
            rich_progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", completed=step, total=steps, measured="compiling")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, record: dict[str, Any], logged: bool) -> None:
        """Shows the record of a step; without a live bar, prints a line if it is logged."""
        nnz, dead = _mean(record["nnz"]), _mean(record["dead"])
        measured = (
            f"CE {record['ce']:.3f}  L1 {record['l1']:.2f}  nnz {nnz:.1f}  "
            f"sparsity {1 - nnz / self._d_ff:.1%}  dead {dead:.1%}  "
            f"{record['tokens_per_second']:,.0f} tokens/s"
        )
        self._bar.update(self._task, completed=record["step"], measured=measured)
        if logged and not self._console.is_terminal:
            self.print(f"step {record['step']}  {measured}")

    def print(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(text, highlight=False, soft_wrap=True)


def layer_table(record: dict[str, Any], d_ff: int) -> Table:
    """A table of each layer's statistics in a step, from its record in `metrics.jsonl`."""
    table = Table(title=f"step {record['step']}, {d_ff} neurons a layer")
    columns: dict[str, tuple[list, Callable, Callable]] = {
        "mean nnz": (record["nnz"], _mean, "{:.1f}".format),
        "max nnz": (record["max_nnz"], max, str),
        "sparsity": (record["nnz"], _mean, lambda nnz: f"{1 - nnz / d_ff:.1%}"),
        "dead": (record["dead"], _mean, "{:.1%}".format),
    }
    if "sparse_gradients" in record:
        columns["gradients"] = (record["sparse_gradients"], _mean, _kind_of_gradients)
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


def _kind_of_gradients(sparse: bool | float) -> str:
    """Words for a layer's gradients, or for the share of layers with sparse gradients."""
    if isinstance(sparse, bool):
        return "sparse" if sparse else "dense"
    return f"{sparse:.0%} sparse"


def verdict(held_out_ce: float, unigram_ce: float) -> str:
    """A line with the held-out cross-entropy and the unigram baseline, in nats per token."""
    perplexity = math.exp(held_out_ce) if held_out_ce < 700 else math.inf  # else exp overflows
    return (
        f"held-out CE {held_out_ce:.3f} nats/token (perplexity {perplexity:.2f}); "
        f"unigram baseline {unigram_ce:.3f}"
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
