"""What JAX lowered, as a list of kernels of Mosaic GPU that something else can launch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects.stablehlo import OutputOperandAlias

_KERNEL, _EMPTY, _BARRIER = "mosaic_gpu_v2", "AllocateBuffer", "stablehlo.optimization_barrier"
# Operations that keep elements, if they keep their number and dtype.
_PAD, _PADDING = "stablehlo.pad", ("edge_padding_low", "edge_padding_high", "interior_padding")
_OF_SHAPES = ("stablehlo.broadcast_in_dim", "stablehlo.convert", _PAD, "stablehlo.reshape")
_AXES = "broadcast_dimensions"
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "i32": "int32",
    "ui8": "uint8",
    "ui32": "uint32",
}


class NotOnlyKernels(Exception):
    """A program does something that kernels do not."""


class Array(NamedTuple):
    """An array of a program.

    Attributes:
      shape: its shape.
      dtype: its dtype.
      is_zero: whether it has zeros before the first kernel, and not anything.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_zero: bool = False

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


class Kernel(NamedTuple):
    """A kernel: what `MosaicGpuCompile` takes, and the numbers of its operands and results."""

    module: bytes
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Listing:
    """A program that consists of kernels.

    Attributes:
      arrays: those with memory of their own. The first are the program's operands.
      operands: their number.
      kernels: in their order. A result that is an operand, too, is changed in place.
      results: the numbers of what the program returns.
    """

    arrays: list[Array]
    operands: int
    kernels: list[Kernel]
    results: list[int]


def read(module: Any) -> Listing:
    """The kernels that a lowered function's results need.

    Args:
      module: of MLIR, such as `jax.stages.Lowered.compiler_ir` returns; calls in it are inlined.

    Raises:
      NotOnlyKernels: they need other operations than those that change only a shape or make memory
        or zeros, or a kernel would change an operand of the program.
    """
    with module.context:
        mgpu.dialect.register_inliner_extensions(module.context)
        inline = passmanager.PassManager.parse("builtin.module(inline{default-pipeline=})")
        inline.run(module.operation)
        (main,) = (op for op in module.body.operations if op.name.value == "main")
        (block,) = main.body.blocks
        *operations, last = block.operations
        return _listing(list(block.arguments), _live(operations, last.operands), last.operands)


def _live(operations: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The operations on which results depend."""
    needed, live = set(results), []
    for op in reversed(operations):
        if needed.isdisjoint(op.results):
            continue
        live.append(op)
        if op.name == _BARRIER:
            needed.update(v for r, v in zip(op.results, op.operands, strict=True) if r in needed)
        else:
            needed.update(op.operands)
    return live[::-1]


def _listing(arguments: list[Any], operations: list[Any], results: Sequence[Any]) -> Listing:
    arrays, kernels = [_array(v) for v in arguments], list[Kernel]()
    # By the values of the program: the numbers of arrays, or zeros, which each use has anew.
    found: dict[Any, int | Array] = {v: number for number, v in enumerate(arguments)}

    def new(array: Array) -> int:
        arrays.append(array)
        return len(arrays) - 1

    def placed(v: Any) -> int:
        if v not in found:
            raise NotOnlyKernels("an array is needed after a kernel has changed it")
        held = found[v]
        return held if isinstance(held, int) else new(held)

    for op in operations:
        if op.name == _BARRIER:
            pairs = zip(op.results, op.operands, strict=True)
            found |= {result: found[v] for result, v in pairs if v in found}
        elif op.name != "stablehlo.custom_call":
            found[op.result] = _same(op, [found[v] for v in op.operands])
        elif op.attributes["call_target_name"].value == _EMPTY:
            found[op.result] = new(_array(op.result))
        else:
            operands, in_place = [placed(v) for v in op.operands], _changed_in_place(op)
            changed = {operands[i] for i in in_place.values()}
            if min(changed, default=len(arguments)) < len(arguments):
                raise NotOnlyKernels("a kernel changes an operand of the program")
            if sum(number in changed for number in operands) > len(changed):
                raise NotOnlyKernels("a kernel changes an operand that it also has as another")
            found = {v: held for v, held in found.items() if held not in changed}
            numbers = [
                operands[in_place[i]] if i in in_place else new(_array(result))
                for i, result in enumerate(op.results)
            ]
            found |= dict(zip(op.results, numbers, strict=True))
            kernels.append(Kernel(_module(op), tuple(operands), tuple(numbers)))
    written = {number for kernel in kernels for number in kernel.results}
    returned = [placed(v) for v in results]
    if not written.issuperset(returned) or len(set(returned)) < len(returned):
        raise NotOnlyKernels("a result is none of a kernel, or is returned twice")
    return Listing(arrays, len(arguments), kernels, returned)


def sooner(listing: Listing, results: Sequence[int]) -> tuple[Listing, int]:
    """The same program with what some results need first, and how many kernels that are."""
    needed, changed = set(results), set[int]()
    first, later = list[Kernel](), list[Kernel]()
    for kernel in reversed(listing.kernels):
        # Also one that reads what such a kernel changes afterwards.
        if needed.isdisjoint(kernel.results) and changed.isdisjoint(kernel.operands):
            later.append(kernel)
            continue
        first.append(kernel)
        needed.update(kernel.operands)
        changed.update(kernel.results)
    return replace(listing, kernels=[*first[::-1], *later[::-1]]), len(first)


def _same(op: Any, operands: list[int | Array]) -> int | Array:
    """What an operation makes, if that is zeros, or its first operand in another shape."""
    if op.name == "stablehlo.constant":
        elements: Any = ir.DenseElementsAttr(op.attributes["value"])
        if elements.is_splat and elements.get_splat_value().value == 0:
            return _array(op.result)._replace(is_zero=True)
    elif op.name in _OF_SHAPES:
        (held, *_), before, after = operands, _array(op.operands[0]), _array(op.result)
        if isinstance(held, Array) and op.name != _PAD:
            return after._replace(is_zero=True)
        if (before.size, before.dtype) == (after.size, after.dtype) and _keeps_order(op):
            return held
    raise NotOnlyKernels(str(op))


def _keeps_order(op: Any) -> bool:
    """Whether an operation that keeps the number of elements has them in the same order."""
    if op.name == _PAD:
        return not any(width for name in _PADDING for width in op.attributes[name])
    axes = list(op.attributes[_AXES]) if _AXES in op.attributes else []
    return axes == sorted(axes)


def _module(call: Any) -> bytes:
    """What Mosaic GPU compiles."""
    if call.attributes["call_target_name"].value != _KERNEL:
        raise NotOnlyKernels(str(call))
    return call.attributes["mhlo.backend_config"]["module"].value_bytes


def _changed_in_place(call: Any) -> dict[int, int]:
    """For each result that has the memory of an operand, which operand."""
    pairs = map(OutputOperandAlias, call.output_operand_aliases or ())
    return {(pair.output_tuple_indices or [0])[0]: pair.operand_index for pair in pairs}


def _array(v: Any) -> Array:
    of = ir.RankedTensorType(v.type)
    if str(of.element_type) not in _DTYPES:
        raise NotOnlyKernels(str(of))
    return Array(tuple(of.shape), jnp.dtype(_DTYPES[str(of.element_type)]))
