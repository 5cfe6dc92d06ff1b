"""Plots of records: labels that can be read, and one colour for a variant."""

import json
import re

import pytest
from matplotlib.colors import to_hex, to_rgb
from PIL import Image

from benchmarks import colors, gains, plots, render
from benchmarks.record import RESULTS
from benchmarks.study import plots as study_plots
from benchmarks.tables import block
from tests import figures
from twell_jax.plotting import COLORS, drawn

RECORDS = render.load(RESULTS.glob("*.json"))


def record(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def figure_of(draw, name, directory):
    with figures.seen() as seen, drawn(directory / "plot.png", height=4.5) as figure:
        draw(figure, record(name))
    return seen[0]


def colors_in(figure):
    """The colour of each entry of a figure's legends."""
    return {
        text.get_text(): to_hex(handle.get_color())
        for legend in figure.legends
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
    }


STUDY = "study-nvidia-h200-20261124"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (study_plots.cross_entropy, "study-nvidia-h100-80gb-hbm3-20261121"),
        (study_plots.cross_entropy, STUDY),
        (study_plots.speedup, STUDY),
        (study_plots.depth, STUDY),
        (plots.speedup, "ffn-goals-nvidia-h100-80gb-hbm3-20261127"),
        pytest.param(plots.wallclock, "wallclock-nvidia-h200-20261125", marks=pytest.mark.slow),
        pytest.param(plots.losses, "losses-nvidia-h100-80gb-hbm3-20261121", marks=pytest.mark.slow),
    ],
)
def test_no_label_is_over_another(draw, name, tmp_path):
    figure = figure_of(draw, name, tmp_path)
    for axes in figure.axes:
        figures.labels(axes)
        figures.require_apart(axes.get_xticklabels(which="both"))
        figures.require_apart(axes.get_yticklabels(which="both"))
        for legend in figure.legends:
            assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_a_variant_has_one_colour_in_all_plots_of_a_study(tmp_path):
    draws = (study_plots.cross_entropy, study_plots.depth, study_plots.speedup)
    first, second, third = (colors_in(figure_of(draw, STUDY, tmp_path)) for draw in draws)
    assert first == second and len(set(first.values())) == len(first) == 17
    assert first.items() >= third.items()


def test_a_variant_keeps_its_colour_among_others():
    alone, among = colors.of(["l1 3.0e-4"]), colors.of(["silu", "lasso 1e-3", "l1 3.0e-4"])
    assert alone.items() <= among.items()
    assert colors.of(["l1"])["l1"] == COLORS[2]
    assert colors.of(["mosaic, unions"])["mosaic, unions"] == colors.of(["unions"])["unions"]


def test_what_a_figure_compares_has_several_colours():
    """Kernels have one colour in all figures, dense models another."""
    for of in RECORDS.values():
        if of["benchmark"] == "ffn" and plots.has_lines(of["rows"]):
            names = dict.fromkeys(map(block, plots.of_largest(of["rows"])))
            found = colors.of(name for name in names if "xla" not in name)
            assert len(set(found.values())) == len(found)
    ours = colors.of(["sparse", "mosaic, unions", "mosaic", "sparse gradients"])
    assert set(ours.values()) == {COLORS[6]}
    assert set(colors.of(["relu", "dense"]).values()) == {COLORS[0]}


def test_stronger_variants_of_a_method_are_darker():
    for names in (["l1 1e-5", "l1 3e-4", "l1 2e-3", "l1 1e-2"], ["U target 0.2", "U target 0.07"]):
        shades = [sum(to_rgb(color)) for color in colors.of(names).values()]
        assert shades == sorted(shades, reverse=True) and len(set(shades)) == len(shades)


def test_unknown_names_get_colours_of_their_own():
    found = colors.of(["relu", "mine", "another", "run 2, warm"])
    assert len(set(found.values())) == 4 and found["relu"] == COLORS[0]


def test_the_axis_of_a_comparison_over_time_shows_where_runs_end(tmp_path):
    figure = figure_of(plots.wallclock, "wallclock-nvidia-h200-20261125", tmp_path)
    for axes in figure.axes[:2]:
        least, most = axes.get_ylim()
        assert 1.5 < least < 1.7 and 2.0 < most < 2.3


def test_the_axis_of_layers_ends_where_there_is_nothing_left_to_compute(tmp_path):
    (axes,) = figure_of(study_plots.depth, STUDY, tmp_path).axes
    assert axes.get_ylim()[0] == 0.01


def test_points_that_no_line_joins_are_no_plot():
    def row(pattern, nnz):
        same = {"m": 8, "gated": True, "heavy_rows": 0, "speedup": 2.0, "implementation": "mosaic"}
        return {**same, "pattern": pattern, "nnz_mean": nnz}

    assert not plots.has_lines([row("skewed", 29.0), row("recorded", 20.0)])
    assert plots.has_lines([row("skewed", 29.0), row("skewed", 60.0)])


def test_the_figure_of_the_first_page_is_that_of_the_newest_records(tmp_path):
    shown = gains.description(RECORDS)
    assert Image.open(render.GAINS).text["Description"] == shown, "run: python -m benchmarks.render"
    with figures.seen() as seen, drawn(tmp_path / "gains.png") as figure:
        gains.draw(figure, RECORDS)
    (axes,) = seen[0].axes
    assert all(f" {label}" in shown for label in figures.labels(axes))
    assert axes.get_xlim()[0] == 0  # lengths are compared


def test_every_plot_of_results_is_on_a_page():
    pages = [*render.filled_pages(), *render.PAGES.glob("*.md")]
    shown = set(re.findall(r"([\w-]+\.png)\)", "".join(path.read_text() for path in pages)))
    assert {path.name for path in render.PAGES.glob("*.png")} == shown
