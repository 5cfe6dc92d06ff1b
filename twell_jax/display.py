"""What a person sees of a run in the terminal: the live progress line and the closing table."""

import math
from typing import Any

import jax
from rich import progress as rich_progress
from rich.console import Console
from rich.table import Table


class Progress:
    """A live bar on a terminal, a line per logged step elsewhere; a context manager.

    Args:
      console: where to print.
      step, steps: steps taken so far and in all.
      d_ff: neurons per layer, for the sparsity.
    """

    def __init__(self, console: Console, step: int, steps: int, d_ff: int):
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

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def show(self, record: dict[str, Any], logged: bool) -> None:
        """Shows the record of a step; a logged one gets a line where there is no live bar."""
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
        """Prints a line (above the bar, where there is one)."""
        self._console.print(text, highlight=False, soft_wrap=True)


def layer_table(record: dict[str, Any], d_ff: int) -> Table:
    """What each layer's neurons did in a step, as a table."""
    table = Table(title=f"step {record['step']}, {d_ff} neurons a layer")
    has_overflow = any(record["overflow"])
    headings = ["layer", "mean nnz", "max nnz", "sparsity", "dead"]
    for heading in [*headings, "dense gradients"] if has_overflow else headings:
        table.add_column(heading, justify="right")

    def add(name, nnz, most, dead, overflow):
        cells = [name, f"{nnz:.1f}", str(most), f"{1 - nnz / d_ff:.1%}", f"{dead:.1%}"]
        table.add_row(*cells, *([f"{overflow:.0%}"] if has_overflow else []))

    columns = record["nnz"], record["max_nnz"], record["dead"], record["overflow"]
    for layer, row in enumerate(zip(*columns, strict=True)):
        add(str(layer), *row)
    table.add_section()
    nnz, most, dead, overflow = columns
    add("all", _mean(nnz), max(most), _mean(dead), _mean(overflow))
    return table


def verdict(held_out_ce: float, unigram_ce: float) -> str:
    """The held-out cross-entropy beside that of a model that only knows token frequencies."""
    return (
        f"held-out CE {held_out_ce:.3f} nats/token (perplexity {math.exp(held_out_ce):.2f}); "
        f"unigram baseline {unigram_ce:.3f}"
    )


def memory(analysis, params, devices: int) -> str:
    """A compiled step's `memory_analysis()` in words; `params` are the (abstract) parameters."""
    held = analysis.argument_size_in_bytes
    working = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    working -= analysis.alias_size_in_bytes
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    return (
        f"{count / 1e9:.3f} billion parameters; per device ({devices} in all): "
        f"{held / 2**30:.2f} GiB state and batch, {working / 2**30:.2f} GiB working memory "
        "(as compiled for CPUs, whose attention keeps its scores; GPUs need less)"
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
