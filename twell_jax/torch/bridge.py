"""The block of `twell_jax.ffn` on torch tensors: JAX reads and writes the same memory.

Tensors pass by DLPack, which also has either side's stream wait for the other's. So torch may reuse
the memory of a tensor as soon as the call has returned, as with torch's own operators.
"""

from __future__ import annotations  # the documentation is built without torch

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import ClosedJaxpr

from twell_jax.ffn import Rectifier, sparse_ffn
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.algorithms import LayerGradients
from twell_jax.torch.stats import FFNStats

type Shape = jax.ShapeDtypeStruct
type Tensors = Sequence[torch.Tensor | None]  # x `[M, D]`, gate or None, up and down


@dataclass(frozen=True)
class Call:
    """What a program depends on besides shapes.

    Attributes:
      activation, gradients: as of `sparse_ffn`.
      transposed: which of x, gate, up and down JAX gets as their transpose.
    """

    activation: Activation
    gradients: LayerGradients
    transposed: tuple[bool, ...]


class Programs(NamedTuple):
    """The compiled programs of a call with operands of some shapes.

    Attributes:
      infer: operands -> y, and the fields of the statistics.
      forward: operands -> the same, and what the backward needs besides operands.
      backward: (operands, the latter, the gradients for y and l1) -> those for the operands.
      results: the shapes of what `forward` returns.
    """

    infer: Callable[..., list[jax.Array]]
    forward: Callable[..., list[jax.Array]]
    backward: Callable[..., list[jax.Array]]
    results: list[Shape]


RESULTS = 1 + len(FFNStats._fields)  # y and the statistics, of which l1 is the first


@functools.cache
def _programs(call: Call, *shapes: Shape | None) -> Programs:
    def upright(operands: Sequence) -> list:
        pairs = zip(operands, call.transposed, strict=True)
        return [a.T if is_transposed else a for a, is_transposed in pairs]

    def block(gradients: LayerGradients, x: jax.Array, *weights: jax.Array) -> Any:
        return sparse_ffn(
            x,
            *weights,
            activation=call.activation,
            implementation="mosaic",
            gradients=gradients,
        )

    def differentiable(*operands: jax.Array) -> Any:
        y, stats = block(call.gradients, *operands)
        return (y, stats.l1), stats

    def whole(operands: Sequence) -> tuple:
        (y, _), vjp, stats = jax.vjp(differentiable, *upright(operands), has_aux=True)
        return y, stats, vjp

    jaxpr, (*results, vjp) = jax.make_jaxpr(whole, return_shape=True)(shapes)
    leaves, structure = jax.tree.flatten(vjp)
    present = [n for n, shape in enumerate(shapes) if shape is not None]
    origins = _origins(jaxpr, [call.transposed[n] for n in present])[-len(leaves) :]

    def without_operands(leaves: list) -> list:
        return [leaf for leaf, origin in zip(leaves, origins, strict=True) if origin is None]

    def forward(operands: Sequence) -> list:
        *results, vjp = whole(operands)
        return jax.tree.leaves(results) + without_operands(jax.tree.leaves(vjp))

    def infer(operands: Sequence) -> list:
        return jax.tree.leaves(block(None, *upright(operands)))

    def backward(operands: Sequence, kept: list, of_y: jax.Array, of_l1: jax.Array) -> list:
        rest = iter(kept)
        given = [next(rest) if n is None else upright(operands)[present[n]] for n in origins]
        gradients = jax.tree.unflatten(structure, given)((of_y, of_l1))
        return jax.tree.leaves(upright(gradients))

    all_results = jax.tree.leaves(results) + without_operands(leaves)
    return Programs(jax.jit(infer), jax.jit(forward), jax.jit(backward), all_results)


def _origins(jaxpr: ClosedJaxpr, transposed: Sequence[bool]) -> list[int | None]:
    """For each result the operand that it is, upright; None if it is another array.

    What the backward needs of operands need not be copied, as torch keeps these.
    """
    found = {id(var): (n, False) for n, var in enumerate(jaxpr.jaxpr.invars)}
    for equation in jaxpr.jaxpr.eqns:
        turns = equation.primitive.name == "transpose"
        if (turns or equation.primitive.name == "name") and id(equation.invars[0]) in found:
            n, turned = found[id(equation.invars[0])]
            found[id(equation.outvars[0])] = n, turned != turns
    origins = (found.get(id(var), (None, False)) for var in jaxpr.jaxpr.outvars)
    return [n if n is not None and turned == transposed[n] else None for n, turned in origins]


def programs(activation: str, gradients: str, operands: Tensors) -> tuple[Programs, list, list]:
    """The programs of a call with such operands.

    Args:
      activation, gradients: as `text_of` writes them.
      operands: any strides; may be torch's fake tensors.

    Returns:
      The programs, the operands as these take them, contiguous, and which of them are transposed.
    """
    turned = [a is not None and not a.is_contiguous() and a.t().is_contiguous() for a in operands]
    laid_out = [
        a if a is None else a.t() if is_turned else a.contiguous()
        for a, is_turned in zip(operands, turned, strict=True)
    ]
    call = Call(_activation_of(activation), _gradients_of(gradients), tuple(turned))
    return _programs(call, *(shape_of(a) for a in laid_out)), laid_out, turned


def text_of(argument: Activation | LayerGradients) -> str:
    """An argument of `sparse_ffn` as operators take it, whose arguments are no objects."""
    if isinstance(argument, Rectifier):
        return f"{argument.threshold} {int(argument.squared)} {int(argument.both)}"
    return str(argument)


def _activation_of(text: str) -> Activation:
    if " " not in text:
        return cast(Activation, text)
    threshold, squared, both = text.split()
    return Rectifier(float(threshold), squared == "1", both == "1")


def _gradients_of(text: str) -> LayerGradients:
    return cast(LayerGradients, text if text in ("dense", "sparse") else float(text))


def to_jax(tree: Any) -> Any:
    """Tensors of lists and tuples as arrays that share their memory."""
    return jax.tree.map(lambda a: jax.dlpack.from_dlpack(a.detach()), tree)


def to_torch(tree: Any) -> Any:
    """The same the other way round."""
    return jax.tree.map(torch.from_dlpack, tree)


def empty_like(shapes: Any, like: torch.Tensor) -> Any:
    """Tensors without values, on the device of `like`."""
    return jax.tree.map(
        lambda a: like.new_empty(a.shape, dtype=getattr(torch, a.dtype.name)), shapes
    )


def shape_of(a: torch.Tensor | None) -> Shape | None:
    """The shape and dtype of a tensor, in JAX."""
    if a is None:
        return None
    shape = tuple(int(n) for n in a.shape)  # also of symbols: each shape is another program
    return jax.ShapeDtypeStruct(shape, jnp.dtype(str(a.dtype).removeprefix("torch.")))
