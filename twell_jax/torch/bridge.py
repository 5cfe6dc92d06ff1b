"""The programs by which JAX computes the block of `twell_jax.ffn` for torch."""

from __future__ import annotations  # the documentation is built without torch

import functools
import itertools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from twell_jax.ffn import Rectifier, sparse_ffn
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.algorithms import LayerGradients
from twell_jax.ffn.numeric import STANDARD
from twell_jax.ffn.passes import Choice, Passes, of_block, transpose
from twell_jax.torch import launches

type Shape = jax.ShapeDtypeStruct
type Part = tuple[int, tuple[int, ...]]
type Tensors = Sequence[torch.Tensor | None]  # x `[M, D]`, gate or None, up and down

_SMALL = 1 << 20  # elements of what is packed
_ALIGNED = 64  # elements of which each part begins at a multiple, as kernels read 16 bytes or more


class Programs(NamedTuple):
    """The compiled programs of a call with operands of some shapes.

    Attributes:
      infer: operands -> y alone.
      launched: a GPU -> `infer` as torch launches it; None if JAX has to.
      forward: operands -> y, the statistics but l1 and what is small of what the backward needs as
        one array (see `_packed`), the rest of that, and l1.
      launched_forward: a GPU -> the same without statistics, as torch launches it: the array has
        nothing where these would be, and l1 is left out. None if JAX has to.
      backward: the way of the backward -> the program (operands, the parts of the packed array, the
        rest, the gradients for y and the sum of |h|, which may be None) -> those for the operands.
      launched_backward: (the way, a GPU, whether there is that for the sum) -> `backward` as torch
        launches it; None if JAX has to.
      results: the shapes of what `forward` returns.
      parts: what is small of what the backward needs: where in the packed array it begins, and its
        shape; all are int32.
      deciding: the part of the packed array that the way of the backward follows from.
      choice: that part, on the host -> what follows; None if a number of it is not there yet but
        negative.
    """

    infer: Callable[..., list[jax.Array]]
    launched: Callable[[torch.device], launches.Program | None]
    forward: Callable[..., list[jax.Array]]
    launched_forward: Callable[[torch.device], launches.Program | None]
    backward: Callable[[int], Callable[..., list[jax.Array]]]
    launched_backward: Callable[[int, torch.device, bool], launches.Program | None]
    results: list[Shape]
    parts: list[Part]
    deciding: slice
    choice: Callable[[np.ndarray], Choice | None]


def programs(
    activation: str, gradients: str, transposed: Sequence[bool], operands: Tensors
) -> Programs:
    """The programs of a call with such operands.

    Args:
      activation, gradients: as `text_of` writes them.
      transposed: which of x, gate, up and down are given as their transpose.
      operands: contiguous; may be torch's fake tensors.
    """
    shapes = (a if a is None else (tuple(map(int, a.shape)), a.dtype) for a in operands)
    return _programs(activation, gradients, tuple(transposed), *shapes)


@functools.cache
@STANDARD
def _programs(
    activation: str,
    gradients: str,
    transposed: tuple[bool, ...],
    *tensors: tuple[tuple[int, ...], torch.dtype] | None,
) -> Programs:
    launches.refuse_to_be_captured()  # before JAX may allocate, which would end the graph
    shapes = [a if a is None else jax.ShapeDtypeStruct(a[0], _in_jax(a[1])) for a in tensors]

    (*_, last), (*_, w_down) = transposed, shapes
    assert w_down is not None
    by_neuron = jax.ShapeDtypeStruct(w_down.shape[::-1] if last else w_down.shape, w_down.dtype)

    def upright(operands: Sequence) -> list:
        pairs = zip(operands, transposed, strict=True)
        found = [transpose(a, by_neuron) if is_transposed else a for a, is_transposed in pairs]
        # XLA would turn a weight where it is used: between kernels, which then could not overlap.
        return lax.optimization_barrier(found) if any(transposed) else found

    act, like = _activation_of(activation), jax.eval_shape(upright, shapes)
    passes = of_block(like, act, _gradients_of(gradients))
    layout = _layout_of(passes, *jax.eval_shape(passes.forward, *like)[1:])

    def infer(operands: Sequence) -> list:
        return [sparse_ffn(*upright(operands), activation=act, implementation="mosaic")[0]]

    @STANDARD
    def forward(operands: Sequence) -> list:
        y, stats, kept = passes.forward(*upright(operands))
        l1, *others = jax.tree.leaves(stats)
        small, large = layout.ordered(kept)
        return [y, _packed(others, small), *large, l1]

    @STANDARD
    def forward_alone(operands: Sequence) -> list:
        y, _, kept = passes.forward(*upright(operands))
        return [y, *itertools.chain(*layout.ordered(kept))]

    @STANDARD
    def backward(
        way: int, operands: Sequence, small: list, large: list, of_y: jax.Array, of_sum: Any
    ) -> list:
        tree = layout.tree([*small, *large])
        of_sum = jnp.zeros((), jnp.float32) if of_sum is None else of_sum
        return jax.tree.leaves(upright(passes.backward(way, tree, upright(operands), of_y, of_sum)))

    results = jax.eval_shape(forward, shapes)

    def choice(numbers: np.ndarray) -> Choice | None:
        values = [numbers[place] for place in layout.deciding]
        return None if any((a < 0).any() for a in values) else passes.choice(*values)

    def launched_forward(device: torch.device) -> launches.Program | None:
        begins = tuple(begin for begin, _ in layout.parts)
        together = launches.Together(1, begins, layout.size, len(layout.deciding))
        return launches.of(forward_alone, (shapes,), device, together)

    def launched_backward(way: int, device: torch.device, with_l1: bool) -> launches.Program | None:
        y, _, *large, of_sum = results
        kept = [jax.ShapeDtypeStruct(shape, jnp.int32) for _, shape in layout.parts]
        of = shapes, kept, large, y, of_sum if with_l1 else None
        return launches.of(functools.partial(backward, way), of, device)

    # A graph of the GPU's would be written anew at each call, as addresses change.
    compiled = functools.partial(jax.jit, compiler_options={"xla_gpu_enable_command_buffer": ""})
    return Programs(
        compiled(infer),
        functools.cache(functools.partial(launches.of, infer, (shapes,))),
        compiled(forward),
        functools.cache(launched_forward),
        functools.cache(lambda way: compiled(functools.partial(backward, way))),
        functools.cache(launched_backward),
        results,
        layout.parts,
        layout.region,
        choice,
    )


class _Layout(NamedTuple):
    """How what the backward needs lies: what decides about it, what else is small, and the rest.

    Attributes:
      structure: of the tree that the forward keeps.
      order: the numbers of its leaves in this order.
      parts: see `Programs`; of the leaves that are small, so the first ones.
      size: of the packed array.
      region: the part of it that decides.
      deciding: where in that part each array lies; all have one axis.
    """

    structure: Any
    order: list[int]
    parts: list[Part]
    size: int
    region: slice
    deciding: list[slice]

    def ordered(self, kept: Any) -> tuple[list, list]:
        """The leaves in their order: those that are small, and the others."""
        leaves = jax.tree.leaves(kept)
        ordered = [leaves[n] for n in self.order]
        return ordered[: len(self.parts)], ordered[len(self.parts) :]

    def tree(self, ordered: Sequence) -> Any:
        """What `ordered` took apart."""
        found = dict(zip(self.order, ordered, strict=True))
        return jax.tree.unflatten(self.structure, [found[n] for n in range(len(found))])


def _layout_of(passes: Passes, stats: Any, kept: Any) -> _Layout:
    """The layout of what a forward keeps, of shapes."""
    leaves, structure = jax.tree.flatten(kept)
    deciding = passes.deciding(kept)

    def rank(n: int) -> int:
        of_first = (at for at, one in enumerate(deciding) if one is leaves[n])
        return next(of_first, len(deciding) + (not _is_small(leaves[n])))

    order = sorted(range(len(leaves)), key=rank)
    small = [leaves[n] for n in order if _is_small(leaves[n])]
    _, *others = jax.tree.leaves(stats)  # which l1 comes first of
    sizes = [sum(a.size for a in others), *(a.size for a in small)]
    *begins, size = accumulate(map(_padded, sizes))
    parts = [(begin, a.shape) for begin, a in zip(begins, small, strict=True)]
    first = begins[0] if deciding else 0
    places = [slice(b - first, b - first + a.size) for b, a in zip(begins, deciding, strict=False)]
    stop = first + places[-1].stop if places else 0
    return _Layout(structure, order, parts, size, slice(first, stop), places)


def _is_small(a: jax.Array | Shape) -> bool:
    return a.size <= _SMALL and a.dtype == jnp.int32


def _packed(stats: Sequence[jax.Array], parts: Sequence[jax.Array]) -> jax.Array:
    """Small arrays as one, int32 `[n]`: it costs time to pass an array to torch and back.

    The statistics lie one after the other, and then each part where it can be read by itself.
    """
    integers = (a.astype(jnp.int32) if a.dtype == jnp.bool_ else a for a in stats)
    words = [lax.bitcast_convert_type(a, jnp.int32).ravel() for a in integers]
    padded = [jnp.concatenate(words), *(a.ravel() for a in parts)]
    return jnp.concatenate([jnp.pad(a, (0, _padded(a.size) - a.size)) for a in padded])


def _padded(size: int) -> int:
    """The elements that an array of this size takes among those that are packed."""
    return -(-size // _ALIGNED) * _ALIGNED


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


def empty_like(shapes: Any, like: torch.Tensor) -> Any:
    """Tensors without values, on the device of `like`."""
    return jax.tree.map(
        lambda a: like.new_empty(a.shape, dtype=getattr(torch, a.dtype.name)), shapes
    )


def _in_jax(dtype: torch.dtype) -> jnp.dtype:
    return jnp.dtype(str(dtype).removeprefix("torch."))
