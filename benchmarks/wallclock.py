"""What sparse training gains over time: held-out cross-entropy over seconds and over joules.

    python -m benchmarks.wallclock [key=value ...] [--run "silu, float8" ...] [--seconds 600]
                                   [--resume FILE] ... [--out DIRECTORY]
    python -m benchmarks.render DIRECTORY/wallclock-....json --out DIRECTORY

Trains wallclock.yaml on one GPU, by the command that a user has: as it is, with sparse gradients
and L1 ("sparse"), and as its dense twins by XLA, without L1 ("relu", "silu"); and with products of
8-bit operands ("float8"). Every run is stopped once it has trained for `--seconds`. The record of
the day in DIRECTORY starts with the rows of each FILE, a record of another day or directory. A run
that the record has already is skipped, and one in `run_dir` that has trained for so long is not
trained again. So each may have a call of its own, on a GPU of its own, and a last call writes the
record. It compares the runs that are there with the first, and is complete once all are.

Held equal: the tokens of each step and their order, the seed, the learning rate of each step (it
rises, then stays; with so few `steps` that a run gets to the last of them, it decays), the held-out
sequences and the steps after which they are evaluated, the time. Not equal: the number of steps
that fit into the time; the function that SiLU and ReLU compute; the L1 term, which only sparse runs
have; the pauses to compile, of which these have more, as their plans of gradients change.

The clock starts before the first step, with nothing compiled, and counts all pauses: to compile,
evaluate, draw plots. It leaves out what comes before: loading modules and tokenising the text,
which only the first run does, and initial weights. Energy is the GPU's own counter.

Overrides hold for all runs, but those of L1 and sparse gradients (`l1_coefficient`,
`sparsity_target`, `union_target`, `lasso_share`, `sparse_gradients_every`, `skip_dead_every`) for
sparse ones alone. The text of wallclock.yaml is Python's standard library, of which such a run
reads every token many times: name more with data.source=files and data.paths=[...].
"""

import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record, variants
from twell_jax.config import ConfigError
from twell_jax.train import metrics, pace
from twell_jax.train.run_directory import RunPaths

BASE = Path(__file__).with_suffix(".yaml")

_DENSE = [
    "l1_coefficient=0",
    "sparsity_target=null",
    "union_target=null",
    "lasso_share=0",
    "sparse_gradients_every=0",
    "skip_dead_every=0",
    "model.ffn_implementation=xla",
]
_SILU, _FLOAT8 = "model.activation=silu", "model.matmul_dtype=float8"
# The others are compared with the first.
RUNS = {
    "silu": [*_DENSE, _SILU],
    "relu": _DENSE,
    "silu, float8": [*_DENSE, _SILU, _FLOAT8],
    "sparse": [],
    "sparse, float8": [_FLOAT8],
}


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--run", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seconds", type=float, default=600, help="of training, for each run")
    parser.add_argument(
        "--resume", type=Path, action="append", default=[], metavar="FILE", help="to continue"
    )
    args = parser.parse_intermixed_args()
    variants.leave_memory()
    today = record.path_of_today("wallclock", args.out)
    try:
        base, defaults = (variants.settings(BASE, given) for given in (args.overrides, []))
        base["seconds"], defaults["seconds"] = args.seconds, None
        found = variants.rows_so_far(today, args.resume, base, defaults)
        rows = {row["variant"]: row for row in found}
        for name in args.run:
            if name not in rows:
                rows[name] = measure(name, args.overrides, args.seconds)
                compared = compare(rows)
                complete = len(compared) == len(RUNS)
                record.write("wallclock", compared, today, complete=complete, base=base)
                print(today, flush=True)
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")


def measure(name: str, overrides: list[str], seconds: float) -> dict[str, Any]:
    """Trains a run for so many seconds and takes its figures from its metrics."""
    run_dir, settings = variants.train(BASE, overrides, name, RUNS[name], seconds=seconds)
    when = {"date": date.today().isoformat(), "commit": record.commit()}
    return {"variant": name, **when, "settings": settings, **summarise(run_dir)}


def summarise(run_dir: Path) -> dict[str, Any]:
    """A run's totals at its last logged step; "logged" has those steps, "evaluated" evaluations.

    The latter two are lists by name. `nnz` is the mean over layers, `sparse_layers` how many had
    sparse gradients. Without a counter of energy there are no joules.

    Raises:
      ConfigError: the run was not evaluated; it was too short.
    """
    records = metrics.read(RunPaths(run_dir).metrics)
    evaluations = [line for line in records if "held_out_ce" in line]
    steps = [line for line in records if "ce" in line]
    shown = [
        {
            **{name: line[name] for name in ("step", "seconds", "ce", "tokens_per_second")},
            "nnz": float(np.mean(line["nnz"])),
            "sparse_layers": pace.sparse_layers(line),
        }
        for line in steps
    ]
    if not evaluations:
        raise ConfigError(
            f"{run_dir}: no evaluation in the time of the run; give more --seconds, or a smaller "
            "eval_every"
        )
    last = steps[-1]
    clocks = [clock for clock in ("seconds", "joules") if last[clock] is not None]
    return {
        "steps": last["step"],
        **{name: last[name] for name in ("tokens", *clocks)},
        "unigram_ce": evaluations[-1]["unigram_ce"],
        "logged": _by_name(shown, list(shown[0])),
        "evaluated": _by_name(evaluations, ["step", "held_out_ce", *clocks]),
    }


def _by_name(lines: list[dict[str, Any]], names: list[str]) -> dict[str, list[Any]]:
    return {name: [line[name] for line in lines] for name in names}


def compare(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in the order of `RUNS`; if the first is there, with what each clock says of them.

    `equal_ce` is the lowest held-out cross-entropy that a run and the first one both reached,
    `CLOCK_to_equal_ce` when the run did, and `CLOCK_gain` the first one's over that. `equal_CLOCK`
    is when the first of all runs was evaluated for the last time, `ce_at_equal_CLOCK` their
    cross-entropy then. Between two evaluations it is taken as linear.

    Raises:
      ConfigError: the runs read different text.
    """
    ordered = [rows[name] for name in RUNS if name in rows]
    # Sums on another machine may differ in their last bits.
    unigrams = [row["unigram_ce"] for row in ordered]
    if not np.allclose(unigrams, unigrams[0], rtol=1e-9, atol=0):
        found = ", ".join(f"{row['variant']} {row['unigram_ce']:.6f}" for row in ordered)
        raise ConfigError(
            f"data: the runs read different text, as the cross-entropy of its unigrams says: "
            f"{found}; start anew, on one text, in another run_dir and --out"
        )
    if len(ordered) < 2 or next(iter(RUNS)) not in rows:
        return ordered
    evaluated = [row["evaluated"] for row in ordered]
    lowest = [min(found["held_out_ce"]) for found in evaluated]
    added: list[dict[str, Any]] = [{"equal_ce": max(lowest[0], own)} for own in lowest]
    for clock in ("seconds", "joules"):
        if not all(clock in found for found in evaluated):
            continue
        end = min(found[clock][-1] for found in evaluated)
        for row, found in zip(added, evaluated, strict=True):
            baseline, took = (_reached(of, clock, row["equal_ce"]) for of in (evaluated[0], found))
            row[f"{clock}_to_equal_ce"], row[f"{clock}_gain"] = took, baseline / took
            row[f"equal_{clock}"] = end
            at_end = np.interp(end, found[clock], found["held_out_ce"])
            row[f"ce_at_equal_{clock}"] = float(at_end)
    return [row | more for row, more in zip(ordered, added, strict=True)]


def _reached(evaluated: dict[str, list[float]], clock: str, wanted: float) -> float:
    """When the cross-entropy first fell to `wanted`; the first evaluation, if it did before."""
    at, ce = evaluated[clock], evaluated["held_out_ce"]
    last = next(i for i, value in enumerate(ce) if value <= wanted)
    first = max(last - 1, 0)
    return float(np.interp(-wanted, [-ce[first], -ce[last]], [at[first], at[last]]))


if __name__ == "__main__":
    main()
