"""Fits the coefficients of `twell_jax.analysis.estimate`, and checks them on other records.

    python -m benchmarks.estimate

prints the coefficients as that module holds them, and the errors on records that they were not
fitted to. Records of the study say how often neurons are active only in parts (the share that the
k % most used ones have): between these the frequencies are interpolated.
"""

import functools
import json
import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.record import RESULTS
from twell_jax import config as config_lib
from twell_jax.analysis import estimate, patterns
from twell_jax.analysis.estimate import BOTH, DECODE, FORWARD
from twell_jax.config import ModelConfig

_H100, _H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"

# Fitted to, and checked on.
STUDY, OLD_STUDY = f"study-{_H200}-20261124", f"study-{_H100}-20261121"
GRADIENTS, OTHER_GRADIENTS = f"gradients-{_H200}-20261129", f"gradients-{_H100}-20261128"
GOALS = f"ffn-goals-{_H100}-20261127"
FEW, OTHER_FEW = f"ffn-few-{_H100}-20261126", f"ffn-few-{_H200}-20261127"
NARROW, WIDE = f"ffn-borders-896-{_H100}-20261127", f"ffn-borders-4096-{_H100}-20261127"
# Checked on alone. "run" is a trained model, the others have random weights.
LAYERS, RUN = f"analyze-0p4b-{_H200}-20261125", f"wallclock-{_H200}-20261125"
SCORING = (f"inference-{_H100}-20261127", f"inference-{_H100}-20261121",
           f"inference-1p5b-{_H100}-20261121", f"inference-fp8-{_H200}-20261123-2")  # fmt: skip
STEPS = tuple(
    f"training-{model}-{record}"
    for model in ("2b", "0p5b")
    for record in (f"{_H100}-20261127", f"{_H200}-20261125")
)
DECODING = (f"inference-decode-{_H100}-20261128", f"inference-cached-{_H200}-20261129")

Samples = tuple[dict[str, np.ndarray], np.ndarray]  # features, and times over those of dense XLA


def samples() -> dict[str, Samples]:
    """What the coefficients are fitted to, by the names that they have in the module."""
    return {
        "FORWARD": _joined(of_study(STUDY, "speedup"), of_goals()),
        "BOTH": _joined(of_study(STUDY, "training"), of_gradients(GRADIENTS)),
        "DECODE": _joined(*(of_few_tokens(name) for name in (FEW, NARROW, WIDE))),
    }


def fitted() -> dict[str, Any]:
    """The coefficients by these names."""
    found = {name: fit(getattr(estimate, name), of) for name, of in samples().items()}
    return {**found, "OUTSIDE": fit_outside()}


def fit(names: Mapping[str, float], samples: Samples) -> dict[str, float]:
    """The coefficients of these features with the least squared relative errors."""
    found, measured = samples
    columns = np.stack([found[name] / measured for name in names], axis=1)
    solution = np.linalg.lstsq(columns, np.ones_like(measured), rcond=None)[0]
    return dict(zip(names, solution.tolist(), strict=True))


def fit_outside() -> float:
    """How much longer an operation outside of blocks takes, by what the study's models score."""
    rows = [row for row in _read(STUDY)["rows"] if row.get("model")]
    blocks = np.array([np.mean(1 / np.array(row["speedup"]["factor"])) for row in rows])
    times = [row["model"]["forward"] for row in rows]
    gained = 1 - np.array([time["mosaic"] / time["xla"] for time in times])
    share = np.linalg.lstsq((1 - blocks)[:, None], gained, rcond=None)[0][0]
    settings = _read(STUDY)["base"]
    fields = {name: settings.get(f"model.{name}") for name in ModelConfig.model_fields}
    config = ModelConfig(**{name: value for name, value in fields.items() if value is not None})
    return float((1 - share) / share / estimate.outside(config))


@functools.cache
def errors() -> dict[str, np.ndarray]:
    """Estimated over measured times - 1, of records that the module was not fitted to."""
    run, measured = of_run()
    forward = _joined(of_study(OLD_STUDY, "speedup"), (run, measured))
    return {
        "forward": _error(np.minimum(estimate.relative_time(FORWARD, forward[0]), 1), forward[1]),
        "both": _error_of(BOTH, of_gradients(OTHER_GRADIENTS)),
        "decode": _error_of(DECODE, of_few_tokens(OTHER_FEW)),
        "model": np.array(list(of_models(run).values())),
    }


@functools.cache
def residuals() -> dict[str, np.ndarray]:
    """Such errors of the records that the module was fitted to."""
    return {name.lower(): _error_of(getattr(estimate, name), of) for name, of in samples().items()}


def _error_of(coefficients: Mapping[str, float], samples: Samples) -> np.ndarray:
    return _error(estimate.relative_time(coefficients, samples[0]), samples[1])


def _error(estimated: Any, measured: Any) -> Any:
    return estimated / measured - 1


def of_study(name: str, times: str) -> Samples:
    """The trained layers of a record of the study, with a gate."""
    found = []
    for row in _read(name)["rows"]:
        if row.get(times) and "not gated" not in row["variant"]:
            frequencies = frequencies_of(row)
            use = estimate.use_of(frequencies, np.array(row["union"]["256"]))
            factor = np.array(row[times]["factor"])
            found.append((estimate.features(1024, row["d_ff"], use), 1 / factor))
    return _joined(*found)


def frequencies_of(row: Mapping[str, Any]) -> np.ndarray:
    """How often neurons are active, float64 `[layers, H]`, of what `activity.summarise` gives."""
    h, found = row["d_ff"], []
    for layer, (nnz, dead) in enumerate(zip(row["nnz_mean"], row["dead"], strict=True)):
        tops = [
            (max(1, round(h * int(k) / 100)), of[layer]) for k, of in row["top_percent"].items()
        ]
        used = [(k, share) for k, share in tops if k < h - dead]
        ranks, shares = zip((0, 0.0), *used, (h - dead, float(h > dead)), strict=True)
        found.append(np.clip(nnz * np.diff(np.interp(np.arange(h + 1), ranks, shares)), 0, 1))
    return np.array(found)


def of_gradients(name: str) -> Samples:
    """Both passes of the patterns of a record, with the union and list shares that it has."""
    rows = [r for r in _read(name)["rows"] if r["gated"] and "matmul_dtype" not in r]
    rows = [row for row in rows if row.get("gradient_capacity") == 1.0]
    found = _features(rows, [row["union"] for row in rows])
    listed = {"listed": np.array([row["listed"] for row in rows]), "longest": found["small"]}
    return found | listed, np.array([1 / row["speedup"] for row in rows])


def of_goals() -> Samples:
    """The forward pass of those patterns whose union share a record of gradients has."""
    unions = {_pattern(row): row["union"] for row in _read(GRADIENTS)["rows"] if "union" in row}
    rows = [row for row in _read(GOALS)["rows"] if row.get("packing") == "unions"]
    rows = [row for row in rows if _pattern(row) in unions]
    found = _features(rows, [unions[_pattern(row)] for row in rows])
    return found, np.array([1 / row["speedup"] for row in rows])


def of_few_tokens(name: str) -> Samples:
    """One token, which is no heavy one."""
    one = {"m": 1, "gated": True, "heavy_rows": 0, "implementation": "mosaic"}
    rows = [row for row in _read(name)["rows"] if one.items() <= row.items()]
    return _features(rows, np.ones(len(rows))), np.array([1 / row["speedup"] for row in rows])


def _pattern(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["pattern"], round(row["nnz_mean"], 2), row["heavy_rows"]


def _features(rows: list[dict[str, Any]], unions: Any) -> dict[str, np.ndarray]:
    """The features of a pattern in each row, whose union share counts started chunks."""
    d, h, nnz = (np.array([row[key] for row in rows], float) for key in ("d", "h", "nnz_mean"))
    small = 1024 * 2816 / (d * h)
    return {
        **{"always": np.ones_like(d), "small": small},
        **{"union": np.array(unions), "active": nnz / h},
    }


def of_run() -> Samples:
    """The layers of a trained model of D = 2048, as `analyze` printed them."""
    tables: list[list[list[float]]] = [[]]
    for line in (RESULTS / f"{LAYERS}.txt").read_text().splitlines():
        if numbers := re.findall(r"\d[\d.]*", line) if re.match(r"│ +\d │", line) else []:
            tables[-1].append([float(number) for number in numbers[1:]])
        elif tables[-1]:
            tables.append([])
    used, _, unions, top, times, *_ = (np.array(table) for table in tables)
    row = {
        "d_ff": 5632,
        "nnz_mean": used[:, 0],
        "dead": used[:, 5].astype(int),
        "top_percent": dict(zip(("1", "5", "10", "25"), top.T / 100, strict=True)),
    }
    use = estimate.use_of(frequencies_of(row), unions[:, -1] / 100)
    return estimate.features(2048, 5632, use), times[:, 2] / times[:, 1]


def of_models(run: dict[str, np.ndarray]) -> dict[str, float]:
    """The errors of whole models, by what they do."""
    found = {}
    for name, work, row, gain in _measured_models():
        config = config_lib.load(RESULTS.parents[1] / f"configs/{name}.yaml").model
        estimated = _of_random_model(config, work, row["nnz_by_layer"])
        found[f"{work} {name} {row['record']}"] = _error(estimated, 1 / gain)
    config = config_lib.load(RESULTS.parent / "wallclock.yaml").model
    rates = {row["variant"]: row["logged"]["tokens_per_second"][-1] for row in _read(RUN)["rows"]}
    estimated = estimate.model_time(
        estimate.planned(run), estimate.OUTSIDE * estimate.outside(config)
    )
    found["step run"] = _error(estimated, rates["relu"] / rates["sparse"])
    return found


def _measured_models() -> Iterator[tuple[str, str, dict[str, Any], float]]:
    """The model, its work, the row of the kernels and how many times as fast as ReLU it is."""
    for record in (*SCORING, *STEPS, *DECODING):
        dense: dict[str, Any] = {}
        for row in _read(record)["rows"]:
            work = row.get("direction", "step")
            wanted = work in ("forward", "step") or (work, row["batch"]) == ("decode", 1)
            if row["implementation"] == "xla, relu":
                dense = row
            elif row["implementation"] in ("mosaic, relu", "sparse, relu") and wanted:
                name = row.get("model") or row["config"]
                yield name, work, row | {"record": record}, dense["ms"] / row["ms"]


def _of_random_model(config: ModelConfig, work: str, nnz: list[float]) -> float:
    """The estimated time of a model whose layers have such neurons as `patterns.independent`."""
    frequencies = np.array([_skewed(config.d_ff, count) for count in nnz])
    union = np.mean(1 - (1 - frequencies) ** 256, axis=1)
    found = estimate.features(config.d_model, config.d_ff, estimate.use_of(frequencies, union))
    if work == "decode":
        outside = estimate.outside(config, of_bytes=True)
        return estimate.model_time(estimate.relative_time(DECODE, found), outside)
    times = estimate.planned(found) if work == "step" else estimate.relative_time(FORWARD, found)
    return estimate.model_time(times, estimate.OUTSIDE * estimate.outside(config))


def _skewed(h: int, nnz: float) -> np.ndarray:
    """How often neurons of the pattern "skewed" (`patterns.independent`) are active; not drawn."""
    alive = h - round(patterns.DEAD * h)
    frequencies = np.pad(_log_normal(alive), (0, h - alive))
    for _ in range(20):
        frequencies = np.minimum(frequencies * nnz / frequencies.sum(), 0.9)
    return frequencies


@functools.cache
def _log_normal(count: int) -> np.ndarray:
    """As many quantiles, evenly spread."""
    quantile = statistics.NormalDist(sigma=1.5).inv_cdf
    return np.exp([quantile((i + 0.5) / count) for i in range(count)])


def _joined(*samples: Samples) -> Samples:
    names = set.intersection(*(set(found) for found, _ in samples))
    joined = {name: np.concatenate([found[name] for found, _ in samples]) for name in names}
    return joined, np.concatenate([measured for _, measured in samples])


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def main() -> None:
    for name, coefficients in fitted().items():
        print(name, coefficients)
    for kind, of_kind in (("fitted to", residuals()), ("others", errors())):
        for name, found in of_kind.items():
            off = np.abs(found)
            spread = f"median {np.median(off):.1%}, largest {off.max():.1%}"
            print(f"{name}, {kind}: {len(off)} times, {spread}")
    for work, off in of_models(of_run()[0]).items():
        print(f"  {work}: {off:+.1%}")


if __name__ == "__main__":
    main()
