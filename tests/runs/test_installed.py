"""The package as pip installs it: the command and its configurations, without the repository."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.packages import needed
from tests.runs.started import ROOT
from twell_jax import config


@pytest.mark.slow
def test_the_wheel_has_the_command_and_the_configurations(tmp_path):
    needed("setuptools", minversion="77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("configs", "twell_jax", "pallas_kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "."]
    subprocess.run([*build, "."], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shown = subprocess.run(
        [sys.executable, "-m", "twell_jax.train", "1b", "--print-config"],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == config.to_yaml(config.load(ROOT / "configs/1b.yaml"))
