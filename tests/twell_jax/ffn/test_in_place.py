"""No kernel that changes arrays in place is open to XLA's dynamic-slice fusion."""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from tests.conformance.cases import SPARSE, by, gradients
from twell_jax import sparse_ffn


def output(ffn, operands, _):
    return ffn(*operands)


@pytest.mark.parametrize(
    ("function", "ffn", "kernels"),
    [
        (output, by("twell"), 1),
        (output, by("unions"), 2),
        (gradients, partial(sparse_ffn, **SPARSE), 4),
    ],
    ids=["twell", "unions", "sparse gradients"],
)
def test_all_operands_and_results_pass_a_barrier(lower, function, ffn, kernels):
    x, *weights = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1001, 256), *3 * [(512, 256)]))
    text = lower(partial(function, ffn), [x, *weights], x)
    kernels_in_place = 0
    for function_text in text.split("func.func ")[1:]:
        operations = [parse(line) for line in function_text.splitlines()]
        no_slices = ("optimization_barrier", "constant")
        apart = {op.result for op in operations if op.name in no_slices}
        for i, kernel in enumerate(operations):
            if not kernel.is_in_place:
                continue
            kernels_in_place += 1
            assert kernel.operands <= apart
            for op in operations[i + 1 :]:
                if op.result == kernel.result:
                    break  # another region has a name of its own
                assert kernel.result not in op.operands or op.name == "optimization_barrier"
    assert kernels_in_place == kernels


class Operation(NamedTuple):
    result: str
    name: str
    operands: set[str]
    is_in_place: bool


def parse(line):
    """An operation in StableHLO's text; a kernel's code, in the same line, is left out."""
    result, _, operation = line.strip().partition(" = ")
    if "@mosaic_gpu" in operation:
        operation = operation[: operation.index(")")]
    return Operation(
        result.split(":")[0],
        operation.split(" ")[0].removeprefix("stablehlo."),
        set(re.findall(r"%\w+", operation)),
        "output_operand_alias<" in line,
    )
