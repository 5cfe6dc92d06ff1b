"""Defines the figures in the prose of pages, each by the record and the rows that it is from.

A page names a figure in a comment directly behind it, `1.31<!-- figure: scoring-2b -->`, and
`benchmarks.render` puts the value before the comment. Units stay in the prose.
"""

from typing import Any

import numpy as np

from benchmarks.quotes import Figure, Number, least, most, percent, ratio, speedup, value
from benchmarks.tables import Row

_H100, _H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"

# The records of the figures, up to the date.
SCORING, SCORING_8_BITS = f"inference-{_H100}", f"inference-fp8-{_H200}"
GENERATION, DECODING = f"inference-cached-{_H200}", f"inference-decode-{_H100}"
BLOCK, FEW_TOKENS, PROMPTS = f"ffn-goals-{_H100}", f"ffn-few-{_H200}", f"ffn-prompts-{_H200}"
SHAPES, NO_GATE = f"ffn-{_H100}", f"ffn-non-gated-{_H200}"
PEERS, RECTIFIERS, LIVE = f"ffn-peers-{_H200}", f"ffn-activations-{_H200}", f"live-{_H200}"
GRADIENTS, LONG_RUN = f"gradients-{_H200}", f"wallclock-{_H200}"
STUDY, EARLIER_STUDY = f"study-{_H200}", f"study-{_H100}"


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


def _rate_of_generate(row: Row) -> float:
    """The lower rate of greedy and sampled text, over that of the steps alone."""
    return min(row["generate_greedy"], row["generate_sampled"]) / row["tokens_per_second"]


def _step(config: str, dense: str) -> Number:
    """How many times as fast a training step on one device is as one with another block."""
    ours, other = {"implementation": "sparse, relu"}, {"implementation": dense}
    record = f"training-{config}-{_H200}"
    return ratio(record, other | {"devices": 1}, ours | {"devices": 1}, "ms")


def _last_ce(row: Row) -> float:
    return row["evaluated"]["held_out_ce"][-1]


_RUN, _DENSE_RUN = {"variant": "sparse"}, {"variant": "relu"}

_MODELS = {
    "scoring-2b": Figure(speedup(SCORING, {"model": "2b", "direction": "forward"}, "mosaic, relu")),
    "silu-scoring": Figure(
        percent(ratio(SCORING_8_BITS, _of_2b("xla, silu"), _of_2b("xla, relu"), "ms"), over=1),
        "{:.1f}",
    ),
    "fp8-dense-scoring": Figure(
        speedup(SCORING_8_BITS, {"model": "2b", "direction": "forward"}, "xla, relu, fp8 all")
    ),
    **_generation("prompts", GENERATION, "prefill", 8, 32),
    **_generation("decode", GENERATION, "decode", 1, 32),
    **_generation("decode-h100", DECODING, "decode", 1, 8, 32),
    "decode-h100-ms-1": Figure(value(DECODING, _of_2b("mosaic, relu", "decode", batch=1), "ms")),
    **_over_torch("decode-torch", GENERATION, 1, 8, 32),
    **_over_torch("decode-h100-torch", DECODING, 1, 32),
    "generate-least": Figure(
        percent(least(GENERATION, _of_2b("mosaic, relu", "decode"), _rate_of_generate)), "{:.0f}"
    ),
    "step-2b": Figure(_step("2b", "xla, relu")),
    "step-2b-silu": Figure(_step("2b", "xla, silu")),
    "step-0p5b-silu": Figure(_step("0p5b", "xla, silu")),
    "run-seconds": Figure(value(LONG_RUN, _RUN, "seconds"), "{:.0f}"),
    "run-dense-seconds": Figure(value(LONG_RUN, _DENSE_RUN, "seconds"), "{:.0f}"),
    "run-energy": Figure(ratio(LONG_RUN, _RUN, _DENSE_RUN, "joules")),
    "run-ce": Figure(value(LONG_RUN, _RUN, _last_ce), "{:.3f}"),
    "run-dense-ce": Figure(value(LONG_RUN, _DENSE_RUN, _last_ce), "{:.3f}"),
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


def _relu2(implementation: str) -> dict[str, Any]:
    return {"activation": "relu2", "m": 1, "implementation": implementation}


_MOST = {"implementation": "mosaic", "heavy_rows": (0).__lt__, "nnz_max": (2700).__lt__}
_SOME = {**_MOST, "nnz_max": (2700).__gt__}
_DENSE_BLOCK = {"implementation": "mosaic", "packing": None}
_DENSE_FP8 = {
    "pattern": "recorded",
    "implementation": lambda name: name.startswith(("xla, fp8", "torch, fp8")),
}

_BLOCKS = {
    "unions-loss": Figure(
        percent(most(BLOCK, {"implementation": "unions"}, _over_baseline), over=1), "{:.0f}"
    ),
    "prompt-block-least": Figure(least(PROMPTS, _DENSE_BLOCK, "speedup")),
    "prompt-block-most": Figure(most(PROMPTS, _DENSE_BLOCK, "speedup")),
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
    "exceeded-least": Figure(least(GRADIENTS, {"gradient_capacity": (0.5).__eq__}, "speedup")),
    "gradients-loss": Figure(
        percent(most(GRADIENTS, {"gradient_capacity": (1.0).__eq__}, _over_baseline), over=1),
        "{:.0f}",
    ),
}


# The study.


def _layers(group: Row, passes: str) -> np.ndarray:
    """Speed-ups of a variant's layers, means over the seeds; of dense SiLU none."""
    return np.mean([run[passes]["factor"] for run in group["runs"] if run[passes]], axis=0)


def _layer(variant: str, layer: int) -> Figure:
    """The speed-up of a layer, forward."""
    row = {"variant": variant}
    return Figure(value(STUDY, row, lambda group: _layers(group, "speedup")[layer]))


_TRAINED = {"variant": lambda name: name != "silu"}
_NO_GATE_LAYERS = {"variant": "l1 3.0e-4, not gated"}

_STUDIES = {
    **{f"study-layer-{layer}": _layer("l1 3.0e-4", layer) for layer in (1, 4, 7)},
    "study-gradients-loss": Figure(
        percent(most(STUDY, _TRAINED, lambda group: 1 / _layers(group, "training").min()), over=1),
        "{:.0f}",
    ),
    "no-gate-layers-least": Figure(
        value(EARLIER_STUDY, _NO_GATE_LAYERS, lambda group: _layers(group, "speedup").min())
    ),
    "no-gate-layers-most": Figure(
        value(EARLIER_STUDY, _NO_GATE_LAYERS, lambda group: _layers(group, "speedup").max())
    ),
}

FIGURES: dict[str, Figure] = {**_MODELS, **_BLOCKS, **_STUDIES}
