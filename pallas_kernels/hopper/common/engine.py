"""How the kernels of the block multiply, and in how much shared memory.

`WGMMA` is Hopper's: a warpgroup multiplies from shared memory, without waiting. `MMA` does what
GPUs with TMA but without WGMMA can (RTX PRO 6000, RTX 50): warps load operands into registers and
multiply by `mma.sync` (`warp_mma`), in 99 KB. Kernels ask for the `current()` one when they are
traced; their epilogues get the same accumulators from both.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import warp_mma, warpgroup
from pallas_kernels.hopper.common.tiles import ACC_ROWS


class Factor(NamedTuple):
    """An operand of a product in SMEM, 64 rows or the columns, by K or transposed.

    Attributes:
      ref: with the transforms `tiles.tiled`.
      k_axis: the axis of K.
    """

    ref: Any
    k_axis: int


@dataclass(frozen=True)
class Engine:
    """What kernels need to know of it.

    Attributes:
      sum_products: see `Engine.products`.
      ring_bytes: shared memory for the ring of `matmul`, and what its epilogue needs.
      k_bytes: of the contracted axis in a stage of this ring.
      staggered: whether consumers of `matmul` take turns at a stage.
      stages: of the ring of `gathered_matmul`.
      tokens: columns of an accumulator there, at most.
    """

    sum_products: Callable[..., jax.Array]
    ring_bytes: int
    k_bytes: int
    staggered: bool
    stages: int
    tokens: int

    def products(
        self,
        columns: int,
        steps: int | jax.Array,
        take: Callable[[Any], tuple[Factor, Factor]],
        release: Callable[..., None],
        scratch: Callable[[Any], Any],
    ) -> jax.Array:
        """A warpgroup's sum of the products of all steps.

        Args:
          columns: of the result.
          steps: their number; one at least if it is an int.
          take: `take(k)` waits for the operands of a step.
          release: `release(k, predicate)` gives them back, unless the predicate is False; None:
            in any case.
          scratch: `scratch(k)`, called for the last step, is SMEM that this warpgroup may
            overwrite before it releases the step's operands: 4 KB or more in one piece, with
            transforms `tiled`.

        Returns:
          float32 `[64, columns]` in the layout of a WGMMA accumulator.
        """
        return self.sum_products(columns, steps, take, release, scratch)


def _by_wgmma(columns, steps, take, release, scratch):
    def multiply(acc, k):
        a, b = take(k)
        plgpu.wgmma(acc, a.ref if a.k_axis else a.ref.T, b.ref.T if b.k_axis else b.ref)

    def accumulate(acc):
        first = 0
        if isinstance(steps, int):  # then the loop needs no predicate
            first = 1
            multiply(acc, 0)

        @pl.loop(first, steps)
        def _(k):
            multiply(acc, k)
            plgpu.wgmma_wait(1)
            release(k - 1, None if first else k > 0)

        plgpu.wgmma_wait(0)
        release(steps - 1, None if first else steps > 0)
        return acc[...]

    return pl.run_scoped(accumulate, plgpu.ACC((ACC_ROWS, columns), jnp.float32))


def _by_mma(columns, steps, take, release, scratch):
    def step(k, acc):
        a, b = take(k)
        acc = warp_mma.multiply(acc, a.ref, b.ref, a_by_k=bool(a.k_axis), b_by_k=bool(b.k_axis))
        warpgroup.end_reads()
        release(k, k < steps - 1)
        return acc

    zeros = jnp.zeros((ACC_ROWS, columns), jnp.float32)
    acc = lax.fori_loop(0, steps, step, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))
    acc = warp_mma.in_wgmma_layout(acc, scratch(steps - 1))
    release(steps - 1, None if isinstance(steps, int) else steps > 0)
    return acc


WGMMA = Engine(_by_wgmma, ring_bytes=216 << 10, k_bytes=128, staggered=True, stages=4, tokens=256)
MMA = Engine(_by_mma, ring_bytes=98 << 10, k_bytes=64, staggered=False, stages=2, tokens=128)

_current = contextvars.ContextVar("engine", default=WGMMA)


def current() -> Engine:
    """The one that kernels are traced for."""
    return _current.get()


@contextlib.contextmanager
def using(engine: Engine) -> Iterator[None]:
    """Has kernels that are traced inside use this engine."""
    token = _current.set(engine)
    try:
        yield
    finally:
        _current.reset(token)


def by[**P, R](engine: Engine, function: Callable[P, R]) -> Callable[P, R]:
    """The function with its kernels by this engine."""

    @functools.wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        with using(engine):
            return function(*args, **kwargs)

    return traced
