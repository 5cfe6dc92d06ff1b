"""The figures of PyTorch in the prose of pages; see `benchmarks.figures`."""

from typing import Any

from benchmarks.quotes import Figure, ratio, speedup

# The records, up to the date.
BLOCK, SCORING = "torch_block-nvidia-h200", "torch_scoring-nvidia-h200"


def _rows(direction: str, m: int, pattern: str = "recorded") -> dict[str, Any]:
    """The rows of a block of torch without dense tokens."""
    return {"direction": direction, "m": m, "pattern": pattern, "heavy_rows": 0}


FIGURES: dict[str, Figure] = {
    **{
        f"torch-{name}": Figure(speedup(BLOCK, _rows(direction, m), "kernels"))
        for name, direction, m in (
            ("forward", "forward", 16384),
            ("forward-8192", "forward", 8192),
            ("forward-4096", "forward", 4096),
            ("gradients", "forward and backward", 16384),
            ("gradients-8192", "forward and backward", 8192),
            ("gradients-4096", "forward and backward", 4096),
        )
    },
    **{
        f"torch-graph-{m}": Figure(
            speedup(BLOCK, _rows("forward, CUDA graph", m), "kernels, laid out")
        )
        for m in (1, 8, 64)
    },
    **{
        f"torch-{name}-published-{pattern}": Figure(
            ratio(
                BLOCK,
                _rows(direction, 16384, pattern) | {"implementation": "published"},
                _rows(direction, 16384, pattern) | {"implementation": ours},
                "ms",
            )
        )
        for name, direction, ours in (
            ("forward", "forward", "kernels"),
            ("gradients", "forward and backward", "kernels"),
            ("gradients-by-use", "forward and backward", "kernels, by use"),
        )
        for pattern in ("recorded", "skewed")
    },
    "torch-gradients-by-use": Figure(
        speedup(BLOCK, _rows("forward and backward", 16384), "kernels, by use")
    ),
    "torch-scoring": Figure(speedup(SCORING, {"model": "2b"}, "kernels, compiled")),
}
