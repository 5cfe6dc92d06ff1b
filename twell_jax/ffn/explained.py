"""`explain`: which rule serves a call, why, and what to change."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractDevice

from twell_jax.ffn import api, dispatch, partition, remedies
from twell_jax.ffn.api import sparse_ffn
from twell_jax.ffn.arguments import ALL_OLD_NAMES, refuses_old_names
from twell_jax.ffn.dispatch import Selection
from twell_jax.ffn.measured import Block
from twell_jax.ffn.module import SparseMLP


@refuses_old_names(*ALL_OLD_NAMES)
def explain(*operands: Any, device: str | None = None, **options: Any) -> str:
    """Says which rule serves a call of `sparse_ffn`, why the rules before it do not, and what to
    change if kernels of the device would serve then.

    It names the record or the measurement on this machine that supports the rule. Where neither is
    of this block, it names the command that measures it.

    Args:
      *operands: those of `sparse_ffn`, or a `SparseMLP` and x; `jax.ShapeDtypeStruct`s suffice.
      device: the name of a GPU to answer for, as `jax.Device.device_kind` has it, such as "NVIDIA
        H100 80GB HBM3"; the card need not be here. None: the device that JAX would take.
      **options: those of `sparse_ffn`, or of a call of the module.

    Raises:
      TypeError, ValueError, CannotServe: as `sparse_ffn` does; ValueError, too, if `device` is no
        name.

    Example:
      >>> x, w = (jax.ShapeDtypeStruct((n, 128), "bfloat16") for n in (4096, 512))
      >>> print(explain(x, w, w, w, device="NVIDIA H100").splitlines()[0])
      4096 tokens on a device, 512 neurons, gated:
    """
    if operands and isinstance(operands[0], nnx.Module):
        module, *rest = operands
        if not isinstance(module, SparseMLP):
            raise TypeError(
                "explain takes a SparseMLP and x, or the operands of sparse_ffn, got "
                f"{type(module).__name__}; pass one of its blocks"
            )
        options.pop("return_stats", None)  # which decides nothing
        operands, options = (), module.operands(*rest, **options)
    with on_device(device):
        call, selection = select(*operands, **options)
        lines = str(selection).splitlines()
        if block := dispatch.to_measure(selection.case, call.request, call.x.dtype):
            lines.insert(-1, f"  not measured: {_command(block)} would decide by measurement")
        if selection.rule.algorithm == "dense":
            remedy = remedies.find(selection.case, call.request, call.x.dtype)
            lines += [f"  {remedy}"] if remedy else []
    return "\n".join(lines)


def select(*operands: Any, **options: Any) -> tuple[api.Call, Selection]:
    """A call of `sparse_ffn` with such operands and options, and the rule that serves it.

    Raises:
      TypeError, ValueError, CannotServe: as `sparse_ffn` does.
    """
    given = inspect.signature(sparse_ffn).bind(*operands, **options)
    given.apply_defaults()
    call = api.checked(**given.arguments)
    partition.check_shardings(call.weights, call.biases, call.windows)
    return call, api.select(call)


def _command(block: Block) -> str:
    """What to run to measure a block."""
    gate = "" if block.gated else " --no-gate"
    dtype = "" if block.dtype == "bfloat16" else f" --dtype {block.dtype}"
    return f"python -m twell_jax.measure {block.width} {block.neurons}{gate}{dtype}"


_CORES = 132  # of most Hopper GPUs


@contextlib.contextmanager
def on_device(device: str | None) -> Iterator[None]:
    """The current mesh is one of such devices inside the block.

    Raises:
      ValueError: `device` is no name.
    """
    if device is None:
        yield
        return
    if not isinstance(device, str) or not device.strip():
        raise ValueError(
            f"device must be the name of a GPU, such as 'NVIDIA H100 80GB HBM3', got {device!r}"
        )
    mesh = jax.sharding.get_abstract_mesh()
    # Numbers of GPUs have capitals, such as H100; other words stay as they were written.
    words = (word.upper() if any(map(str.isdigit, word)) else word for word in device.split())
    kind = AbstractDevice(device_kind=" ".join(words), num_cores=_CORES, platform="gpu")
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=kind)):
        yield
