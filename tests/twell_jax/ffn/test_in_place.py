"""No kernel that changes arrays in place is open to XLA's dynamic-slice fusion."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir

from tests.conformance.cases import by, gradients, sparse
from tests.devices import H100
from tests.launches import operations
from twell_jax import sparse_ffn


def output(ffn, operands, _):
    return ffn(*operands)


@pytest.mark.parametrize(
    ("function", "ffn", "count"),
    [
        (output, by("twell"), 1),
        (output, by("unions"), 2),
        (gradients, partial(sparse_ffn, **sparse()), 4),
    ],
    ids=["twell", "unions", "sparse gradients"],
)
def test_all_operands_and_results_pass_a_barrier(function, ffn, count):
    x, *weights = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1001, 256), *3 * [(512, 256)]))
    with jax.sharding.use_abstract_mesh(H100):
        traced = jax.jit(partial(function, ffn)).trace([x, *weights], x)
        program = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    kernels = [op for op in operations(program.operation) if is_in_place(op)]
    assert len(kernels) == count
    for kernel in kernels:
        owners = [operand.owner for operand in kernel.operands]
        assert all(isinstance(owner, ir.Operation | ir.OpView) for owner in owners)
        assert {o.name for o in owners} <= {"stablehlo.optimization_barrier", "stablehlo.constant"}
        users = {use.owner.name for result in kernel.results for use in result.uses}
        assert users <= {"stablehlo.optimization_barrier"}


def is_in_place(op):
    aliases = "output_operand_aliases"
    return (
        op.name == "stablehlo.custom_call"
        and aliases in op.attributes
        and len(op.attributes[aliases]) > 0
    )
