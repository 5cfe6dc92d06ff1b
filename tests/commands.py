"""Commands of the package, run in this process, which has imported JAX before."""

import contextlib
import io
import math
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from twell_jax.models import sharding

ROOT = Path(__file__).parents[1]


def call(*command) -> subprocess.CompletedProcess:
    """Does what `python COMMAND` does in the root of the repository, with one device."""
    program, *arguments = map(str, command)
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        as_in_a_new_process() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            if program == "-m":
                program, *arguments = arguments
                patch.setattr(sys, "argv", ["replaced by runpy", *arguments])
                runpy.run_module(program, run_name="__main__", alter_sys=False)
            else:
                patch.setattr(sys, "argv", [program, *arguments])
                runpy.run_path(str(ROOT / program), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
    return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())


def succeeded(*command) -> subprocess.CompletedProcess:
    """`call` of a command that must end with status 0."""
    process = call(*command)
    assert process.returncode == 0, process.stderr
    return process


@contextlib.contextmanager
def as_in_a_new_process() -> Iterator[pytest.MonkeyPatch]:
    """One device, no logging; the mesh and the signal that a command sets are gone afterwards."""
    make_mesh, on_interrupt = sharding.make_mesh, signal.getsignal(signal.SIGINT)

    def of_first_devices(shape, devices=None):
        return make_mesh(shape, devices or jax.devices()[: math.prod(shape)])

    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(jax.sharding.get_mesh()):
        patch.setattr("logging.basicConfig", lambda **_: None)
        patch.setattr(jax, "device_count", lambda: 1)
        patch.setattr(sharding, "make_mesh", of_first_devices)
        try:
            yield patch
        finally:
            signal.signal(signal.SIGINT, on_interrupt)
