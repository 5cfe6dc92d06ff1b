"""Programs of kernels that torch launches by itself: JAX's part of a call takes the host longer.

JAX lowers a program once. Torch allocates what its kernels write, and starts them on its current
stream, as `plgpu.as_torch_kernel` (jax 0.11) does with a single one. A CUDA graph can hold that.
"""

from __future__ import annotations  # the documentation is built without torch

import ctypes
import functools
import importlib
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import torch

from twell_jax.torch import lowered
from twell_jax.torch.lowered import Array, Listing

_ALIGNED = 256  # bytes of which each array in the common memory begins at a multiple
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")

type Launch = Callable[[Any, int], None]  # the places of a kernel's arrays, the stream


class _Place(NamedTuple):
    """Where an array lies: in which of a call's tensors, and at which byte of it."""

    tensor: int
    begin: int


@dataclass(frozen=True)
class Program:
    """A program for the operands of some shapes, on one device.

    A call has these tensors: the operands, the constants, the common memory of what only kernels
    need, and those that are made for it alone.

    Attributes:
      kernels: in their order; what starts each, and its arrays.
      constants: what kernels read and never write.
      common: bytes of the common memory.
      made: made for each call, empty or of one value.
      results: which of the tensors the call returns.
    """

    kernels: tuple[tuple[Launch, tuple[_Place, ...]], ...]
    constants: tuple[torch.Tensor, ...]
    common: int
    made: tuple[Array, ...]
    results: tuple[int, ...]

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, once torch's current stream has come so far.

        Args:
          operands: contiguous tensors of the shapes that the program is for.
        """
        with torch.cuda.device(operands[0].device):
            return self.run(operands, torch.cuda.current_stream().cuda_stream)

    def run(self, operands: Sequence[torch.Tensor], stream: int) -> list[torch.Tensor]:
        """The results, once a stream of the device has come so far."""
        device = operands[0].device
        common = torch.empty(self.common, dtype=torch.uint8, device=device)
        made = (_tensor(a, device) for a in self.made)
        tensors = [*operands, *self.constants, common, *made]
        begins = [tensor.data_ptr() for tensor in tensors]
        for launch, places in self.kernels:
            addresses = [begins[tensor] + begin for tensor, begin in places]
            launch((c_void_p * len(addresses))(*addresses), stream)
        return [tensors[at] for at in self.results]


def of(
    function: Callable[..., Any], operands: Sequence[Any], device: torch.device
) -> Program | None:
    """The program of a function of JAX; None if it is more than kernels, or JAX is too new.

    Args:
      function: returns a list of arrays.
      operands: what it takes: trees of shapes and None, whose leaves a call takes in their order.
      device: a GPU.
    """
    if getattr(mgpu.core, "_ABI_V2", False):  # of jax 0.12, which starts kernels in another way
        return None
    traced = jax.jit(function).trace(*operands)
    try:
        listing = lowered.read(traced.lower(lowering_platforms=("cuda",)).compiler_ir())
    except lowered.NotOnlyKernels:
        return None
    return program(listing, device)


def program(listing: Listing, device: torch.device) -> Program:
    """Compiles a program's kernels, and finds a place for each array.

    Raises:
      RuntimeError: a CUDA graph is being captured, which cannot hold that; or Mosaic GPU cannot
        compile a kernel.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "call the block once with these shapes before a CUDA graph captures it: its kernels "
            "are not compiled yet"
        )
    arrays, written = listing.arrays, listing.written
    valued = {n for n, a in enumerate(arrays) if a.value is not None}
    given = [*range(listing.operands), *sorted(valued - written)]
    made = sorted({*(valued & written), *listing.results}.difference(given))
    begins, common = _packed(listing, {*given, *made})
    places = {n: _Place(len(given), begin) for n, begin in begins.items()}
    places |= {n: _Place(at, 0) for at, n in enumerate(given)}
    places |= {n: _Place(at, 0) for at, n in enumerate(made, len(given) + 1)}
    return Program(
        tuple(
            (_launch(module, device), tuple(places[n] for n in (*operands, *results)))
            for module, operands, results in listing.kernels
        ),
        tuple(_tensor(arrays[n], device) for n in given[listing.operands :]),
        common,
        tuple(arrays[n] for n in made),
        tuple(places[n].tensor for n in listing.results),
    )


def _packed(listing: Listing, own: set[int]) -> tuple[dict[int, int], int]:
    """Where the arrays that have no memory of their own begin in the common one, and its bytes.

    Arrays share bytes if no kernel needs both, or one between. The largest are placed first.
    """
    used: dict[int, list[int]] = {}
    for at, (_, operands, results) in enumerate(listing.kernels):
        for number in (*operands, *results):
            used.setdefault(number, []).append(at)
    spans = {n: (min(at), max(at)) for n, at in used.items() if n not in own}
    sizes = {n: -(-_bytes(listing.arrays[n]) // _ALIGNED) * _ALIGNED for n in spans}
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
    return a.size * a.dtype.itemsize


def _tensor(a: Array, device: torch.device) -> torch.Tensor:
    """A tensor for an array, with its value if it has one."""
    dtype = getattr(torch, a.dtype.name)
    if a.value is None:
        return torch.empty(a.shape, dtype=dtype, device=device)
    return torch.full(a.shape, a.value, dtype=dtype, device=device)


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
    start = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, POINTER(c_void_p))(compiled[1])
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
