"""What XLA is given to compile for an H100."""

from functools import cache, partial

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


SPARSE_GRADIENTS = gradients, partial(sparse_ffn, **sparse())


@cache
def program(function, ffn):
    """The operation that holds all others."""
    x, *weights = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1001, 256), *3 * [(512, 256)]))
    with jax.sharding.use_abstract_mesh(H100):
        traced = jax.jit(partial(function, ffn)).trace([x, *weights], x)
        return traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo").operation


@pytest.mark.slow
def test_no_way_of_sparse_gradients_has_a_loop():
    """With a loop XLA would not put the choice into a CUDA graph, and the host would choose."""
    names = {op.name for op in operations(program(*SPARSE_GRADIENTS))}
    assert "stablehlo.case" in names and "stablehlo.while" not in names


@pytest.mark.parametrize(
    ("function", "ffn", "count"),
    [
        pytest.param(output, by("twell"), 1, id="twell"),
        pytest.param(output, by("unions"), 2, id="unions", marks=pytest.mark.slow),
        # Which begin with unions; branches of the backward share functions, with lists and without.
        pytest.param(*SPARSE_GRADIENTS, 4, id="sparse gradients"),
    ],
)
def test_all_that_kernels_change_in_place_passes_a_barrier(function, ffn, count):
    """Else XLA's dynamic-slice fusion would take part in it."""
    kernels = [op for op in operations(program(function, ffn)) if is_in_place(op)]
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
