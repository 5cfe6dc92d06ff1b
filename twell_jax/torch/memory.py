"""Tensors of torch and arrays of JAX that share their memory, by DLPack.

DLPack also has either side's stream wait for the other's. So torch may reuse the memory of a tensor
as soon as the call has returned, as with torch's own operators.
"""

from __future__ import annotations  # the documentation is built without torch

from collections.abc import Sequence

import jax
import torch
from torch.utils.weak import WeakTensorKeyDictionary

# Of a tensor, where it lies, and its array: to make one takes longer than to start a program. They
# go with the tensor.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def to_jax(a: torch.Tensor) -> jax.Array:
    """An array that has the memory of a contiguous tensor; what torch writes later, it has too."""
    return jax.dlpack.from_dlpack(a.detach())


def known_to_jax(a: torch.Tensor) -> jax.Array:
    """The same, made once for a tensor that stays, such as a parameter, or comes from `to_torch`.

    JAX does not wait for what torch is computing of it, but does for an array of `to_jax` that the
    same program reads, and then for all that torch computed before.
    """
    place, array = _known.get(a, (None, None))
    if place != a.data_ptr():  # new, or `a.data` is another tensor now
        array = to_jax(a)
        _known[a] = a.data_ptr(), array
    return array


def to_torch(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """Tensors that have the memory of arrays."""
    tensors = [torch.from_dlpack(a) for a in arrays]
    for tensor, array in zip(tensors, arrays, strict=True):
        _known[tensor] = tensor.data_ptr(), array
    return tensors
