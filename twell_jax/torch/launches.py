"""Programs of kernels that torch launches by itself: JAX's part of a call takes the host longer.

JAX lowers a program once. Torch allocates what its kernels write, and starts them on its current
stream, as `plgpu.as_torch_kernel` (jax 0.11) does with a single one. A CUDA graph can hold that.
"""

from __future__ import annotations  # the documentation is built without torch

import ctypes
import functools
import importlib
from array import array
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_void_p
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import torch

from twell_jax.torch import lowered
from twell_jax.torch.lowered import Array, Listing

_ALIGNED = 256  # bytes of which each array in a tensor of several begins at a multiple
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")

type Launch = Callable[[int, int], None]  # where the addresses of its arrays are, the stream


class Together(NamedTuple):
    """Results that lie in one tensor, int32 `[size]`, which takes their place among the results.

    Attributes:
      first: the number of the first; the others follow.
      begins: where each begins.
      size: the tensor's.
      soon: how many of them, from the first on, are needed soon.
    """

    first: int
    begins: tuple[int, ...]
    size: int
    soon: int


@dataclass(frozen=True)
class Program:
    """A program for the operands of some shapes, on one device.

    Each call has tensors of its own: zeros, the common memory of what only kernels need, and the
    results. Kernels count their jobs where zeros were, so calls share none.

    Attributes:
      device: the one of all tensors.
      operands: how many there are.
      kernels: in their order; what starts each, and at which byte of `places` its own begin.
      places: where the arrays of all kernels lie: in which tensor, of the operands and then a
        call's own, and at which byte of it.
      tensors: what makes a call's own; all but the first two are its results.
      soon: after so many kernels there are the results that are needed soon.
    """

    device: torch.device
    operands: int
    kernels: tuple[tuple[Launch, int], ...]
    places: tuple[tuple[int, int], ...]
    tensors: tuple[Callable[[], torch.Tensor], ...]
    soon: int = 0

    def __call__(
        self, operands: Sequence[int], then: Callable[[list[torch.Tensor]], None] | None = None
    ) -> list[torch.Tensor]:
        """The results, once torch's current stream has come so far.

        Args:
          operands: where contiguous arrays begin, of the shapes that the program is for.
          then: is called with the results when the stream has got the kernels of those that are
            needed soon.
        """
        with torch.cuda.device(self.device):
            return self.run(operands, torch.cuda.current_stream().cuda_stream, then)

    def run(
        self,
        operands: Sequence[int],
        stream: int,
        then: Callable[[list[torch.Tensor]], None] | None = None,
    ) -> list[torch.Tensor]:
        """The results, once a stream of the device has come so far."""
        assert len(operands) == self.operands
        # Torch's own call gives a new thread the device's context, which kernels need.
        tensors = [make() for make in self.tensors]
        begins = [*operands, *(a.data_ptr() for a in tensors)]
        addresses = array("Q", [begins[tensor] + byte for tensor, byte in self.places])
        begin, _ = addresses.buffer_info()
        _, _, *results = tensors
        for launch, byte in self.kernels[: self.soon]:
            launch(begin + byte, stream)
        if then is not None:
            then(results)
        for launch, byte in self.kernels[self.soon :]:
            launch(begin + byte, stream)
        return results


def of(
    function: Callable[..., Any],
    operands: Sequence[Any],
    device: torch.device,
    together: Together | None = None,
) -> Program | None:
    """The program of a function of JAX; None if it is more than kernels, or JAX is too new.

    Args:
      function: returns a list of arrays.
      operands: what it takes: trees of shapes and None, whose leaves a call takes in their order.
      device: a GPU.
      together: which results lie in one tensor.
    """
    if getattr(mgpu.core, "_ABI_V2", False):  # of jax 0.12, which starts kernels in another way
        return None
    traced = jax.jit(function, keep_unused=True).trace(*operands)
    try:
        listing = lowered.read(traced.lower(lowering_platforms=("cuda",)).compiler_ir())
    except lowered.NotOnlyKernels:
        return None
    return program(listing, device, together)


def capturing() -> bool:
    """Whether a CUDA graph is being made of what torch's current stream gets."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_to_be_captured() -> None:
    """Raises RuntimeError if a CUDA graph is being made: it cannot hold what prepares a call."""
    if capturing():
        raise RuntimeError(
            "call the block once with these shapes before a CUDA graph captures it: its kernels "
            "are not compiled yet"
        )


def program(listing: Listing, device: torch.device, together: Together | None = None) -> Program:
    """Compiles a program's kernels, and finds a place for each array.

    Args:
      listing: the program.
      device: where it runs.
      together: which results lie in one tensor.

    Raises:
      RuntimeError: a CUDA graph is being captured, which cannot hold that; or Mosaic GPU cannot
        compile a kernel.
    """
    refuse_to_be_captured()
    tensors, of_results = _tensors(listing, device, together)
    if together is not None:
        first = listing.results[together.first :][: together.soon]
        listing, soon = lowered.sooner(listing, first)
    else:
        soon = 0
    count, own = listing.operands, {*range(listing.operands), *listing.results}
    zeros = [n for n, a in enumerate(listing.arrays) if a.is_zero and n not in own]
    begins_of_zeros = [0, *accumulate(_bytes(listing.arrays[n]) for n in zeros)]
    begins, common = _packed(listing, {*own, *zeros})
    places = {n: (n, 0) for n in range(count)}
    places |= {n: (count, begin) for n, begin in zip(zeros, begins_of_zeros, strict=False)}
    places |= {n: (count + 1, begin) for n, begin in begins.items()}
    places |= {n: (count + 2 + tensor, byte) for n, (tensor, byte) in of_results.items()}
    of_kernels = [(*kernel.operands, *kernel.results) for kernel in listing.kernels]
    begin_of_each = accumulate((8 * len(arrays) for arrays in of_kernels), initial=0)
    launches = (_launch(kernel.module, device) for kernel in listing.kernels)
    return Program(
        device,
        count,
        tuple(zip(launches, begin_of_each, strict=False)),
        tuple(places[n] for arrays in of_kernels for n in arrays),
        (
            partial(torch.zeros, max(begins_of_zeros[-1], 1), dtype=torch.uint8, device=device),
            partial(torch.empty, common, dtype=torch.uint8, device=device),
            *tensors,
        ),
        soon,
    )


def _tensors(
    listing: Listing, device: torch.device, together: Together | None
) -> tuple[list[Callable[[], torch.Tensor]], dict[int, tuple[int, int]]]:
    """What makes the tensors of the results, and in which of them, at which byte, each lies."""
    first, begins = (together.first, together.begins) if together else (len(listing.results), ())
    alone, shared = list(listing.results), listing.results[first : first + len(begins)]
    del alone[first : first + len(begins)]
    tensors = [_makes(listing.arrays[n], device) for n in alone]
    places = {n: (at + (at >= first), 0) for at, n in enumerate(alone)}
    if together:
        assert not any(listing.arrays[n].is_zero for n in shared)  # as that memory is not set
        made = partial(torch.empty, together.size, dtype=torch.int32, device=device)
        tensors.insert(first, made)
        places |= {n: (first, 4 * begin) for n, begin in zip(shared, begins, strict=True)}
    return tensors, places


def _makes(a: Array, device: torch.device) -> Callable[[], torch.Tensor]:
    make = torch.zeros if a.is_zero else torch.empty
    return partial(make, a.shape, dtype=getattr(torch, a.dtype.name), device=device)


def _packed(listing: Listing, own: set[int]) -> tuple[dict[int, int], int]:
    """Where the arrays that have no memory of their own begin in the common one, and its bytes.

    Arrays share bytes if no kernel needs both, or one between. The largest are placed first.
    """
    used: dict[int, list[int]] = {}
    for at, (_, operands, results) in enumerate(listing.kernels):
        for number in (*operands, *results):
            used.setdefault(number, []).append(at)
    spans = {n: (min(at), max(at)) for n, at in used.items() if n not in own}
    sizes = {n: _bytes(listing.arrays[n]) for n in spans}
    begins: dict[int, int] = {}
    for number in sorted(spans, key=lambda n: (-sizes[n], n)):
        first, last = spans[number]
        beside = (n for n in begins if spans[n][0] <= last and first <= spans[n][1])
        begin = 0
        for taken in sorted((begins[n], begins[n] + sizes[n]) for n in beside):
            if begin + sizes[number] <= taken[0]:
                break
            begin = max(begin, taken[1])
        begins[number] = begin
    return begins, max((begins[n] + sizes[n] for n in begins), default=0)


def _bytes(a: Array) -> int:
    return -(-a.size * a.dtype.itemsize // _ALIGNED) * _ALIGNED


@functools.cache
def _launch(module: bytes, device: torch.device) -> Launch:
    """What starts a kernel on a device."""
    compile_ = _library().MosaicGpuCompile
    compile_.argtypes, compile_.restype = [c_char_p, c_int], POINTER(c_void_p)
    with torch.cuda.device(device):
        compiled = compile_(module, len(module))
    if not compiled:
        raise RuntimeError("Mosaic GPU could not compile a kernel")
    context = compiled[0]
    start = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)(compiled[1])
    return lambda addresses, stream: start(context, stream, addresses)


@functools.cache
def _library() -> ctypes.CDLL:
    """JAX's plugin for GPUs, which has the compiler of kernels."""
    for name in _PLUGINS:
        try:
            return ctypes.CDLL(importlib.import_module(name)._get_library_path())
        except ImportError:
            continue
    return ctypes.CDLL(None)
