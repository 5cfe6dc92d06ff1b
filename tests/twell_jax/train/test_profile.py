"""The trace of some steps of a run."""

import io

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from twell_jax import config
from twell_jax.train import profile


@pytest.fixture
def calls(monkeypatch):
    """What the profiler was asked for, in place of it."""
    made = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: made.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append("stop"))
    return made


def run(directory, steps, first=0, last=6, failing=None):
    """What is printed while steps are taken."""
    output = io.StringIO()
    with profile.traced(directory, steps, Console(file=output)) as trace:
        for step in range(first, last):
            trace.before_step(step, None)
            if step == failing:
                raise KeyboardInterrupt
            trace.after_step(step + 1, None)
    return output.getvalue()


@pytest.mark.parametrize(
    ("steps", "first", "expected"),
    [
        (None, 0, []),
        ((2, 4), 0, ["start", "stop"]),
        ((2, 4), 3, ["start", "stop"]),  # continued between them
        ((2, 4), 4, []),
        ((2, 9), 0, ["start", "stop"]),  # the run ends before
        ((7, 9), 0, []),
    ],
)
def test_a_trace_begins_and_ends_once(calls, tmp_path, steps, first, expected):
    assert bool(run(tmp_path, steps, first)) == bool(expected)
    assert calls == expected


def test_a_run_that_is_stopped_ends_the_trace(calls, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, (2, 5), failing=3)
    assert calls == ["start", "stop"]


def test_a_trace_that_fails_ends_no_run(tmp_path, monkeypatch, caplog):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    assert run(tmp_path, (2, 4)) == ""
    assert caplog.messages[0] == "profile_steps: OSError: disk full"


def test_a_trace_has_the_formats_of_xprof_and_perfetto(tmp_path):
    with profile.traced(tmp_path, (0, 1), Console(quiet=True)) as trace:
        trace.before_step(0, None)
        trace.after_step(1, jnp.ones(4) + 1)
    found = {path.name for path in tmp_path.glob("plugins/profile/*/*")}
    assert "perfetto_trace.json.gz" in found
    assert any(name.endswith(".xplane.pb") for name in found)


def test_steps_that_are_none_are_refused():
    with pytest.raises(config.ConfigError, match="profile_steps: needs 0 <= first < last, such as"):
        config.load("tiny", ["profile_steps=[3, 3]"])
