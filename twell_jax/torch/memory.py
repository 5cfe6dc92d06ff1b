"""Programs of JAX on the memory of torch's tensors, in the order of torch's stream.

On a GPU an array is a name for memory: it keeps nothing, and is made once for the places at which
tensors lie again and again. An array for each call, which JAX then has to wait for, takes the host
longer than the program. Torch's stream waits for the results. So torch may reuse the memory of an
operand as soon as the call has returned, as with torch's own operators.
"""

from __future__ import annotations  # the documentation is built without torch

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import torch

from twell_jax.torch import launches, streams

type Operand = torch.Tensor | jax.Array | None


def run(
    program: Callable[..., Sequence[jax.Array]],
    operands: list[torch.Tensor | None],
    *others: Operand | list[Operand],
) -> list[torch.Tensor]:
    """The results of a program on contiguous tensors.

    Args:
      program: takes arrays, also where there are tensors.
      operands: the first is not None.
      others: further arguments of the program.

    Returns:
      Tensors that have the memory of the program's results.
    """
    assert operands[0] is not None
    device = operands[0].device
    if launches.capturing():
        raise RuntimeError(
            "JAX launches this call of the block, which a CUDA graph cannot hold: it holds what "
            "torch launches, in inference with up to 64 tokens or at least 2048 of most widths"
        )
    arrays = _in_jax(operands), *map(_in_jax, others)
    if device.type == "cpu":
        return [torch.from_dlpack(a) for a in program(*arrays)]
    stream = torch.cuda.current_stream(device)
    _computing(device).wait_stream(stream)
    handle = stream.cuda_stream or 1  # which is the default stream's number in DLPack
    results: Sequence[Any] = program(*arrays)
    return [torch.from_dlpack(a.__dlpack__(stream=handle)) for a in results]


def let_jax_wait(device: torch.device) -> None:
    """JAX's next programs wait for what torch's current stream has got, as that reads memory that
    JAX may use again once its tensors are gone."""
    _computing(device).wait_stream(torch.cuda.current_stream(device))


def for_the_host(numbers: torch.Tensor, *, beside: bool) -> torch.Tensor:
    """A copy of int32 `[n]` for `on_the_host`; nothing waits for it.

    Args:
      numbers: what is copied.
      beside: whether another stream copies it: on torch's own, the kernels before and after would
        not overlap. The memory must be torch's, which then lets it go after the copy alone.

    Returns:
      int32 `[n]` on the CPU; a number is -1 until it is there.
    """
    if numbers.device.type == "cpu":
        return numbers.clone()
    found = torch.full(numbers.shape, -1, dtype=torch.int32, pin_memory=True)
    if not beside:
        return found.copy_(numbers, non_blocking=True)
    copying = _copying(numbers.device)
    copying.wait_stream(torch.cuda.current_stream(numbers.device))
    with torch.cuda.stream(copying):
        found.copy_(numbers, non_blocking=True)
    numbers.record_stream(copying)
    return found


def on_the_host[Found](
    found: torch.Tensor, numbers: torch.Tensor, read: Callable[[np.ndarray], Found | None]
) -> Found:
    """What `read` finds in the numbers that `for_the_host` made `found` of; None: not there yet."""
    found = found.cpu()  # where hooks for saved tensors may have put it elsewhere
    while (there := read(found.numpy())) is None:
        # To wait for the stream would be to wait for all that it has got since, too.
        if not numbers.is_cuda or torch.cuda.current_stream(numbers.device).query():
            break  # `found` is a copy, from before they came
    if there is not None:
        return there
    waited_for = read(numbers.cpu().numpy())
    assert waited_for is not None
    return waited_for


def _in_jax(given: Operand | list[Operand]) -> Any:
    """Arrays for tensors. `jax.tree.map` would take the host as long as all of them."""
    if isinstance(given, list):
        return [to_jax(a) if isinstance(a, torch.Tensor) else a for a in given]
    return to_jax(given) if isinstance(given, torch.Tensor) else given


def to_jax(a: torch.Tensor) -> jax.Array:
    """An array that has the memory of a contiguous tensor; what torch writes later, it has too."""
    if a.device.type == "cpu" or not a.numel():
        return jax.dlpack.from_dlpack(a.detach())
    return _array_at(a.data_ptr(), a.shape, a.dtype, a.device)


def part(a: torch.Tensor, begin: int, shape: tuple[int, ...]) -> jax.Array:
    """An array that has the memory of a part of a contiguous tensor `[n]`."""
    if a.device.type == "cpu":
        return to_jax(a[begin : begin + torch.Size(shape).numel()].view(shape))
    return _array_at(a.data_ptr() + begin * a.itemsize, shape, a.dtype, a.device)


@functools.lru_cache(maxsize=16384)
def _array_at(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> jax.Array:
    size = torch.Size(shape).numel() * dtype.itemsize
    # Of bytes, as this interface has no bfloat16.
    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
    with torch.cuda.device(device):  # DLPack asks for the current one
        memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
        return jax.dlpack.from_dlpack(memory.view(dtype).view(shape))


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _computing(device: torch.device) -> torch.cuda.Stream:
    (of_jax,) = (d for d in jax.local_devices(backend="gpu") if d.local_hardware_id == device.index)
    return torch.cuda.ExternalStream(streams.computing(of_jax), device)
