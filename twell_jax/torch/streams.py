"""The stream on which JAX computes on a GPU, for torch to have it wait.

JAX has no name for it, but tells it to a handler of custom calls: `XLA_FFI_Stream_Get` in
`xla/ffi/api/c_api.h` of `jax.ffi.include_dir()`. DLPack orders the two as well, by a new array for
each call, which takes the host 0.1 ms.
"""

import ctypes
import functools
from ctypes import POINTER, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import jax
import jax.numpy as jnp

_TARGET = "twell_jax_stream"


class _Version(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("extensions", c_void_p),
        ("major", c_int),
        ("minor", c_int),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("version", _Version),
        ("traits", c_uint32),
        ("state_type", c_int64),
    ]


class _Question(ctypes.Structure):
    """The extension of a call that asks for metadata, which is the only one."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("type", c_int),
        ("next", c_void_p),
        ("metadata", POINTER(_Metadata)),
    ]


class _Place(ctypes.Structure):
    """The arguments of `XLA_FFI_Stream_Get`."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extensions", c_void_p),
        ("context", c_void_p),
        ("stream", c_void_p),
    ]


class _Api(ctypes.Structure):
    """`XLA_FFI_Api` as far as it is needed."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extensions", c_void_p),
        ("version", _Version),
        ("internal", c_void_p),
        ("errors_and_registration", c_void_p * 4),
        ("stream_get", ctypes.CFUNCTYPE(c_void_p, POINTER(_Place))),
    ]


class _Call(ctypes.Structure):
    """`XLA_FFI_CallFrame` as far as it is needed."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("question", POINTER(_Question)),
        ("api", POINTER(_Api)),
        ("context", c_void_p),
    ]


_seen: list[int | None] = []  # by calls of the handler


@ctypes.CFUNCTYPE(c_void_p, POINTER(_Call))
def _handler(call: Any) -> None:
    api = call.contents.api.contents
    if call.contents.question:  # XLA does, at the registration: is the version of the API its own?
        version = call.contents.question.contents.metadata.contents.version
        version.major, version.minor = api.version.major, api.version.minor
        return
    place = _Place(ctypes.sizeof(_Place), None, call.contents.context, None)
    api.stream_get(ctypes.byref(place))
    _seen.append(place.stream)


@functools.cache
def _registered() -> None:
    handler = jax.ffi.pycapsule(_handler)
    for platform in ("CUDA", "cpu"):  # CPUs have no stream, but tests
        jax.ffi.register_ffi_target(_TARGET, handler, platform=platform)


@functools.cache
def computing(device: jax.Device) -> int | None:
    """The `CUstream` on which programs run on `device`; None on a CPU."""
    _registered()
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)
    with jax.default_device(device):
        jax.block_until_ready(jax.jit(call)())
    return _seen.pop()
