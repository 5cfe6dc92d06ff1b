"""Shows the content of analysis.json as tables."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.table import Table

from twell_jax.analysis.estimate import ERRORS, PASSES, TOKENS
from twell_jax.ffn.stats import UNION_TOKENS

UNION = str(UNION_TOKENS)  # as a key of "union"


def tables(summary: dict[str, Any]) -> list[Table]:
    """Tables of `summary`, the content of analysis.json; each has a row per layer."""
    d_ff = summary["d_ff"]
    active = _table(
        f"neurons of {d_ff} that are active for a token",
        {
            "mean": _format(summary["nnz_mean"], ".1f"),
            "p50": _format(summary["nnz_p50"], ".0f"),
            "p99": _format(summary["nnz_p99"], ".0f"),
            "max": _format(summary["nnz_max"], "d"),
            "zeros": _format(summary["sparsity"], ".1%"),
            "dead": [f"{dead} ({dead / d_ff:.1%})" for dead in summary["dead"]],
        },
    )
    by_position = np.array(summary["nnz_by_position"])
    ranges = _position_ranges(by_position.shape[1])
    positions = _table(
        "mean by position in the sequence",
        {
            f"{start}-{stop - 1}" if stop - start > 1 else str(start): _format(
                by_position[:, start:stop].mean(axis=1), ".1f"
            )
            for start, stop in ranges
        },
    )
    shared = _table(
        "neurons that are active for any of n tokens in a row",
        {size: _format(shares, ".1%") for size, shares in summary["union"].items()},
    )
    top = _table(
        "activations that the most used neurons have",
        {f"top {k} %": _format(shares, ".1%") for k, shares in summary["top_percent"].items()},
    )
    speedup = summary["speedup"]
    estimated = [_estimate_table(summary)] if UNION in summary["union"] else []
    timed = [_speedup_table(speedup)] if speedup else []
    return [active, positions, shared, top, *timed, *estimated]


def _estimate_table(summary: dict[str, Any]) -> Table:
    gains = summary["estimate"]["layers"]
    return _table(
        f"feed-forward block, estimated speed-up on an H100 or H200, {TOKENS:,} tokens and one",
        {
            "U": _format(summary["union"][UNION], ".1%"),
            "mean nnz": _format(summary["nnz_mean"], ".1f"),
            "dead": _format(np.divide(summary["dead"], summary["d_ff"]), ".1%"),
            **{
                f"{heading},\n+- {100 * ERRORS[name]:.0f} %": [
                    "-" if gain is None else f"{gain:.2f}x" for gain in gains[name]
                ]
                for name, heading in PASSES.items()
            },
        },
    )


def _speedup_table(speedup: dict[str, Any]) -> Table:
    return _table(
        f"feed-forward block, forward, {speedup['tokens']:,} tokens on {speedup['device']}",
        {
            "mean nnz": _format(speedup["nnz"], ".1f"),
            "dense XLA, ms": _format(speedup["xla_ms"], ".3f"),
            "kernels, ms": _format(speedup["mosaic_ms"], ".3f"),
            "speed-up": _format(speedup["factor"], ".2f"),
            "error, XLA": _format(speedup["xla_error"], ".1e"),
            "error, kernels": _format(speedup["mosaic_error"], ".1e"),
        },
    )


def _table(title: str, columns: dict[str, list[str]]) -> Table:
    table = Table(title=title)
    for heading in ("layer", *columns):
        table.add_column(heading, justify="right")
    for layer, row in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(str(layer), *row)
    return table


def _format(values: Iterable[float], spec: str) -> list[str]:
    return [format(value, spec) for value in values]


def _position_ranges(length: int) -> list[tuple[int, int]]:
    """[0, 1), [1, 4), [4, 16), ... up to length."""
    starts = [0]
    while (start := max(1, 4 * starts[-1])) < length:
        starts.append(start)
    return list(zip(starts, [*starts[1:], length], strict=True))
