"""What a run shows while it goes on, on a terminal and elsewhere."""

import io
import logging
import math
import os
import sys
import threading

import jax
import pytest
from rich.console import Console
from rich.text import Text

from twell_jax import config
from twell_jax.train import plots
from twell_jax.train.progress import Painter, Progress, patient_console, redraw, verdict
from twell_jax.train.run_directory import RunPaths
from twell_jax.train.sample import Sample


def shown(width: int, terminal: bool, **also: float) -> list[str]:
    """The lines shown by steps 10 and 20 of 400, which take 3 s each, and an evaluation."""
    now, output = 0.0, io.StringIO()
    console = Console(
        file=output, width=width, force_terminal=terminal, color_system=None, get_time=lambda: now
    )
    measured = {"ce": 1.25, "l1": 0.5, "nnz": [8.0, 16.0], "dead": [0.0, 0.01]}
    measured |= {"mean_union": [0.4, 0.5]}
    measured |= {"flops_utilisation": None} | also
    if measured["mean_union"] is None:
        del measured["mean_union"]
    with Progress(console, 9, 400, d_ff=512) as progress:
        for step in range(10, 21):
            now += 3 if step > 10 else 60  # the first one compiles
            record = {"step": step, "tokens_per_second": 12345.0 if step > 10 else 0.0}
            progress.show(record | measured, logged=step % 10 == 0)
        progress.show_evaluation(1.5)
    text = output.getvalue().replace("\r", "\n").split("\x1b[?25h")[0]  # the cursor comes back
    lines = [Text.from_ansi(line).plain.rstrip() for line in text.splitlines()]
    return [line for line in lines if line]


# Of a bar of 12 columns and a gap.
WHOLE = (
    "step 20/400  ETA 0:19:00  CE 1.250  zeros 97.7%  U 45.0%  12,345 tokens/s  dead 0.5%  "
    "nnz 12.0  L1 0.50"
)


@pytest.mark.parametrize(
    ("width", "last"),
    [
        (120, "L1 0.50"),
        (100, "dead 0.5%"),
        (80, "U 45.0%"),
        (60, "zeros 97.7%"),
        (40, "ETA 0:19:00"),
        (30, "step 20/400"),
    ],
)
def test_on_a_terminal_the_last_columns_are_dropped_as_width_shrinks(width, last):
    line = shown(width, terminal=True)[-1]
    assert line == f"{line[:13]}{WHOLE[: WHOLE.index(last) + len(last)]}"
    assert line[0] in "━╸" and set(line[:13]) <= set("━╸╺ ")


def test_elsewhere_every_line_says_step_of_total_and_eta():
    assert shown(80, terminal=False) == [
        WHOLE.replace("20/", "10/").replace("0:19:00", "-:--:--").replace("12,345", "0"),
        WHOLE,
        "step 20/400  ETA 0:19:00  held-out CE 1.500",
    ]


def test_a_known_share_of_the_peak_comes_last():
    assert shown(80, terminal=False, flops_utilisation=0.412)[1] == f"{WHOLE}  MFU 41%"


def test_a_run_with_a_target_shows_it_and_the_coefficient():
    line = shown(100, terminal=False, sparsity_target=16.0, l1_coefficient=2.5e-4)[1]
    assert line == (
        "step 20/400  ETA 0:19:00  CE 1.250  nnz 12.0 -> 16  U 45.0%  12,345 tokens/s  dead 0.5%  "
        "L1 0.50  L1 coefficient 2.50e-04"
    )


def test_a_step_of_few_tokens_is_shown_without_u():
    assert shown(100, terminal=False, mean_union=None)[1] == WHOLE.replace("  U 45.0%", "")


def test_a_target_of_u_stands_in_place_of_the_zeros_too():
    of_union = {"union_target": 0.3, "l1_coefficient": 2.5e-4}
    line = shown(100, terminal=False, **of_union)[1]
    assert "CE 1.250  U 45.0% -> 30.0%  12,345 tokens/s  dead 0.5%  nnz 12.0  L1 0.50  L1 c" in line
    line = shown(100, terminal=False, sparsity_target=16.0, **of_union)[1]
    assert "CE 1.250  nnz 12.0 -> 16  U 45.0% -> 30.0%  12,345 tokens/s  dead 0.5%  L1" in line


def test_skipped_and_missed_neurons_are_shown():
    line = shown(100, terminal=False, live=[128, 256], missed=[0, 5], flops_utilisation=0.4)[1]
    assert line == f"{WHOLE}  live 37.5%  missed 0.49%  MFU 40%"


def test_on_a_terminal_an_evaluation_is_printed_above_the_bar():
    lines = shown(80, terminal=True)
    assert "step 20/400  ETA 0:19:00  held-out CE 1.500" in lines[:-1]


@pytest.mark.parametrize("process", [0, 1])
def test_only_the_first_process_draws(process, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(plots, "plot_run", lambda settings, paths: [paths.directory / "x.png"])
    drawn = redraw(config.load("tiny"), RunPaths(tmp_path), Console(quiet=True))
    assert len(drawn) == 1 - process


def test_plots_are_drawn_beside_the_run_one_at_a_time(tmp_path, monkeypatch):
    begun, may_end, drawn = threading.Event(), threading.Event(), []

    def plot_run(settings, paths):
        begun.set()
        assert may_end.wait(60)
        drawn.append(threading.current_thread())
        return []

    monkeypatch.setattr(plots, "plot_run", plot_run)
    with Painter(config.load("tiny"), RunPaths(tmp_path), Console(quiet=True)) as painter:
        painter.redraw()
        assert begun.wait(60)
        painter.redraw()  # what is drawn at the end has it, too
        may_end.set()
    assert len(drawn) == 1 and drawn[0] is not threading.current_thread()


def test_a_step_that_waits_for_its_program_says_so():
    output = io.StringIO()
    with Progress(Console(file=output), 7, 9, 512) as progress:
        progress.show_compiling()
    assert output.getvalue() == "step 7/9  ETA -:--:--  compiling\n"


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk():
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (closed_pipe, "Broken pipe"),
        (full_disk, "No space left on device"),
        (lambda: None, ""),  # what Python makes of a descriptor that was closed before it began
    ],
    ids=["closed pipe", "full disk", "none"],
)
def test_an_output_that_fails_is_said_once_and_ends_no_run(output, why, monkeypatch, caplog):
    monkeypatch.setattr(sys, "stdout", output())
    console = patient_console(quiet=False)
    with Progress(console, 0, 400, d_ff=512) as progress, caplog.at_level(logging.WARNING):
        for _ in range(3):
            progress.show_evaluation(1.5)
            console.out("a line")
    warnings = [f"standard output cannot be written ({why}); the run goes on"] if why else []
    assert [record.getMessage().split(", and")[0] for record in caplog.records] == warnings
    if why:
        print("what Python would fail to write at its end", flush=True)
        sys.stdout.close()


def test_an_evaluation_shows_bits_per_byte_and_a_line_of_the_sample():
    output = io.StringIO()
    with Progress(Console(file=output, width=80), 20, 400, d_ff=512) as progress:
        progress.show_evaluation(1.5, 0.75, Sample("def ", "f(x):\n\x1b[2J[bold]"))
    ce, sample = output.getvalue().splitlines()[-2:]
    assert ce.endswith("held-out CE 1.500  0.750 bits/byte")
    assert sample == r"sample: 'def ' -> 'f(x):\n\x1b[2J[bold]'"


def test_the_verdict_has_bits_per_byte_if_they_are_known():
    line = "held-out CE 0.693 nats/token (perplexity 2.00{}); unigram baseline 2.000"
    assert verdict(math.log(2), 2.0, 0.25) == line.format(", 0.250 bits/byte")
    assert verdict(math.log(2), 2.0, None) == line.format("")
