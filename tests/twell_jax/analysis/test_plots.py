"""The plots of an analysis, of a model in which few neurons are active, or none."""

import numpy as np
import pytest

from tests import figures
from tests.seeds import rng
from twell_jax.analysis.activity import Activity
from twell_jax.analysis.plots import plot_activity
from twell_jax.analysis.speedup import Speedup

LAYERS, SEQUENCES, TOKENS, D_FF = 6, 3, 32, 100


def draw(fired, directory):
    """The figures by name, of a model whose neurons fired so."""
    nnz, usage = fired.sum(-1), fired.sum((1, 2))
    union = {size: np.linspace(0, size / 100, LAYERS) for size in (1, 4, 16, 32)}
    ms = np.arange(1.0, LAYERS + 1)
    speedup = Speedup("abacus", 96, nnz.mean((1, 2)), np.full(LAYERS, 4.0), ms, 0 * ms, 0 * ms)
    with figures.seen() as drawn:
        paths = plot_activity(Activity(1.0, nnz, usage, union), speedup, directory, "my-run\nrelu")
    names = [path.stem for path in paths]
    assert names == ["nnz_by_layer", "nnz_by_position", "union", "usage", "speedup"]
    return dict(zip(names, drawn, strict=True))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The figures by name; in layer 0 no neuron is active."""
    fired = rng().random((LAYERS, SEQUENCES, TOKENS, D_FF)) < 0.05
    fired[0] = False
    return draw(fired, tmp_path_factory.mktemp("plots"))


def test_every_plot_names_the_run(drawn):
    assert {figure.get_suptitle() for figure in drawn.values()} == {"my-run\nrelu"}


def test_zeros_are_on_the_axis(drawn):
    (layers,), (positions, _) = drawn["nnz_by_layer"].axes, drawn["nnz_by_position"].axes
    assert layers.get_xlim() == positions.get_ylim() == (0, 1.5 * D_FF)
    assert figures.labels(layers)[0] == "median 0, mean 0.0"
    assert len(figures.labels(layers)) == LAYERS


def test_positions_count_from_zero_as_in_the_table(drawn):
    axes = drawn["nnz_by_position"].axes[0]
    assert axes.get_xlim()[0] == 0
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "1", "10"]
    for line in axes.get_lines()[:LAYERS]:
        assert line.get_xdata().tolist() == list(range(TOKENS))


@pytest.mark.filterwarnings("error")
def test_a_speedup_has_no_correlation_where_no_layer_is_active(drawn, tmp_path):
    def title(figures):
        return figures["speedup"].axes[0].get_title(loc="left")

    silent = draw(np.zeros((LAYERS, SEQUENCES, TOKENS, D_FF), bool), tmp_path)
    assert title(silent) == "feed-forward block of each layer, abacus"
    assert title(drawn).startswith(f"{title(silent)}, r = ")
