"""What twins need of each other: thread blocks meet on the host, in the order of the program."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common.primitives import interpretation

_TIMEOUT = 60  # seconds, after which a block that waits for others gives up


class _Meeting:
    """Thread blocks that tell each other arrays."""

    def __init__(self, blocks: int):
        self._told: list[Any] = blocks * [None]
        self._barrier = threading.Barrier(blocks)

    def tell(self, place: int, values: Any) -> list[Any]:
        self._told[place] = jax.tree.map(np.asarray, values)
        self._barrier.wait(_TIMEOUT)  # all have told
        found = list(self._told)
        self._barrier.wait(_TIMEOUT)  # all have read
        return found


def of_all(values: Any, rank: jax.Array, blocks: int) -> Any:
    """What each thread block of a group has for `values`, stacked.

    Args:
      values: a pytree of arrays.
      rank: int32 scalar, the block's rank in its cluster, whose first `blocks` ranks are a group,
        and so on. The interpreter runs one cluster after the other.
      blocks: of a group.
    """
    meetings: dict[tuple[int, int], _Meeting] = shared("meetings", dict)

    def exchange(values, rank):
        group, place = divmod(int(rank), blocks)
        meeting = meetings.setdefault((blocks, group), _Meeting(blocks))
        return jax.tree.map(lambda *parts: np.stack(parts), *meeting.tell(place, values))

    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct((blocks, *v.shape), v.dtype), values)
    return io_callback(exchange, shapes, values, rank)


class Log:
    """What thread blocks have noted, for those that wait until enough is there.

    Attributes:
      entries: in the order in which they came.
    """

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self._changed = threading.Condition()

    def note(self, entry: Any) -> None:
        with self._changed:
            self.entries.append(entry)
            self._changed.notify_all()

    def wait_until(self, is_enough: Callable[[list[Any]], bool]) -> None:
        """Waits until `is_enough(entries)`."""
        with self._changed:
            if not self._changed.wait_for(lambda: is_enough(self.entries), _TIMEOUT):
                raise TimeoutError(f"a thread block waited for others in vain: {self.entries}")


def log(name: str) -> Log:
    """The log of this name in what is interpreted."""
    return shared(name, Log)


def in_order(call: Callable[..., bool | None], *operands: jax.Array) -> jax.Array:
    """What `call` returns on the host, an int32 scalar; 1 if that is None. The calls of a thread
    block, and its accesses to memory, keep their order."""

    def call_now(_, *operands):
        result = call(*operands)
        return np.int32(1 if result is None else result)

    def through(scratch_ref):
        # The interpreter keeps the order of accesses.
        scratch_ref[0] = jnp.int32(0)
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        scratch_ref[0] = io_callback(call_now, shape, scratch_ref[0], *operands)
        return scratch_ref[0]

    return pl.run_scoped(through, plgpu.SMEM((1,), jnp.int32))


def shared[T](name: str, make: Callable[[], T]) -> T:
    """What twins of one interpretation share under this name; made by the first that asks."""
    current = interpretation()
    assert current is not None
    return current.shared.setdefault(name, make())
