"""What differs for the kernels between JAX 0.11.2 and 0.12: the only place that knows versions."""

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import jax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

_HAS_STORE = hasattr(plgpu, "store")  # from 0.12 on
_TAKES_COST = "cost_estimate" in inspect.signature(plgpu.kernel).parameters  # likewise


def store(ref, value: jax.Array) -> None:
    """`ref[...] = value`, also where no order of the lanes avoids bank conflicts or short sectors.

    From 0.12 on, a plain assignment of a tiled array to a reference that is not tiled is an error
    there.
    """
    if _HAS_STORE:
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def first_block() -> int | jax.Array:
    """Index 0 in an index map of `plgpu.BlockSpec` that may reach past the array, where TMA reads
    zeros.

    From 0.12 on, a literal 0 is an error there; an index that is computed is not.
    """
    return jnp.int32(0) if _HAS_STORE else 0


def cost(flops: int, arrays: Iterable[jax.Array | jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Arguments of `plgpu.kernel` that tell XLA what a kernel costs; none before 0.12.

    Only kernels whose work follows from shapes say it. Others would have to name the most that they
    may do, of which a sparse pattern leaves little.

    Args:
      flops: floating-point operations.
      arrays: what is read or written, each once.
    """
    if not _TAKES_COST:
        return {}
    size = sum(a.size * jnp.dtype(a.dtype).itemsize for a in arrays)
    return {"cost_estimate": pl.CostEstimate(flops, transcendentals=0, bytes_accessed=size)}


def ask_ptxas_once() -> None:
    """Has JAX ask ptxas for its version once.

    Up to 0.12 it starts a process at each conversion of a bool or to 8 bits, 700 to lower a step of
    decoding, which takes half of the time.
    """
    library = getattr(fragmented_array, "mgpu_lib", None)
    extension: Any = getattr(library, "_mosaic_gpu_ext", None)
    if ask := getattr(extension, "_get_ptxas_isa_version", None):
        extension._get_ptxas_isa_version = functools.cache(ask)


ask_ptxas_once()
