"""The operations of lowered programs, and how kernels are launched: blocks and shared memory."""

import math
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


def held(launch: Launch) -> int:
    """Clusters that an H100 holds at once if no more than two blocks share an SM, by
    cuOccupancyMaxActiveClusters."""
    on_sm = min(SM_BYTES // (launch.smem + 1024), 2)
    return {4: {1: 30, 2: 62}, 8: {1: 15, 2: 30}}[launch.cluster][on_sm]


def launches(text: str) -> dict[str, Launch]:
    """The launches in `text`, a program lowered for a GPU, by the kernels' names."""
    found = {}
    with _context():
        for name, bytecode in modules(text).items():
            code = ir.Module.parse(bytecode)
            (launch,) = (op for op in operations(code.operation) if op.name.endswith("gpu.launch"))
            # What it waits for; the sizes of grid, blocks and clusters; shared memory.
            _, *sizes, smem = (_constant(operand) for operand in launch.operands)
            found[name] = Launch(math.prod(sizes[:3]), math.prod(sizes[6:]), smem)
    return found


def modules(text: str) -> dict[str, bytes]:
    """The kernels in `text`, as MLIR's bytecode, by their names; others of a name have a number
    behind it, as in "weight_grads-2"."""
    found = {}
    with _context():
        for escaped in re.findall(r'module = "((?:[^"\\]|\\.)*)"', text):
            bytecode = re.sub(rb"\\(\\|[0-9A-F]{2})", _unescape, escaped.encode())
            code = str(ir.Module.parse(bytecode))
            (name,) = {*re.findall(r'sym_name = "(\w+?)_mosaic', code)}
            if bytecode not in found.values():
                count = sum(known.partition("-")[0] == name for known in found)
                found[f"{name}-{count + 1}" if count else name] = bytecode
    return found


def _context() -> ir.Context:
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    return context


def operations(parent: ir.Operation) -> list[ir.Operation]:
    """An operation, and all inside of it; those of `for op in block` would each be looked for in
    Python's modules."""
    found = []

    def keep(op: ir.Operation) -> ir.WalkResult:
        found.append(op)
        return ir.WalkResult.ADVANCE

    parent.walk(keep)
    return found


def _constant(value: ir.Value) -> int | None:
    """The number that a value is; None if it is not constant."""
    is_constant = value.owner.name.endswith("arith.constant")
    return ir.IntegerAttr(value.owner.attributes["value"]).value if is_constant else None


def _unescape(match: re.Match) -> bytes:
    return b"\\" if match[1] == b"\\" else bytes([int(match[1], 16)])
