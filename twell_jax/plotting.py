"""Matplotlib without a display, with one style for all plots."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 150})

__all__ = ["plt", "save"]


def save(figure: plt.Figure, path: Path) -> Path:
    """Writes a figure to a file and frees it; returns the path."""
    figure.savefig(path)
    plt.close(figure)
    return path
