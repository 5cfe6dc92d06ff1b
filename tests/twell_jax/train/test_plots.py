"""The plots of a run, drawn from its directory."""

import json
import os
import re
import shutil

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests import figures
from tests.commands import call
from twell_jax import config
from twell_jax.plotting import COLORS, QUIET, of_last_part, over_decades, scale_to_neurons
from twell_jax.train.plots import plot_report, plot_run
from twell_jax.train.plots_of_runs import plot_runs
from twell_jax.train.run_directory import RunPaths, load_config

LAYERS, D_FF = 16, 512
NUMBERS = "tokens", "l1", "l1_coefficient", "lr", "grad_norm", "tokens_per_second"


@pytest.fixture
def run_dir(tmp_path):
    """A run of 16 layers that goes on: steps 10 and 20 and an evaluation, and half a line."""
    directory = tmp_path / "my-run"
    directory.mkdir()
    changed = [f"run_dir={directory}", f"model.layers={LAYERS}"]
    (directory / "config.yaml").write_text(config.to_yaml(config.load("tiny", changed)))
    nnz = [0.0, 0.4, *(20.0 + layer for layer in range(2, LAYERS - 1)), float(D_FF)]
    records = [
        dict.fromkeys(NUMBERS, 0.0)
        | dict.fromkeys(("dead", "overflow"), [0.0] * LAYERS)
        | {"step": step, "ce": 3.25 - step / 10, "nnz": nnz, "max_nnz": [round(n) for n in nnz]}
        | {"mean_union": [0.5, *(0.25 for _ in range(LAYERS - 2)), 1.0]}
        for step in (10, 20)
    ]
    records.append({"step": 20, "held_out_ce": 1.5, "unigram_ce": 3.125})
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(f'{lines}{{"step": 3')
    return directory


def plot(run_dir):
    return call("-m", "twell_jax.plot", run_dir)


def test_a_run_can_be_drawn_while_it_goes_on(run_dir):
    drawn = plot(run_dir)
    assert (drawn.returncode, drawn.stderr) == (0, "")
    paths = [run_dir / "training.png", run_dir / "layers.png"]
    assert drawn.stdout == "".join(f"plot: {path}\n" for path in paths)
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for path in paths)
    assert not list(run_dir.glob("*.tmp"))


def test_plots_name_the_run_and_its_main_settings(run_dir):
    with figures.seen() as drawn:
        plot(run_dir)
    assert len(drawn) == 2
    for figure in drawn:
        assert figure.get_suptitle() == (
            "my-run\nrelu, L1 0.0015, 16 layers of 512 neurons, d_model 128, lr 0.003, "
            "4,096 tokens a step"
        )


def test_bars_carry_their_values_and_neurons_have_one_axis_from_zero_on(run_dir):
    with figures.seen() as drawn:
        plot(run_dir)
    (loss, nnz, union, speed), (layers,) = (figure.axes for figure in drawn)
    assert speed.get_xlabel() == "step" and speed.get_ylabel() == "tokens per second"
    labels = figures.labels(layers)
    mean, largest, together = (labels[i : i + LAYERS] for i in (0, LAYERS, 2 * LAYERS))
    assert mean[:3] == ["0.0 (100.0% zeros)", "0.4 (99.9% zeros)", "22.0 (95.7% zeros)"]
    assert largest[:3] == ["0", "0", "22"] and largest[-1] == str(D_FF)
    assert together[:2] == ["U 50.0%", "U 25.0%"] and together[-1] == "U 100.0%"
    assert layers.patches[2 * LAYERS].get_width() == D_FF / 2
    assert layers.get_xlim() == nnz.get_ylim() and nnz.get_ylim()[0] == 0
    assert layers.get_xlabel() == nnz.get_ylabel() == "neurons of 512 active for a token"
    shown = [
        text.get_text() for axes in (loss, nnz, union) for text in axes.get_legend().get_texts()
    ]
    assert {"training, last 1.250", "held-out, last 1.500", "unigram baseline 3.125"} < set(shown)
    assert "layers, mean, last 31.2%" in shown


def draw_report(run_dir):
    with figures.seen() as drawn:
        (path,) = plot_report(load_config(run_dir), RunPaths(run_dir))
    assert path == run_dir / "report.png" and path.read_bytes().startswith(b"\x89PNG")
    return drawn[0].axes


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_figure_of_the_report_has_one_colour_and_a_line_for_the_model_before(run_dir):
    path = run_dir / "metrics.jsonl"
    source = {"step": 0, "source_ce": 1.0, "source_activation": "silu"}
    path.write_text(json.dumps(source) + "\n" + path.read_text())
    quality, nnz, union, layers = draw_report(run_dir)
    assert legend(quality) == ["training", "held-out, last 1.500", "dense, held-out, 1.000"]
    training, held_out, dense = quality.get_lines()
    assert training.get_color() == held_out.get_color() == "C0"
    assert nnz.get_lines()[0].get_color() == COLORS[0]
    assert dense.get_color() == QUIET and dense.get_ydata() == [1.0, 1.0]
    assert quality.get_ylim()[0] < 1 and quality.get_xlim() == nnz.get_xlim() == union.get_xlim()
    assert "layers, mean, last 31.2%" in legend(union)
    labels = figures.labels(layers)
    assert labels == ["50.0%", *["25.0%"] * (LAYERS - 2), "100.0%"]
    assert layers.get_xlim()[0] == 0 and layers.get_xlabel() == "U, step 20"


def test_the_figure_of_a_report_without_u_has_the_non_zeros_of_layers(run_dir):
    path = run_dir / "metrics.jsonl"
    path.write_text(re.sub(r', "mean_union": \[.*?\]', "", path.read_text()))
    quality, _, layers = draw_report(run_dir)
    assert legend(quality) == ["training", "held-out, last 1.500"]
    assert figures.labels(layers)[1:3] == ["0.4", "22.0"]


def test_the_loss_of_a_run_from_another_model_is_drawn_beside_that(run_dir):
    path = run_dir / "metrics.jsonl"
    source = {"step": 0, "source_ce": 1.75, "source_activation": "relu"}
    path.write_text(json.dumps(source) + "\n" + path.read_text())
    with figures.seen() as drawn:
        plot(run_dir)
    shown = drawn[0].axes[0].get_legend()
    assert [text.get_text() for text in shown.get_texts()] == [
        "training, last 1.250", "held-out, last 1.500", "before, held-out, 1.750",
    ]  # fmt: skip
    assert shown.get_window_extent().x1 <= drawn[0].bbox.x1


def test_steps_of_version_0_2_are_drawn_without_u(run_dir):
    path = run_dir / "metrics.jsonl"
    old, new, *_ = map(json.loads, path.read_text().splitlines()[:2])
    del old["mean_union"]
    seen = []
    for records in ([old], [old, new]):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        with figures.seen() as drawn:
            assert plot(run_dir).returncode == 0
        seen.append([len(figure.axes) for figure in drawn])
    assert seen == [[3, 1], [4, 1]]
    (_, _, union, _), _ = (figure.axes for figure in drawn)
    np.testing.assert_array_equal(union.get_lines()[0].get_xdata(), [20])


def test_speed_is_drawn_with_the_share_of_sparse_layers(run_dir):
    path = run_dir / "metrics.jsonl"
    *records, _ = map(json.loads, path.read_text().splitlines()[:3])
    for record, rate, sparse in zip(records, (0.0, 1234.5), (0, 4), strict=True):
        record["tokens_per_second"] = rate
        record["sparse_gradients"] = [layer < sparse for layer in range(LAYERS)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with figures.seen() as drawn:
        plot(run_dir)
    *_, speed, share = drawn[0].axes
    (rates,), (shares,) = (axes.get_lines() for axes in (speed, share))
    np.testing.assert_array_equal(rates.get_ydata(), [np.nan, 1234.5])  # 0 was not measured
    np.testing.assert_array_equal(shares.get_ydata(), [0, 4 / LAYERS])
    legends = [axes.get_legend() for axes in (speed, share)]
    assert [legend.get_texts()[0].get_text() for legend in legends] == [
        "tokens per second, last 1,234",
        "layers with sparse gradients, last 4 of 16",
    ]
    assert not legends[0].get_window_extent().overlaps(legends[1].get_window_extent())


def test_a_target_of_u_has_a_panel_beside_that_of_the_coefficient(run_dir):
    changed = [f"run_dir={run_dir}", f"model.layers={LAYERS}", "union_target=0.3"]
    (run_dir / "config.yaml").write_text(config.to_yaml(config.load("tiny", changed)))
    path = run_dir / "metrics.jsonl"
    *records, _ = map(json.loads, path.read_text().splitlines()[:3])
    for record in records:
        record |= {"mean_union": [0.5] * LAYERS, "union_target": 0.3, "l1_coefficient": 1e-3}
        record["l1_multipliers"] = [1.0] * LAYERS
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with figures.seen() as drawn:
        plot(run_dir)
    assert "relu, target U 30.0%, 16 layers" in drawn[0].get_suptitle()
    _, _, union, coefficient, _ = drawn[0].axes
    shown = [text.get_text() for text in union.get_legend().get_texts()]
    assert shown == ["layers, range", "layers, mean, last 50.0%", "target 30.0%"]
    np.testing.assert_array_equal(union.get_lines()[0].get_ydata(), [0.5, 0.5])
    assert coefficient.get_ylabel() == "L1 coefficient"


def test_a_run_without_a_step_is_one_clear_line(run_dir, tmp_path):
    (run_dir / "metrics.jsonl").unlink()
    refused = plot(run_dir)
    assert refused.returncode == 1
    assert refused.stderr == (
        f"error: {run_dir}/metrics.jsonl: holds no step of the run, so there is nothing to draw; "
        "the run logs every 10 steps (log_every)\n"
    )
    refused = plot(tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: run_dir: {tmp_path} is not the directory of a run")
    assert refused.stderr.count("\n") == 1


def test_several_runs_are_drawn_in_one_figure_each_in_its_colour(run_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run_dir, other)
    path = tmp_path / "both.png"
    with figures.seen() as seen:
        done = call("-m", "twell_jax.plot", run_dir, other, "--out", path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"plot: {path}\n")
    (figure,) = seen
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["my-run, held-out CE 1.500", "other, held-out CE 1.500"]
    loss, nnz, speed = figure.axes
    for axes, lines in ((loss, 2), (nnz, 1), (speed, 1)):
        colors = [line.get_color() for line in axes.get_lines()]
        assert colors == ["C0"] * lines + ["C1"] * lines
    np.testing.assert_array_equal(nnz.get_lines()[0].get_xdata(), [10 * 4096, 20 * 4096])


def test_runs_of_one_name_are_told_apart_and_one_run_named_twice_is_refused(run_dir, tmp_path):
    other = tmp_path / "elsewhere/my-run"
    shutil.copytree(run_dir, other)
    with figures.seen() as seen:
        call("-m", "twell_jax.plot", run_dir, other, "--out", tmp_path / "both.png")
    shown = [text.get_text() for text in seen[0].legends[0].get_texts()]
    assert [name.split(",")[0] for name in shown] == [
        f"{tmp_path.name}/my-run",
        "elsewhere/my-run",
    ]
    refused = call("-m", "twell_jax.plot", run_dir, run_dir)
    assert refused.stderr == "error: run_dir: a run is named twice\n"
    refused = call("-m", "twell_jax.plot", run_dir, "--out", tmp_path / "one.png")
    assert "--out: is for the figure of several runs" in refused.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["cost$_{$5", "a$b$c", "_first"])
def test_names_are_shown_as_they_are(run_dir, tmp_path, name):
    other = tmp_path / name
    shutil.copytree(run_dir, other)
    with figures.seen() as seen:
        assert plot(other).returncode == 0
        call("-m", "twell_jax.plot", run_dir, other, "--out", tmp_path / "both.png")
    *of_one, both = seen
    shown = [figure.get_suptitle().partition("\n")[0] for figure in of_one]
    shown.append(both.legends[0].get_texts()[1].get_text().partition(",")[0])
    assert shown == [name.replace("$", r"\$")] * 3  # of which matplotlib shows the "$"


def test_what_cannot_be_drawn_of_a_name_is_spelt_out(run_dir, tmp_path):
    other = tmp_path / os.fsdecode(b"caf\xe9\tno UTF-8")
    shutil.copytree(run_dir, other)
    with figures.seen() as seen:
        plot_run(load_config(other), RunPaths(other))
        plot_runs([str(run_dir), str(other)], tmp_path / "both.png")
    name = r"caf\udce9\tno UTF-8"
    assert all(figure.get_suptitle().startswith(f"{name}\n") for figure in seen[:-1])
    assert seen[-1].legends[0].get_texts()[1].get_text().startswith(f"{name}, ")


def test_the_axis_of_a_loss_shows_its_later_part():
    axes = Figure().subplots()
    axes.plot([0, 1, 50, 100], [9.0, 4.0, 2.0, 1.5])
    of_last_part(axes, since=0.4)
    assert axes.get_ylim() == pytest.approx((1.475, 2.025))
    assert axes.get_xlim() == pytest.approx((49, 101))


@pytest.mark.filterwarnings("error")
def test_a_loss_of_one_step_has_axes_around_it():
    axes = Figure().subplots()
    axes.plot([5], [2.0])
    of_last_part(axes, since=0.4)
    assert axes.get_xlim() == (4.5, 5.5) and axes.get_ylim() == pytest.approx((1.95, 2.05))


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.5, 300.0], ["0", "1", "10", "100"]),
        ([20.0, 300.0], ["10", "20", "50", "100", "200", "500"]),
    ],
)
def test_the_axis_of_neurons_begins_below_the_lines(values, ticks):
    axes = Figure().subplots()
    axes.plot([0, 1], values)
    scale_to_neurons(axes, "y", 512)
    assert axes.get_ylim() == (float(ticks[0]), 768)
    assert [label.get_text() for label in axes.get_yticklabels()] == ticks


def test_an_axis_has_decades_if_what_is_drawn_spans_some():
    axes = Figure().subplots()
    axes.plot([20, 29], [0.001, 1000])
    over_decades(axes, "x")
    over_decades(axes, "y")
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "log")
    assert {"0.1", "10", "1000"} <= {label.get_text() for label in axes.get_yticklabels()}
