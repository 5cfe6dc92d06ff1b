"""Programs that commands have traced are kept, beside those that JAX has compiled.

Of what a command does before its first token, tracing takes longest where compiled programs are
kept: JAX looks for these by what was traced. A trace is found again by all that it depends on: what
the caller says, shapes, versions, the package's sources, JAX's settings and the device.
"""

import contextlib
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jaxlib
from jax import export

from twell_jax.ffn import measured
from twell_jax.train import compilation_cache

_MOST = 64  # files that are kept, a few hundred KB each
# Calls that JAX does not promise to keep as they are; the version is part of what a trace is
# found by.
_CHECKS = [
    export.DisabledSafetyCheck.custom_call(name)
    for name in ("mosaic_gpu_v2", "__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax")
]

_directory: Path | None = None


def enable() -> None:
    """From now on, traces are kept where JAX keeps compiled programs by our own setting.

    For commands: settings of context managers and meshes are not among what a trace is found by.
    """
    global _directory
    _directory = compilation_cache.directory_of("traced")


class Jitted(NamedTuple):
    """A jitted function.

    Attributes:
      call: the function.
      binds: whether its results are bound to the device, as those of a kept trace are.
    """

    call: Any
    binds: bool


def jit(
    function: Callable[..., Any],
    args: Sequence[Any],
    of: Sequence[object],
    results: Any,
    **options: Any,
) -> Jitted:
    """`jax.jit(function, **options)` for arguments of these shapes, from the trace that is kept.

    Args:
      function: what it calls follows from `of`.
      args: trees of arrays or their shapes; `options` may donate some.
      of: what the function is; its `repr` is the same in each process, but for addresses.
      results: a tree as the function returns it.
      options: of `jax.jit`.
    """
    leaves, tree = jax.tree.flatten(tuple(args))
    plain = Jitted(jax.jit(function, **options), binds=False)
    is_usual = jax.config.jax_default_device is None and jax.sharding.get_abstract_mesh().empty
    if _directory is None or not is_usual or any(map(_is_elsewhere, leaves)):
        return plain
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    path = _directory / f"{_digest(of, tree, shapes)}.trace"
    exported = _read(path) or _trace(function, tree, shapes, path)
    if exported is None:
        return plain
    structure = jax.tree.structure(results)

    def kept(*args):
        return jax.tree.unflatten(structure, exported.call(*jax.tree.leaves(args)))

    kept.__name__ = function.__name__
    return Jitted(jax.jit(kept, **options), binds=True)


def _is_elsewhere(leaf: Any) -> bool:
    """Whether an argument is on another device than the first, or on several."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and sharding.device_set != {jax.devices()[0]}


def _digest(of: Sequence[object], tree: Any, shapes: Sequence[jax.ShapeDtypeStruct]) -> str:
    device = jax.devices()[0]
    # Kernels are made for so many SMs, and refused where XLA may run several at a time.
    of_device = [getattr(device, name, None) for name in ("device_kind", "core_count")]
    settings = sorted((name, repr(value)) for name, value in jax.config.values.items())
    read = ("TWELL_JAX_", "XLA_FLAGS")
    variables = sorted(item for item in os.environ.items() if item[0].startswith(read))
    found = b""
    with contextlib.suppress(OSError):
        found = measured.file_of(device.device_kind).read_bytes()
    parts = [of, str(tree), shapes, of_device, settings, variables, found, _software()]
    said = re.sub(r" at 0x[0-9a-f]+", "", repr(parts))
    return hashlib.sha256(said.encode()).hexdigest()[:32]


@functools.cache
def _software() -> str:
    """The versions of JAX and its parts, and the contents of our own sources."""
    found = hashlib.sha256(repr([m.__version__ for m in (jax, jaxlib, flax)]).encode())
    for package in ("twell_jax", "pallas_kernels"):
        root = Path(str(files(package)))
        for path in sorted(filter(Path.is_file, root.rglob("*.py"))):
            found.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return found.hexdigest()


def _read(path: Path) -> export.Exported | None:
    """What is kept there, None if there is nothing or it is damaged."""
    try:
        content = path.read_bytes()
        path.touch()  # those that are used last stay
    except OSError:
        return None
    digest, serialized = content[:32], content[32:]
    if hashlib.sha256(serialized).digest() != digest:
        return None
    return export.deserialize(bytearray(serialized))


def _trace(
    function: Callable[..., Any], tree: Any, shapes: Sequence[jax.ShapeDtypeStruct], path: Path
) -> export.Exported | None:
    """The trace, once it is kept; None if it cannot be."""

    def flat(*leaves):
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    traced = export.export(jax.jit(flat), platforms=[platform], disabled_checks=_CHECKS)
    try:
        exported = traced(*shapes)
    except (NotImplementedError, ValueError):  # of effects, or of a call that JAX may change
        return None
    with contextlib.suppress(OSError):  # it is then traced the next time, too
        _write(path, bytes(exported.serialize()))
    return exported


def _write(path: Path, serialized: bytes) -> None:
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        whole = Path(directory) / path.name
        whole.write_bytes(hashlib.sha256(serialized).digest() + serialized)
        whole.replace(path)
    by_use = sorted(path.parent.glob("*.trace"), key=lambda p: p.stat().st_mtime)
    for old in by_use[:-_MOST]:
        old.unlink()
