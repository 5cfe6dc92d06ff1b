"""How many Mosaic kernels a traced program calls: lowering them would take ten times as long."""

import jax


def kernel_calls(function, *operands) -> int:
    """Those in all branches of `function`, and in loops once; a mesh says for which device."""
    return _in_jaxpr(jax.jit(function).trace(*operands).jaxpr.jaxpr)


def _in_jaxpr(jaxpr) -> int:
    return sum(
        (equation.primitive.name == "mpmd_map")
        + sum(map(_in_jaxpr, _inner(tuple(equation.params.values()))))
        for equation in jaxpr.eqns
    )


def _inner(value):
    """The programs among the parameters of an operation, such as the branches of a condition."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _inner(item)
    elif hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield from _inner(value.jaxpr)
