"""Seconds from the start of `python -m twell_jax.generate` to its second token.

    python -m benchmarks.start [configs/2b.yaml] [key=value ...] [--out DIRECTORY]

The model has random weights in bfloat16 and lies in a file that has been read before. The command
prints its prompt once it has two tokens. "fresh" starts have kept nothing of what JAX traces and
compiles, as on a new machine; those that follow find it. "imports" ends before the command reads
its arguments.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks import inference, record, variants
from twell_jax import config as config_lib
from twell_jax.config import ModelConfig
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models import Transformer, graphdef
from twell_jax.models.pretrained import save_pretrained

FRESH, AGAIN = 2, 3  # starts from nothing, and those after each
PROMPT = "def "
_IMPORTS = ["-c", "import twell_jax.generate; print('here')"]


def main() -> None:
    parser = variants.parser(__doc__, Path("configs/2b.yaml"))
    args = parser.parse_intermixed_args()
    if (name := args.config.stem) not in inference.NNZ:
        parser.error(f"config: must be of {', '.join(inference.NNZ)}, got {name}")
    variants.leave_memory()
    config = config_lib.load(args.config, args.overrides).model
    with tempfile.TemporaryDirectory() as directory:
        save_pretrained(directory, draw(config, inference.NNZ[name]), ByteTokenizer())
        rows = ({"model": name} | row for row in measure(Path(directory)))
        record.write_as_they_come("start", rows, args.out)


def draw(config: ModelConfig, nnz: float) -> Transformer:
    """A bfloat16 model of which a token has `nnz` neurons active on average."""
    config = config.model_copy(update={"param_dtype": "bfloat16"})
    spread = inference.profile(config.layers, nnz)
    return nnx.merge(graphdef(config), inference.with_pattern(config, spread, jax.random.key(0)))


def measure(directory: Path) -> Iterator[dict[str, Any]]:
    """Yields a row for each kind of start of the command with the model in a directory."""
    command = ["-m", "twell_jax.generate", str(directory), "--prompt", PROMPT, "--max-tokens", "2"]
    found: dict[str, list[float]] = {"imports": [], "fresh": [], "again": []}
    found["imports"] = [seconds(_IMPORTS, {}) for _ in range(AGAIN)]
    for _ in range(FRESH):
        with tempfile.TemporaryDirectory() as kept:
            starts = [seconds(command, {"TWELL_JAX_CACHE": kept}) for _ in range(1 + AGAIN)]
        found["fresh"].append(starts[0])
        found["again"] += starts[1:]
    for start, runs in found.items():
        yield {"start": start, "seconds": statistics.median(runs), "runs": runs}


def seconds(command: list[str], variables: dict[str, str]) -> float:
    """Until `python COMMAND` has written its first byte; it must end well.

    Raises:
      subprocess.CalledProcessError: it failed.
    """
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *command], env=os.environ | variables, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        taken = time.perf_counter() - begin
        process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return taken


if __name__ == "__main__":
    main()
