"""How the kernels of the block multiply, and in how much shared memory.

`WGMMA` is Hopper's: a warpgroup multiplies from shared memory, without waiting. `MMA` does what
GPUs with TMA but without WGMMA can (RTX PRO 6000, RTX 50): warps load operands into registers and
multiply by `mma.sync` (`warp_mma`), in 99 KB. `CP_ASYNC` does so without TMA. Kernels ask for the
`current()` one when they are traced; their epilogues get the same accumulators from all.
"""

import abc
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import warp_mma
from pallas_kernels.hopper.common.tiles import ACC_ROWS
from pallas_kernels.hopper.common.warpgroup import end_reads


class Factor(NamedTuple):
    """An operand of a product in SMEM, 64 rows or the columns, by K or transposed.

    Attributes:
      ref: with the transforms `tiles.tiled`.
      k_axis: the axis of K.
    """

    ref: Any
    k_axis: int


@dataclass(frozen=True)
class Engine(abc.ABC):
    """How products are made, and in how much shared memory.

    Attributes:
      ring_bytes: shared memory for the ring of `matmul`, and what its epilogue needs.
      k_bytes: of the contracted axis in a stage of this ring and of that of `gathered_matmul`.
      staggered: whether consumers of `matmul` take turns at a stage.
      stages: of the ring of `gathered_matmul`.
      slots: of 128 rows and columns in the pipeline of `dense_rows`, with `part` elements of the
        contracted axis.
      sm_bytes: shared memory of an SM, of which the thread blocks of `token_ring` have shares.
      has_tma: whether there are clusters, and TMA for `copies`; else threads make copies.
    """

    ring_bytes: int
    k_bytes: int
    staggered: bool
    stages: int
    slots: int
    sm_bytes: int
    has_tma: bool = True

    def set_registers(self, count: int, action: Literal["increase", "decrease"]) -> None:
        """Has a warpgroup give registers back, or take more; only on GPUs with TMA."""
        if self.has_tma:
            plgpu.set_max_registers(count, action=action)

    def stage_k(self, dtype: jax.typing.DTypeLike) -> int:
        """Elements of the contracted axis in a stage of these rings."""
        return self.k_bytes // jnp.dtype(dtype).itemsize

    @property
    def part(self) -> int:
        """Columns of an accumulator that an epilogue of `gathered_matmul` stores at once: those of
        16 bits in a stage."""
        return self.stage_k(jnp.bfloat16)

    @abc.abstractmethod
    def sum_products(
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
            overwrite before it releases the step's operands: a multiple of 2 KB in one piece, with
            transforms `tiled`, from which no copy reads any more.

        Returns:
          float32 `[64, columns]` in the layout of a WGMMA accumulator.
        """

    @abc.abstractmethod
    def sum_in_pipeline(
        self,
        pipeline: Callable[[Any], Any],
        columns: list[int],
        scratch: Callable[[], Any] | None = None,
    ) -> list[jax.Array]:
        """Likewise, several sums of which a pipeline carries what `step` adds to.

        Args:
          pipeline: called with what it carries at first, returns what it carries at last; such as
            `emit_pipeline_warp_specialized` gives to its `compute_context`.
          columns: of the results.
          scratch: as of `sum_products`; None if no result has 128 columns or more.
        """

    @abc.abstractmethod
    def step(self, carry: Any, products: list[tuple[Factor, Factor]]) -> Any:
        """Adds products to what the pipeline carries, one to each sum; returns the new carry."""


class _WGMMA(Engine):
    def sum_products(self, columns, steps, take, release, scratch):
        def accumulate(acc):
            first = 0
            if isinstance(steps, int):  # then the loop needs no predicate
                first = 1
                _wgmma(acc, *take(0))

            @pl.loop(first, steps)
            def _(k):
                _wgmma(acc, *take(k))
                plgpu.wgmma_wait(1)
                release(k - 1, None if first else k > 0)

            plgpu.wgmma_wait(0)
            release(steps - 1, None if first else steps > 0)
            return acc[...]

        return pl.run_scoped(accumulate, _accumulator(columns))

    def sum_in_pipeline(self, pipeline, columns, scratch=None):
        def accumulate(*accs):
            pipeline(accs)
            return [acc[...] for acc in accs]

        return pl.run_scoped(accumulate, *map(_accumulator, columns))

    def step(self, carry, products):
        for acc, product in zip(carry, products, strict=True):
            _wgmma(acc, *product)
        plgpu.wgmma_wait(len(products))  # the step before has ended
        return carry


class _MMA(Engine):
    def sum_products(self, columns, steps, take, release, scratch):
        def step(k, acc):
            (acc,) = self.step([acc], [take(k)])
            release(k, k < steps - 1)
            return acc

        acc = lax.fori_loop(0, steps, step, _zeros(columns))
        acc = self._in_wgmma_layout(acc, lambda: scratch(steps - 1))
        release(steps - 1, None if isinstance(steps, int) else steps > 0)
        return acc

    def sum_in_pipeline(self, pipeline, columns, scratch=None):
        accs = pipeline(list(map(_zeros, columns)))
        return [self._in_wgmma_layout(acc, scratch) for acc in accs]

    def step(self, carry, products):
        carry = [
            warp_mma.multiply(acc, a.ref, b.ref, a_by_k=bool(a.k_axis), b_by_k=bool(b.k_axis))
            for acc, (a, b) in zip(carry, products, strict=True)
        ]
        self._end_reads()
        return carry

    def _in_wgmma_layout(self, acc, scratch):
        laid_out = warp_mma.in_wgmma_layout(acc, scratch)
        if laid_out is not acc:
            self._end_reads()
        return laid_out

    def _end_reads(self):
        if self.has_tma:
            end_reads()


def _wgmma(acc, a: Factor, b: Factor) -> None:
    plgpu.wgmma(acc, a.ref if a.k_axis else a.ref.T, b.ref.T if b.k_axis else b.ref)


def _accumulator(columns: int):
    return plgpu.ACC((ACC_ROWS, columns), jnp.float32)


def _zeros(columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ACC_ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)


WGMMA = _WGMMA(
    ring_bytes=216 << 10,
    k_bytes=128,
    staggered=True,
    stages=4,
    slots=4,
    sm_bytes=228 << 10,
)
MMA = _MMA(
    ring_bytes=98 << 10,
    k_bytes=64,
    staggered=False,
    stages=3,
    slots=2,
    sm_bytes=100 << 10,
)

CP_ASYNC = replace(MMA, has_tma=False)

_current = contextvars.ContextVar[Engine]("engine", default=WGMMA)


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
