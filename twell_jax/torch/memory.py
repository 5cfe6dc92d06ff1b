"""Tensors of torch and arrays of JAX that share their memory, by DLPack.

DLPack also has either side's stream wait for the other's. So torch may reuse the memory of a tensor
as soon as the call has returned, as with torch's own operators.
"""

from __future__ import annotations  # the documentation is built without torch

from collections.abc import Sequence

import jax
import torch
from torch.utils.weak import WeakTensorKeyDictionary

# For a parameter, where it lies, and arrays of it and of views of it. To make one takes longer than
# to start a program. They go with the parameter.
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def to_jax(a: torch.Tensor) -> jax.Array:
    """An array that has the memory of a contiguous tensor; what torch writes later, it has too."""
    return jax.dlpack.from_dlpack(a.detach())


def weight_to_jax(a: torch.Tensor) -> jax.Array:
    """The same, made once for each place where a parameter, or the view of one, lies.

    JAX does not wait for what torch is computing of it, but does for an array of `to_jax` that the
    same program reads, and then for all that torch computed before.
    """
    owner = a if a._base is None else a._base
    start, arrays = _made.get(owner, (None, {}))
    if start != owner.data_ptr():  # `owner.data` is another tensor now
        start, arrays = owner.data_ptr(), {}
    place = a.storage_offset(), a.shape, a.dtype
    if place not in arrays:
        arrays[place] = to_jax(a)
        _made[owner] = start, arrays
    return arrays[place]


def to_torch(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """Tensors that have the memory of arrays."""
    return [torch.from_dlpack(a) for a in arrays]
