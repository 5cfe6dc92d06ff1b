"""How lowered kernels are launched: their blocks and shared memory."""

import re
from typing import NamedTuple

from jax.extend.mlir import ir
from jax.interpreters import mlir

SM_BYTES = 228 * 1024  # shared memory of an SM; each block takes 1024 bytes besides its own


class Launch(NamedTuple):
    """A launch: number of blocks, blocks of a cluster, bytes of shared memory of a block."""

    blocks: int
    cluster: int
    smem: int


def launches(text: str) -> dict[str, Launch]:
    """The launches in `text`, a program lowered for a GPU, by the kernels' names."""
    found = {}
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        for escaped in re.findall(r'module = "((?:[^"\\]|\\.)*)"', text):
            code = ir.Module.parse(re.sub(rb"\\(\\|[0-9A-F]{2})", _unescape, escaped.encode()))
            name = re.search(r'sym_name = "(\w+?)_mosaic', str(code))
            constants = {}
            for line in str(code).splitlines():
                if constant := re.match(r"\s*(%\w+) = .*arith.constant.*value = (-?\d+) :", line):
                    constants[constant[1]] = int(constant[2])
                if ".gpu.launch" in line:
                    operands = re.findall(r"%\w+", line.split("(")[1])[1:]
                    grid, _, cluster, smem = (
                        [constants[o] for o in operands[i : i + 3]] for i in (0, 3, 6, 9)
                    )
                    found[name[1]] = Launch(_product(grid), _product(cluster), smem[0])
                    break
    return found


def _unescape(match: re.Match) -> bytes:
    return b"\\" if match[1] == b"\\" else bytes([int(match[1], 16)])


def _product(numbers: list[int]) -> int:
    x, y, z = numbers
    return x * y * z
