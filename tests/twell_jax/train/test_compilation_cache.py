"""Commands keep compiled programs, unless the user has decided about JAX's cache."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.twell_jax import drawn, untrained
from twell_jax import analyze, evaluate, export, generate, measure, quantise
from twell_jax.train import command, compilation_cache

ROOT = Path(__file__).parents[3]


@pytest.fixture
def directory(kept_programs):
    return kept_programs


def compile_and_run():
    """Compiles a program, the same every time, that is not yet in this process, and runs it."""

    def kept(x):
        return jnp.sin(x) + 1

    assert jax.jit(kept)(np.float32(0)) == 1


def entries(directory):
    return {path: path.read_bytes() for path in directory.glob("jit_kept-*-cache")}


def used(directory):
    (path,) = directory.glob("jit_kept-*-atime")
    return path.read_bytes()


def test_a_program_is_found_again_and_one_that_is_damaged_is_replaced(
    directory, monkeypatch, capsys
):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # as the variable does
    compilation_cache.enable()
    assert not directory.stat().st_mode & 0o077  # JAX runs what it finds there
    compile_and_run()
    whole, then = entries(directory), used(directory)
    compile_and_run()
    assert len(whole) == 1 and entries(directory) == whole and used(directory) != then
    assert capsys.readouterr() == ("", "")

    (path,) = whole
    path.write_bytes(whole[path][:100])
    compile_and_run()
    _, line = capsys.readouterr()
    assert line.startswith(f"warning: {directory}: jit_kept cannot be read, and is compiled again:")
    assert line.count("\n") == 1
    assert len(entries(directory)[path]) > 100
    compile_and_run()
    assert capsys.readouterr() == ("", "")


def test_quick_programs_are_not_kept_and_the_cache_stays_small(directory):
    compilation_cache.enable()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.1
    assert jax.config.jax_compilation_cache_max_size == 2**30


def test_other_warnings_are_shown_as_ever(directory):
    shown = []
    warnings.showwarning = lambda message, *_: shown.append(str(message))
    compilation_cache.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("of another kind", stacklevel=1)
    assert shown == ["of another kind"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_compilation_cache_dir", "/their/own"),
        ("jax_compilation_cache_dir", ""),
        ("jax_enable_compilation_cache", False),
    ],
)
def test_the_user_s_settings_win(directory, name, value):
    jax.config.update(name, value)  # as JAX does with the variable, when it is imported
    before = dict(jax.config.values)
    compilation_cache.enable()
    assert jax.config.values == before and not directory.parent.exists()


def test_one_of_several_processes_keeps_none(directory, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    compilation_cache.enable()
    assert jax.config.jax_compilation_cache_dir is None and not directory.exists()


def test_a_directory_that_cannot_be_written_is_one_line(directory, capsys):
    directory.parent.touch()  # a file, which not even root takes for a directory
    compilation_cache.enable()
    compile_and_run()
    _, line = capsys.readouterr()
    assert line.startswith("warning: compiled programs are not kept: ") and line.count("\n") == 1
    assert str(directory) in line and "JAX_ENABLE_COMPILATION_CACHE=false" in line


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (analyze, ["runs/none"]),
        (command, ["tiny"]),  # also that of sparsify
        (evaluate, ["runs/none"]),
        (export, ["runs/none", "none"]),
        (generate, ["runs/none", "--prompt", "x"]),
        (measure, ["128", "256"]),
        (quantise, ["runs/none", "none"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_commands_that_compile_keep_programs(monkeypatch, command, arguments):
    class Enabled(BaseException):
        pass

    def enable():
        raise Enabled

    monkeypatch.setattr(compilation_cache, "enable", enable)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    with pytest.raises(Enabled):
        command.main()


@pytest.mark.slow
def test_a_second_command_finds_the_programs_of_the_first_unless_that_is_off(tmp_path):
    model = drawn.SMALL | {"vocab_size": 257, "context": 32}
    untrained.save(*untrained.begin(tmp_path / "run", model))
    command = ["-m", "twell_jax.generate", str(tmp_path / "run"), "--prompt", "x"]
    inherited = {name: value for name, value in os.environ.items() if name[:4] != "JAX_"}

    def programs(**variables):
        """The large programs in the cache, and when each was used, after the command. Whether small
        ones are kept depends on how long they take to compile."""
        ours = {"JAX_PLATFORMS": "cpu", "TWELL_JAX_CACHE": str(tmp_path / "cache")}
        process = subprocess.run(
            [sys.executable, *command, "--max-tokens", "8"],
            cwd=ROOT,
            env=inherited | ours | variables,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "warning" not in process.stderr
        files = {
            path.name: path.read_bytes()
            for name in ("prefill", "extend")
            for path in tmp_path.glob(f"cache/compiled/jit_{name}-*")
        }
        return [{k: v for k, v in files.items() if k.endswith(end)} for end in ("-cache", "-atime")]

    assert programs(JAX_ENABLE_COMPILATION_CACHE="false") == [{}, {}]
    first, used = programs()
    again, used_again = programs()
    assert len(first) == 2 and again == first and not used.items() & used_again.items()
    theirs = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "other")}
    assert programs(**theirs, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0") == [again, used_again]
    assert any((tmp_path / "other").glob("jit_*-cache"))
