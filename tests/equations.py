"""The operations of traced programs, which tests count."""

from collections.abc import Iterator

import jax
import jax.extend.core


def kernel_calls(function, *operands) -> int:
    """How many Mosaic kernels a program calls; a mesh says for which device.

    Those in all branches count, those in loops once. Lowering them would take ten times as long.
    """
    names = (equation.primitive.name for equation in equations(function, *operands))
    return sum(name == "mpmd_map" for name in names)


def equations(function, *operands) -> Iterator[jax.extend.core.JaxprEqn]:
    """All operations of a program, those inside of others included."""
    return _in_jaxpr(jax.jit(function).trace(*operands).jaxpr.jaxpr)


def _in_jaxpr(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner(tuple(equation.params.values())):
            yield from _in_jaxpr(inner)


def _inner(value):
    """The programs among the parameters of an operation, such as the branches of a condition."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _inner(item)
    elif hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield from _inner(value.jaxpr)
