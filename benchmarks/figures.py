"""Defines the figures in the prose of pages, each by the record and the rows that it is from.

A page names a figure in a comment directly behind it, `1.31<!-- figure: scoring-2b -->`, and
`benchmarks.render` puts the value before the comment. Units stay in the prose.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks import estimate, figures_of_runs, figures_of_torch
from benchmarks.quotes import (
    Figure,
    Number,
    Records,
    least,
    most,
    percent,
    ratio,
    speedup,
    total,
    value,
)
from benchmarks.study import figures as study
from benchmarks.tables import Row

_H100, _H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"

# The records of the figures, up to the date.
SCORING = f"inference-{_H100}"
GENERATION, DECODING = f"inference-cached-{_H200}", f"inference-decode-{_H100}"
BLOCK, FEW_TOKENS, PROMPTS = f"ffn-goals-{_H100}", f"ffn-few-{_H200}", f"ffn-prompts-{_H200}"
SHAPES, NO_GATE = f"ffn-{_H100}", f"ffn-non-gated-{_H200}"
PEERS, RECTIFIERS, LIVE = f"ffn-peers-{_H200}", f"ffn-activations-{_H200}", f"live-{_H200}"
GRADIENTS = f"gradients-{_H200}"
ENGINES = {"engine": f"engines-{_H200}", "ampere": f"engines-ampere-{_H200}"}
PRECISION = f"precision-{_H200}"
NARROW, WIDE = f"ffn-borders-896-{_H100}", f"ffn-borders-4096-{_H100}"
SOAK, SOAK_SHAPES, SOAK_STEPS = f"soak-{_H100}", f"soak_shapes-{_H100}", f"soak_decoding-{_H200}"


# Whole models.


def _of_2b(implementation: str, direction: str = "forward", **more: Any) -> dict[str, Any]:
    return {"model": "2b", "direction": direction, "implementation": implementation, **more}


def _generation(name: str, record: str, direction: str, *batches: int) -> dict[str, Figure]:
    """NAME-BATCH, the speed-up of generation for so many sequences."""
    cases = {n: {"model": "2b", "direction": direction, "batch": n} for n in batches}
    return {f"{name}-{n}": Figure(speedup(record, cases[n], "mosaic, relu")) for n in batches}


def _over_torch(name: str, record: str, *batches: int) -> dict[str, Figure]:
    """NAME-BATCH, how many times as fast our dense decoder is as that in torch, both with SiLU."""
    return {
        f"{name}-{n}": Figure(
            ratio(
                record,
                _of_2b("torch, silu", "decode", batch=n),
                _of_2b("xla, silu", "decode", batch=n),
                "ms",
            )
        )
        for n in batches
    }


def _in_8_bits(record: str, weights: str) -> Figure:
    """The time to decode one sequence with 8-bit weights, over that in bfloat16."""
    whole, quantised = (
        _of_2b(name, "decode", batch=1) for name in ("mosaic, relu", f"mosaic, relu, {weights}")
    )
    return Figure(ratio(record, quantised, whole, "ms"))


def _rate_of_generate(row: Row) -> float:
    """The lower rate of greedy and sampled text, over that of the steps alone."""
    return min(row["generate_greedy"], row["generate_sampled"]) / row["tokens_per_second"]


def _over_silu(config: str) -> Number:
    """How many times as fast a sparse training step on one device is as one with SiLU."""
    ours, silu = ({"implementation": name, "devices": 1} for name in ("sparse, relu", "xla, silu"))
    return ratio(f"training-{config}-{_H100}", silu, ours, "ms")


def _in_float8(config: str) -> dict[str, Figure]:
    """How many times as fast sparse steps with products of 8-bit operands are as dense ones."""
    record, sparse = f"training-float8-{config}-{_H200}", {"implementation": "sparse, relu, float8"}
    others = {"": "xla, relu", "-over-dense": "xla, relu, float8", "-over-qwix": "qwix, relu"}
    others |= {"-over-silu": "xla, silu"} if config == "2b" else {}
    return {
        f"step-float8-{config}{name}": Figure(
            ratio(record, {"implementation": other}, sparse, "ms")
        )
        for name, other in others.items()
    }


_MODELS = {
    "scoring-2b": Figure(speedup(SCORING, {"model": "2b", "direction": "forward"}, "mosaic, relu")),
    "silu-scoring": Figure(
        percent(ratio(SCORING, _of_2b("xla, silu"), _of_2b("xla, relu"), "ms"), over=1),
        "{:.1f}",
    ),
    "fp8-dense-scoring": Figure(
        speedup(SCORING, {"model": "2b", "direction": "forward"}, "xla, relu, fp8 all")
    ),
    **_generation("prompts", GENERATION, "prefill", 1, 32),
    **_generation("decode", GENERATION, "decode", 1, 32),
    **_generation("decode-h100", DECODING, "decode", 1, 8, 32),
    "decode-h100-ms-1": Figure(value(DECODING, _of_2b("mosaic, relu", "decode", batch=1), "ms")),
    **_over_torch("decode-torch", GENERATION, 1, 8, 32),
    **_over_torch("decode-h100-torch", DECODING, 1, 32),
    **{
        f"{name}-decode-{card}": _in_8_bits(record, weights)
        for name, weights in (("fp8", "fp8 gate and up"), ("fp8-all", "fp8 all but down"))
        for card, record in (("h100", DECODING), ("h200", GENERATION))
    },
    "generate-least": Figure(
        percent(least(GENERATION, _of_2b("mosaic, relu", "decode"), _rate_of_generate)), "{:.0f}"
    ),
    "step-2b": Figure(
        speedup(f"training-2b-{_H100}", {"config": "2b", "devices": 1}, "sparse, relu")
    ),
    "step-documents": Figure(
        speedup(f"training-documents-0p5b-{_H200}", {"devices": 1}, "sparse, relu")
    ),
    "step-2b-silu": Figure(_over_silu("2b")),
    "step-0p5b-silu": Figure(_over_silu("0p5b")),
    **_in_float8("2b"),
    **_in_float8("0p5b"),
    **{
        f"float8-{which}": Figure(
            percent(of(PRECISION, {"variant": "float8"}, "increase")), "{:+.1f}"
        )
        for which, of in (("least", least), ("most", most))
    },
    "float8-nnz": Figure(
        percent(most(PRECISION, {}, lambda row: abs(row["nnz_ratio"] - 1))), "{:.0f}"
    ),
}


# Meshes: one micro-batch a step, the largest that fits.


def _on_mesh(config: str, devices: int, fsdp: int, block: str = "xla, relu") -> dict[str, Any]:
    micro_batch = {"0p5b": 96, "1p5b": 36}[config]
    mesh = {"devices": devices, "fsdp": fsdp, "micro_batch": micro_batch}
    return {"config": config, "implementation": block, **mesh}


def _on_meshes(config: str) -> dict[str, Figure]:
    """The figures of a model, in the names of which it stands."""
    record, alone = f"training-{config}-{_H200}", _on_mesh(config, 1, 1)
    over_data = {**alone, "devices": (1).__lt__}

    def exposed(row: Row) -> float:
        return row["exposed_ms"] / row["estimate_collective_ms"]

    def longer(devices: int) -> Number:
        on_all = _on_mesh(config, devices, devices)
        ms, ms_alone = value(record, on_all, "ms"), value(record, alone, "ms")
        bound = value(record, on_all, "estimate_collective_ms")
        return lambda records: (ms(records) - ms_alone(records)) / bound(records)

    def peak_less(block: str) -> Number:
        one, four = (
            value(record, _on_mesh(config, n, n, block), lambda row: row["peak_bytes"] / 1e9)
            for n in (1, 4)
        )
        return lambda records: one(records) - four(records)

    return {
        f"compute-{config}": Figure(
            value(record, alone, lambda row: row["ms"] / row["estimate_ms"])
        ),
        f"exposed-{config}-least": Figure(least(record, over_data, exposed), "{:.1f}"),
        f"exposed-{config}-most": Figure(most(record, over_data, exposed), "{:.1f}"),
        f"longer-{config}-2": Figure(longer(2), "{:.0f}"),
        f"longer-{config}-4": Figure(longer(4), "{:.0f}"),
        f"peak-less-{config}-dense": Figure(peak_less("xla, relu"), "{:.1f}"),
        f"peak-less-{config}-sparse": Figure(peak_less("sparse, relu"), "{:.1f}"),
    }


def _least_efficiency(records: Records) -> float:
    """Of all steps over fsdp, dense and sparse, of both models."""
    return min(
        least(f"training-{config}-{_H200}", {"fsdp": (1).__lt__}, "efficiency")(records)
        for config in ("0p5b", "1p5b")
    )


_MESHES = {
    **_on_meshes("0p5b"),
    **_on_meshes("1p5b"),
    "fsdp-efficiency": Figure(percent(_least_efficiency), "{:.0f}"),
    "fsdp-efficiency-24": Figure(
        percent(value(f"training-data-parallel-{_H200}", {"fsdp": 2}, "efficiency")), "{:.0f}"
    ),
}


# Blocks.


def _over_baseline(row: Row) -> float:
    """The time of a row over that of its baseline."""
    return row["ms"] / row["baseline_ms"]


def _peak(capacity: float, gated: bool = True) -> Figure:
    """The memory of sparse gradients at their peak, in percent of that of dense ones."""
    ours = most(GRADIENTS, {"gradient_capacity": capacity.__eq__, "gated": gated}, "peak_bytes")
    dense = most(GRADIENTS, {"implementation": "xla", "gated": gated}, "peak_bytes")
    return Figure(percent(lambda records: ours(records) / dense(records)), "{:.0f}")


def _gate_in_8_bits(pattern: str) -> dict[str, Figure]:
    """How many times as fast both passes are with such a gate as dense ones, in bf16 and FP8, and
    the errors."""
    row = {"pattern": pattern, "heavy_rows": 0, "matmul_dtype": "float8"}
    ours, dense = row | {"order": "by use"}, row | {"implementation": "xla"}

    def error(of: dict[str, Any]) -> Number:
        """That of what is furthest off, in percent."""
        return percent(value(GRADIENTS, of, lambda row: max(row["errors"])))

    return {
        f"gradients-float8-{pattern}": Figure(value(GRADIENTS, ours, "speedup")),
        f"gradients-float8-{pattern}-over-dense": Figure(ratio(GRADIENTS, dense, ours, "ms")),
        f"gradients-float8-{pattern}-error": Figure(error(ours), "{:.2g}"),
        f"gradients-float8-{pattern}-dense-error": Figure(error(dense), "{:.2g}"),
    }


def _peer(implementation: str, packing: str | None = None) -> dict[str, Any]:
    return {"pattern": "recorded", "implementation": implementation, "packing": packing}


def _no_gate(pattern: str, nnz: float) -> Figure:
    row = {"pattern": pattern, "nnz_mean": nnz, "packing": "unions", "implementation": "mosaic"}
    return Figure(value(NO_GATE, row, "speedup"))


def _live(share: float, implementation: str) -> Figure:
    """The speed-up of unions for 16,384 tokens if so many neurons of each layer are dead."""
    row = {"m": 16384, "dead": [share] * 4, "implementation": implementation}
    return Figure(value(LIVE, row, "speedup"))


def _few(m: int, nnz: float) -> Figure:
    row = {"m": m, "nnz_mean": nnz, "implementation": "mosaic", "heavy_rows": 0}
    return Figure(value(FEW_TOKENS, row, "speedup"))


def _by_mma(record: str, direction: str, pattern: str, products: int) -> Figure:
    """How many times as fast a block is as its dense twin's products, by the fastest `mma.sync`."""
    row = {"direction": direction, "pattern": pattern, "implementation": "mosaic", "m": 16384}
    by_mma = {"direction": "product", "implementation": lambda name: "mma.sync" in name}
    fastest, block = least(record, by_mma, "ms"), value(record, row, "ms")
    return Figure(lambda records: products * fastest(records) / block(records))


def _relu2(implementation: str) -> dict[str, Any]:
    return {"activation": "relu2", "m": 1, "implementation": implementation}


_MOST = {"implementation": "mosaic", "heavy_rows": (0).__lt__, "nnz_max": (2700).__lt__}
_SOME = {**_MOST, "nnz_max": (2700).__gt__}
_DENSE_BLOCK = {"implementation": "mosaic", "packing": None, "m": (255).__lt__}
_USUAL_FEW = {"implementation": "mosaic", "heavy_rows": 0, "m": (65).__gt__}
_DENSE_FP8 = {
    "pattern": "recorded",
    "implementation": lambda name: name.startswith(("xla, fp8", "torch, fp8")),
}

_BLOCKS = {
    "soak-rows": Figure(total(SOAK, {}, lambda row: row["rows"] / 1e6), "{:.1f}"),
    "soak-wrong": Figure(total(SOAK, {}, "wrong"), "{:.0f}"),
    "shapes": Figure(total(SOAK_SHAPES, {}, "shapes"), "{:.0f}"),
    "shapes-wrong": Figure(total(SOAK_SHAPES, {}, "wrong"), "{:.0f}"),
    "steps-rows": Figure(total(SOAK_STEPS, {}, lambda row: row["rows"] / 1e6), "{:.1f}"),
    "steps-wrong": Figure(total(SOAK_STEPS, {}, "wrong"), "{:.0f}"),
    "unions-loss": Figure(
        percent(most(BLOCK, {"packing": "unions"}, _over_baseline), over=1), "{:.0f}"
    ),
    "prompt-block-least": Figure(least(PROMPTS, _DENSE_BLOCK, "speedup")),
    "prompt-block-most": Figure(most(PROMPTS, _DENSE_BLOCK, "speedup")),
    **{
        f"few-{name}-{form}-{which}": Figure(of(record, _USUAL_FEW | {"gated": gated}, "speedup"))
        for name, record, form, gated in (
            ("narrow", NARROW, "gated", True),
            ("narrow", NARROW, "plain", False),
            ("wide", WIDE, "gated", True),
        )
        for which, of in (("least", least), ("most", most))
    },
    "narrow-dense-token": Figure(
        value(NARROW, {**_USUAL_FEW, "gated": True, "m": 1, "heavy_rows": 1}, "speedup")
    ),
    "narrow-unions": Figure(
        value(NARROW, {"packing": "unions", "m": 4096, "heavy_rows": 0}, "speedup")
    ),
    "wide-unions": Figure(
        value(WIDE, {"packing": "unions", "m": 4096, "heavy_rows": 0}, "speedup")
    ),
    "tokamax-least": Figure(least(SHAPES, {"implementation": "tokamax"}, "speedup")),
    "tokamax-most": Figure(most(SHAPES, {"implementation": "tokamax"}, "speedup")),
    "no-gate-skewed": _no_gate("skewed", 29.0),
    "no-gate-recorded": _no_gate("recorded", 20.0),
    "unions-ms": Figure(value(PEERS, _peer("mosaic", "unions"), "ms")),
    "fp8-unions-ms": Figure(value(PEERS, _peer("unions, fp8 gate and up"), "ms")),
    "fp8-dense-ms": Figure(least(PEERS, _DENSE_FP8, "ms")),
    "live-30": _live(0.3, "live"),
    "live-50": _live(0.5, "live"),
    "not-live-30": _live(0.3, "unions"),
    "not-live-50": _live(0.5, "unions"),
    "few-most-least": Figure(least(FEW_TOKENS, _MOST, "speedup")),
    "few-most-most": Figure(most(FEW_TOKENS, _MOST, "speedup")),
    "few-some-least": Figure(least(FEW_TOKENS, _SOME, "speedup")),
    "few-some-most": Figure(most(FEW_TOKENS, _SOME, "speedup")),
    "few-8-280": _few(8, 279.9),
    "few-16-280": _few(16, 279.9),
    "few-32-227": _few(32, 226.8),
    "few-64-113": _few(64, 113.1),
    "relu2-error": Figure(value(RECTIFIERS, _relu2("mosaic"), "error"), "{:.1e}"),
    "relu2-xla-error": Figure(value(RECTIFIERS, _relu2("xla"), "error"), "{:.1e}"),
    "peak-1.0": _peak(1.0),
    "peak-0.5": _peak(0.5),
    "peak-0.375": _peak(0.375),
    "peak-no-gate": _peak(1.0, gated=False),
    **_gate_in_8_bits("recorded"),
    **_gate_in_8_bits("skewed"),
    **{
        f"{engine}-{name}-{pattern}": _by_mma(record, direction, pattern, products)
        for engine, record in ENGINES.items()
        for name, direction, products in (
            ("forward", "forward", 3),
            ("both", "forward and backward", 9),
        )
        for pattern in ("recorded", "skewed")
    },
    **{
        f"{engine}-few-{m}": Figure(value(record, {"m": m, "implementation": "mosaic"}, "speedup"))
        for engine, record in ENGINES.items()
        for m in (1, 8, 32)
    },
    "exceeded-least": Figure(least(GRADIENTS, {"gradient_capacity": (0.5).__eq__}, "speedup")),
    "gradients-loss": Figure(
        percent(most(GRADIENTS, {"gradient_capacity": (1.0).__eq__}, _over_baseline), over=1),
        "{:.0f}",
    ),
}


# Of estimates without a GPU: the relative errors, in percent.


def _off(errors: Callable[[], Mapping[str, np.ndarray]], name: str, of: Callable) -> Figure:
    """What is made of the sizes of some errors of `benchmarks.estimate`."""
    return Figure(lambda records: 100 * float(of(np.abs(errors()[name]))), "{:.0f}")


_ESTIMATES = {
    "estimate-outside": Figure(lambda records: estimate.fit_outside()),
    "estimate-forward": _off(estimate.errors, "forward", np.max),
    "estimate-forward-median": _off(estimate.errors, "forward", np.median),
    "estimate-forward-fitted": _off(estimate.residuals, "forward", np.max),
    "estimate-both": _off(estimate.errors, "both", np.max),
    "estimate-both-median": _off(estimate.errors, "both", np.median),
    "estimate-both-fitted": _off(estimate.residuals, "both", np.max),
    "estimate-decode": _off(estimate.errors, "decode", np.max),
    "estimate-models": _off(estimate.errors, "model", np.max),
}

FIGURES: dict[str, Figure] = {
    **_MODELS,
    **_MESHES,
    **_BLOCKS,
    **_ESTIMATES,
    **figures_of_runs.FIGURES,
    **figures_of_torch.FIGURES,
    **study.FIGURES,
}
