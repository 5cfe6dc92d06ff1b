"""Tensors of torch and arrays of JAX that share their memory, by DLPack.

DLPack also has either side's stream wait for the other's. So torch may reuse the memory of a tensor
as soon as the call has returned, as with torch's own operators.
"""

from __future__ import annotations  # the documentation is built without torch

from collections.abc import Sequence

import jax
import torch
from torch.utils.weak import WeakTensorKeyDictionary

# Of a tensor, where it lies, and arrays of it and of its views: to make one takes longer than to
# start a program. They go with the tensor.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def to_jax(a: torch.Tensor) -> jax.Array:
    """An array that has the memory of a contiguous tensor; what torch writes later, it has too."""
    return jax.dlpack.from_dlpack(a.detach())


def known_to_jax(a: torch.Tensor) -> jax.Array:
    """The same, made once for a tensor that stays, such as a parameter or the view of one, or that
    comes from `to_torch`.

    JAX does not wait for what torch is computing of it, but does for an array of `to_jax` that the
    same program reads, and then for all that torch computed before.
    """
    owner = a if a._base is None else a._base
    start, arrays = _known.get(owner, (None, {}))
    if start != owner.data_ptr():  # new, or `owner.data` is another tensor now
        start, arrays = owner.data_ptr(), {}
    if _place(a) not in arrays:
        arrays[_place(a)] = to_jax(a)
        _known[owner] = start, arrays
    return arrays[_place(a)]


def to_torch(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """Tensors that have the memory of arrays."""
    tensors = [torch.from_dlpack(a) for a in arrays]
    for tensor, array in zip(tensors, arrays, strict=True):
        _known[tensor] = tensor.data_ptr(), {_place(tensor): array}
    return tensors


def _place(a: torch.Tensor) -> tuple:
    return a.data_ptr(), a.shape, a.dtype
