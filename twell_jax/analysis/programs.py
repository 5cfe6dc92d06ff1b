"""Programs that are compiled beside each other and then timed, one after the other."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.stages import Compiled, Lowered


@dataclass(frozen=True)
class Program:
    """A jitted function with its arguments.

    Attributes:
      jitted: takes `static`, its static arguments, and then `args`.
      static, args: what it is called with; to compile it, shapes suffice.
      dense: whether the others are compared with it.
      calls: how many are timed together.
      carried: makes one more argument for the first call, whose memory the function takes over; the
        last result is that of the next call.
    """

    jitted: Any
    static: tuple
    args: tuple
    dense: bool
    calls: int
    carried: Callable[[], Any] | None = None

    def lower(self) -> Lowered:
        """Its program before XLA compiles it."""
        carried = () if self.carried is None else (jax.eval_shape(self.carried),)
        return self.jitted.lower(*self.static, *self.args, *carried)

    def caller(self, compiled: Compiled) -> Callable[[], Any]:
        """What calls it again and again."""
        if self.carried is None:
            return partial(compiled, *self.args)
        make, carried = self.carried, None

        def call() -> Any:
            nonlocal carried
            *results, carried = compiled(*self.args, make() if carried is None else carried)
            return results  # without what the next call deletes

        return call


def compiled[Key](programs: Mapping[Key, Program]) -> dict[Key, Compiled]:
    """Each of the programs, for its `caller`; those that take longest to compile come first.

    XLA times its choices for matrix products on the GPU, so the dense programs are compiled before
    all others, and one after the other. Meanwhile Python, which runs one thread at a time, lowers
    the others. XLA then compiles these side by side.
    """
    lowered = {key: program.lower() for key, program in programs.items() if program.dense}
    with ThreadPoolExecutor() as pool:
        dense = pool.submit(lambda: {key: one.compile() for key, one in lowered.items()})

        def compile_after(one: Lowered) -> Compiled:
            dense.result()
            return one.compile()

        others = {
            key: pool.submit(compile_after, program.lower())
            for key, program in programs.items()
            if not program.dense
        }
        return dense.result() | {key: one.result() for key, one in others.items()}
