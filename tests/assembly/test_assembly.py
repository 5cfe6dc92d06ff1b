"""Kernels are assembled for the GPUs that they are for, by the ptxas of `.venv/assembler`."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.kernels import AMPERE, HOPPER, MMA
from pallas_kernels.rectifiers import RELU
from pallas_kernels.weights import Weights
from tests.devices import abstract_gpu
from tests.launches import modules
from tests.packages import REQUIRED
from twell_jax.ffn import mosaic

pytestmark = pytest.mark.peers

HERE = Path(__file__).parent
TOOLS = Path(sys.prefix) / "assembler"  # of `make .venv/assembler`
D, H = 2048, 5632


class Limits(NamedTuple):
    """Of a kernel.

    Attributes:
      registers: of a thread at its start; kernels of 384 threads then share 65,536 out anew, but in
        what JAX 0.12 has compiled (docs/install.md).
      spilled: bytes of a thread.
    """

    registers: int = 168
    spilled: int = 0


BACK_ENDS = {"90a": HOPPER, "120a": MMA, "80": AMPERE, "86": AMPERE, "89": AMPERE}
_WITHOUT_TMA = {  # where warpgroups cannot share registers out anew
    "anonymous": Limits(registers=255),  # gate_union and gate_pack, of 256 threads
    "dense_block_up": Limits(registers=208),
    "few_hidden": Limits(registers=184),
    "fused_ffn": Limits(spilled=128),
    "hidden_grads": Limits(spilled=512),
    "hidden_kernel": Limits(spilled=348),
    "union_down": Limits(spilled=224),
    "union_up": Limits(spilled=396),
    "weight_grads": Limits(spilled=328),
}
LIMITS = {  # by architecture and the name of a kernel; others have the default
    "90a": {
        "hidden_grads": Limits(spilled=12),
        "hidden_kernel": Limits(spilled=24),
        "token_ffn": Limits(registers=232),
    },
    "120a": {
        "hidden_grads": Limits(spilled=72),
        "hidden_kernel": Limits(spilled=136),
        "fused_ffn": Limits(spilled=208),
        "token_ffn": Limits(registers=208),
    },
    **dict.fromkeys(("80", "86", "89"), _WITHOUT_TMA),
}


def passes(kernels, in_8_bits, x, weights):
    """Both passes by unions."""
    block = mosaic.sparse_gradients(kernels, RELU, 1.0, None, in_8_bits)
    y, vjp, _ = jax.vjp(lambda x, w: block(x, w, None), x, weights, has_aux=True)
    return vjp(y)


def forward(kernels, algorithm, x, weights):
    return mosaic.dense_gradients(kernels, RELU, algorithm, None)(x, weights, None)


def around_blocks(kernels, x, weights):
    """What lies around blocks, in 16 bits."""
    grads = kernels.norm_grads(x, x, x, x[0].astype(jnp.float32), eps=1e-6)
    return grads, kernels.transposed(weights.down)


FORMS = True, False  # gated or not
BLOCKS = {  # tokens, and what is computed
    "unions": (4096, lambda kernels: functools.partial(passes, kernels, False)),
    "float8": (4096, lambda kernels: functools.partial(passes, kernels, True)),
    "twell": (4096, lambda kernels: functools.partial(forward, kernels, "twell")),
    "few_tokens": (8, lambda kernels: functools.partial(forward, kernels, "few_tokens")),
    "dense_block": (512, lambda kernels: functools.partial(forward, kernels, "dense_block")),
}
PROGRAMS = BLOCKS | {
    "around_blocks": (4096, lambda kernels: functools.partial(around_blocks, kernels)),
}


@pytest.fixture(scope="module")
def assemble(tmp_path_factory):
    """`assemble(arch, {name: module})` is what ptxas says of each."""
    if not TOOLS.exists():
        if os.environ.get(REQUIRED):
            raise ImportError(f"{TOOLS} is missing ({REQUIRED} is set)")
        pytest.skip("needs `make .venv/assembler`")
    (plugin,) = TOOLS.glob("jax_plugins/*/xla_cuda_plugin.so")
    (ptxas,) = TOOLS.glob("nvidia/*/bin/ptxas")
    driver = tmp_path_factory.mktemp("driver")
    library = ["cc", "-shared", "-fPIC", "-o", driver / "libcuda.so.1", HERE / "no_driver.c"]
    subprocess.run(library, check=True)

    def assemble(arch, found):
        directory = tmp_path_factory.mktemp("kernels")
        for name, module in found.items():
            (directory / f"{name}.module").write_bytes(module)
        settings = {
            "LD_LIBRARY_PATH": str(driver),
            "TWELL_TESTS_CAPABILITY": arch.rstrip("a"),
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "MOSAIC_GPU_CUDA_ROOT": str(ptxas.parents[1]),
            "PATH": f"{ptxas.parent}:{os.environ['PATH']}",
        }
        command = [sys.executable, HERE / "assemble.py", plugin, directory]
        subprocess.run(command, check=True, env=os.environ | settings, capture_output=True)
        return {
            name: "".join(path.read_text() for path in (directory / name).glob("*.ptxas"))
            for name in found
        }

    return assemble


@pytest.mark.parametrize(
    ("arch", "name", "gated"),
    [
        *((arch, name, gated) for arch in ("90a", "120a") for name in BLOCKS for gated in FORMS),
        *(("80", name, gated) for name in ("unions", "twell", "dense_block") for gated in FORMS),
        ("80", "around_blocks", True),
        ("80", "few_tokens", True),
        ("86", "unions", True),
        ("89", "unions", True),
        ("89", "float8", True),
    ],
)
def test_kernels_are_assembled_within_limits(arch, name, gated, assemble, monkeypatch):
    monkeypatch.setattr(utils, "_infer_arch", lambda: divmod(int(arch.rstrip("a")), 10))
    tokens, program = PROGRAMS[name]
    x, w = (jax.ShapeDtypeStruct((n, D), jnp.bfloat16) for n in (tokens, H))
    with jax.sharding.use_abstract_mesh(abstract_gpu(shape=(1,), axes=("x",))):
        traced = jax.jit(program(BACK_ENDS[arch])).trace(x, Weights(w if gated else None, w, w))
        found = modules(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert found
    for kernel, said in assemble(arch, found).items():
        limits = LIMITS[arch].get(kernel.partition("-")[0], Limits())
        assert f"for 'sm_{arch}'" in said, kernel
        registers, spilled = (
            max(map(int, re.findall(pattern, said)))
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
        )
        assert registers <= limits.registers and spilled <= limits.spilled, (kernel, said)
