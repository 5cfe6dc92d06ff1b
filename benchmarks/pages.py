"""What is shown of the records: a table for each benchmark, and summaries in the pages of docs.

A new benchmark adds its table to TABLES; the name of the benchmark in a record picks the table and
names the page, docs/results/NAME.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import plots
from benchmarks.study import report
from benchmarks.tables import UNKNOWN, Row, Table, block, number, yes


def _milliseconds(row: Row) -> str:
    return f"{row['ms']:.3f} ms ({row['speedup']:.2f}x)"


def _energy(row: Row) -> str:
    return f"{row['joules_per_token'] * 1e3:,.2f} ({row['energy']:.2f}x)"


def _tokens_of_mesh(row: Row) -> str:
    share = f" ({100 * row['efficiency']:.0f} %)" if "efficiency" in row else ""
    return f"{row['tokens_per_second']:,.0f}{share}"


TABLES = {
    "ffn": Table(
        title="Feed-forward block, forward",
        about="D = 2048, H = 5632, bfloat16. Each line is one case, measured in one process; in "
        'brackets the speed-up over jitted dense XLA. "twell" and "unions" are the packed formats '
        'of the gate, "mosaic" are the kernels for few tokens. "copies" of the recorded pattern '
        'are superposed. "dense rows" are tokens that fire nearly every neuron. "pruned" is a '
        "share of neurons that never fire: the kernels compute the layer without them, XLA and "
        'tokamax with them. "error" has the order of the columns.',
        columns={
            "M": number("m", "{}"),
            "pattern": number("pattern", "{}"),
            "copies": number("superposed", "{}"),
            "gated": yes("gated"),
            "pruned": lambda row: f"{row['pruned']:.0%}" if row["pruned"] else UNKNOWN,
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "dense rows": number("heavy_rows", "{}"),
        },
        spread=_milliseconds,
        joined={"error": number("error", "{:.1e}")},
        plots={"": plots.speedup},
    ),
    "gradients": Table(
        title="Feed-forward block, forward and backward",
        about="M = 16384, D = 2048, H = 5632, bfloat16; four layers one after the other, nothing "
        'rematerialised. "xla" is dense, "unions" has sparse gradients; in brackets the speed-up '
        'over dense XLA. "room" is `gradient_capacity`. "train.py takes" is what '
        '`sparse_gradients_every` comes to. "kept" is what the forward keeps for the backward '
        'besides x and the weights. "peak" is what XLA reserves for one layer. "error" is the '
        "largest of those of y and of the gradients.",
        columns={
            "pattern": number("pattern", "{}"),
            "gated": yes("gated"),
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "dense rows": number("heavy_rows", "{}"),
            "block": block,
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
        'the faster dense model of the same case. "mosaic" takes unions from 1024 tokens on, TwELL '
        "for fewer, and the kernels for few tokens up to 64. Energy is the GPU's own counter over "
        '5 s, peak memory is what XLA states for the compiled call. "error" compares '
        "cross-entropies or logits with those of the dense ReLU model.",
        columns={
            "model": number("model", "{}"),
            "direction": number("direction", "{}"),
            "sequences": lambda row: f"{row['batch']} x {row['context']}",
            "mean nnz": number("nnz_mean", "{:.1f}"),
            "block": block,
            "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f} ({row['speedup']:.2f}x)",
            "mJ/token": _energy,
            "peak memory": lambda row: f"{row['peak_bytes'] / 2**30:.1f} GiB",
            "error": number("error", "{:.1e}"),
        },
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
    "training": Table(
        title="Whole training steps",
        about="Random weights whose gates fire as in the benchmark of inference, with a learning "
        'rate of almost 0. "sparse" has sparse gradients but in the layers that overflow; "xla" is '
        "the same ReLU model, dense throughout. The work of a device is the same on every mesh; in "
        'brackets is the efficiency against one device. "collectives" is how long the kernels of '
        'NCCL run, waiting included, "exposed" how long nothing else does, both in ms. "estimate" '
        "is the lower bound of `twell_jax.train.roofline` for the dense model.",
        columns={
            "model": number("config", "{}"),
            "block": block,
            "data x fsdp": lambda row: f"{row['devices'] // row['fsdp']} x {row['fsdp']}",
            "micro-batch": number("micro_batch", "{}"),
            "tokens a step": number("batch_tokens", "{:,}"),
            "sparse layers": number("sparse_layers", "{}"),
            "tokens/s": _tokens_of_mesh,
            "ms": number("ms", "{:.1f}"),
            "collectives": number("collective_ms", "{:.1f}"),
            "exposed": number("exposed_ms", "{:.1f}"),
            "estimate": number("estimate_ms", "{:.1f}"),
            "its collectives": number("estimate_collective_ms", "{:.1f}"),
            "peak memory": lambda row: f"{row['peak_bytes'] / 2**30:.1f} GiB",
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
    "study": report.TABLE,
}


@dataclass(frozen=True)
class Pick:
    """A line of a summary: two rows of a record, our block and the dense one of the same case.

    Attributes:
      record: the record's file name, without `.json`.
      ours, dense: the names of the two blocks, as `tables.block` gives them.
      case: values of the rows; floats agree if their first decimals do.
    """

    record: str
    ours: str
    case: Mapping[str, Any]
    dense: str = "xla"

    def rows(self, rows: list[Row]) -> tuple[Row, Row]:
        """Our row, and the last dense one of this case before it.

        Raises:
          ValueError: if the record has not one such row of ours, or no dense one before it.
        """
        ours = [i for i, row in enumerate(rows) if block(row) == self.ours and self._is_case(row)]
        if len(ours) != 1:
            raise ValueError(f"{self.record} has {len(ours)} rows of {self}, not 1")
        before = rows[: ours[0]]
        dense = [row for row in before if block(row) == self.dense and self._is_case(row)]
        if not dense:
            raise ValueError(f"{self.record} has no {self.dense!r} before the row of {self}")
        return rows[ours[0]], dense[-1]

    def _is_case(self, row: Row) -> bool:
        """Whether a row has the values of the case, as far as it has its keys."""
        return all(
            round(row[key], 1) == value if isinstance(value, float) else row[key] == value
            for key, value in self.case.items()
            if key in row
        )


@dataclass(frozen=True)
class Summary:
    """A short table within a page: lines picked from records, each with a link to its record.

    Attributes:
      columns: by heading, the cell of (our row, the dense row).
      picks: its lines.
    """

    columns: Mapping[str, Callable[[Row, Row], str]]
    picks: tuple[Pick, ...]


_H100, _H200 = "nvidia-h100-80gb-hbm3-20261121", "nvidia-h200-20261121"
_FORWARD = f"ffn-goals-{_H100}"
_GRADIENTS = f"gradients-{_H100}"
_MODEL = {"ours": "mosaic, relu", "dense": "xla, relu"}
_STEP = {"ours": "sparse, relu", "dense": "xla, relu"}
_WORK = {"forward": "scoring", "prefill": "prefill", "decode": "decoding"}


_LARGEST = "One micro-batch a step, the largest that fits by XLA's count, in steps of {} sequences."

REMARKS = {  # what a reader of a record has to know, by the record's file name without `.json`
    _FORWARD: "Calls are queued behind a waiting GPU: these are GPU times at high clocks.",
    f"ffn-{_H100}": "An earlier run: `union_down` did not fetch its indices ahead, jobs were dealt "
    "out in turn, and unions took up to 3 % more time. The run ended before M = 4096.",
    f"ffn-twell-{_H100}": 'A run before there were unions: with more than 64 tokens "mosaic" is '
    "TwELL. The kernels for few tokens are those of today.",
    f"gradients-98fbd7c-{_H100}": "A design that was dropped "
    "([decision 0010](../design/0010-peak-memory.md)).",
    f"inference-1p5b-{_H100}": "A later run, with jobs from a queue.",
    f"inference-cached-{_H100}": "A run before the cache was updated in place "
    "([decision 0017](../design/0017-decoding-in-a-loop.md)).",
    f"inference-twell-{_H100}": "With TwELL, before a bug was found "
    "([decision 0014](../design/0014-in-place-behind-a-barrier.md)).",
    f"training-0p5b-{_H100}": _LARGEST.format(4),
    f"training-1p5b-{_H100}": _LARGEST.format(2),
    f"training-0p5b-{_H200}": _LARGEST.format(8),
    f"training-1p5b-{_H200}": _LARGEST.format(4) + " The record names commit 92c900d, but ran on "
    "138ade9; between them are tests and the order in which the benchmark allocates.",
    "training-nvidia-h100-80gb-hbm3-20261120": "Four micro-batches a step, random weights that "
    "fire half of the neurons.",
}


def _of(cell: Callable[[Row], str]) -> Callable[[Row, Row], str]:
    return lambda ours, dense: cell(ours)


def _ratio(ours: Row, dense: Row) -> str:
    return f"**{dense['ms'] / ours['ms']:.2f}x**"


def _energy_ratio(ours: Row, dense: Row) -> str:
    if "joules_per_token" not in ours:
        return UNKNOWN
    return f"{ours['joules_per_token'] / dense['joules_per_token']:.2f}x"


def _sequences(row: Row) -> str:
    if "direction" in row:
        return f"{row['batch']} x {row['context']}"
    return f"{row['micro_batch']} x {row['batch_tokens'] // row['micro_batch']}"


SUMMARIES = {
    "forward": Summary(
        columns={
            "tokens": _of(number("m", "{:,}")),
            "pattern": _of(number("pattern", "{}")),
            "mean nnz of 5632": _of(number("nnz_mean", "{:.0f}")),
            "dense XLA, ms": lambda ours, dense: f"{dense['ms']:.3f}",
            "kernels, ms": _of(number("ms", "{:.3f}")),
            "speed-up": _ratio,
        },
        picks=tuple(
            Pick(_FORWARD, ours, {"m": m, "pattern": pattern, "nnz_mean": nnz, "superposed": 1})
            for m, pattern, nnz, ours in (
                (16384, "recorded", 20.0, "unions"),
                (16384, "skewed", 29.0, "unions"),
                (16384, "skewed", 60.1, "unions"),
                (16384, "skewed", 299.6, "unions"),
                (16384, "uniform", 29.3, "unions"),
                (16384, "uniform", 1497.0, "unions"),
                (32, "skewed", 28.2, "mosaic"),
                (1, "skewed", 29.0, "mosaic"),
            )
        ),
    ),
    "gradients": Summary(
        columns={
            "pattern": _of(number("pattern", "{}")),
            "mean nnz of 5632": _of(number("nnz_mean", "{:.0f}")),
            "dense rows": _of(number("heavy_rows", "{}")),
            "gated": _of(yes("gated")),
            "fits": _of(lambda row: "no" if row["overflow"] else "yes"),
            "dense XLA, ms": lambda ours, dense: f"{dense['ms']:.2f}",
            "sparse gradients, ms": _of(number("ms", "{:.2f}")),
            "speed-up": _ratio,
            "peak memory": lambda ours, dense: f"{ours['peak_bytes'] / dense['peak_bytes']:.0%}",
        },
        picks=tuple(
            Pick(
                _GRADIENTS,
                "unions",
                {"pattern": pattern, "nnz_mean": nnz, "gated": gated, "gradient_capacity": 0.5},
            )
            for pattern, nnz, gated in (
                ("recorded", 20.0, True),
                ("recorded", 25.4, True),
                ("skewed", 29.0, True),
                ("skewed", 60.1, True),
                ("skewed", 29.0, False),
                ("skewed", 120.1, True),
                ("uniform", 29.3, True),
            )
        ),
    ),
    "models": Summary(
        columns={
            "work": lambda ours, dense: _WORK.get(ours.get("direction"), "training step"),
            "model": _of(lambda row: row.get("model") or row["config"]),
            "sequences": _of(_sequences),
            "dense XLA, tokens/s": lambda ours, dense: f"{dense['tokens_per_second']:,.0f}",
            "kernels, tokens/s": _of(number("tokens_per_second", "{:,.0f}")),
            "speed-up": _ratio,
            "energy": _energy_ratio,
        },
        picks=(
            *(
                Pick(f"{name}-{_H100}", case={"model": model, "direction": "forward"}, **_MODEL)
                for name, model in (
                    ("inference", "2b"),
                    ("inference-1p5b", "1p5b"),
                    ("inference", "0p5b"),
                )
            ),
            *(
                Pick(f"{name}-{_H100}", case={"config": config}, **_STEP)
                for name, config in (("training-0p5b", "0p5b"), ("training-1p5b", "1p5b"))
            ),
            Pick(
                f"inference-{_H100}",
                case={"model": "2b", "direction": "prefill", "batch": 1},
                **_MODEL,
            ),
            *(
                Pick(
                    f"inference-cached-{_H100}",
                    case={"model": "2b", "direction": "decode", "batch": batch},
                    **_MODEL,
                )
                for batch in (1, 32)
            ),
        ),
    ),
}
