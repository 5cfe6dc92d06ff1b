"""Compiles programs in a thread, while others run."""

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax

log = logging.getLogger(__name__)


class CompileAhead[Key: Hashable]:
    """Programs by key, of which some are compiled ahead of their first call, and so are functions.

    They are compiled one after the other, in the order in which they are prepared. Autotuning then
    measures on busy devices. Its results for products that programs before have, too, are known.

    Args:
      compiled: compiles a program; it is called in a thread.
      at_its_call: a function that is compiled when it is first called.
    """

    def __init__(
        self, compiled: Callable[[Key], Callable], at_its_call: Callable[[Key], Callable]
    ) -> None:
        self._compiled, self._at_its_call = compiled, at_its_call
        self._thread = ThreadPoolExecutor(1, "compiler")
        self._programs: dict[Key, Future[Callable] | None] = {}  # None: compiled at its call
        self._calls: dict[str, Future | None] = {}  # None: may have been called

    def prepare(self, key: Key) -> None:
        """Begins to compile a program, unless it is prepared or has been asked for."""
        if key not in self._programs:
            self._programs[key] = self._thread.submit(self._compiled, key)

    def is_ready(self, key: Key) -> bool:
        """Whether `get` waits for nothing, and its program has been compiled, or called before."""
        prepared = self._programs.get(key)
        return key in self._programs and (prepared is None or prepared.done())

    def is_idle(self) -> bool:
        """Whether nothing is being compiled, or waits to be."""
        return all(one is None or one.done() for one in self._prepared())

    def get(self, key: Key) -> Callable:
        """A program; waits for it if it is being prepared.

        If that failed, it is compiled at its call: what autotuning needs beside a running program
        may exceed the memory.
        """
        prepared = self._programs.setdefault(key, None)
        try:
            return self._at_its_call(key) if prepared is None else prepared.result()
        except jax.errors.JaxRuntimeError as error:
            log.warning("not compiled beside training, but now: %s", str(error).splitlines()[0])
            self._programs[key] = None
            return self._at_its_call(key)

    def prepare_call(self, name: str, compile_it: Callable[[], object]) -> None:
        """Begins to compile a jitted function, unless it is prepared or settled.

        JAX then finds it compiled when it is called.

        Args:
          name: for `settle`.
          compile_it: compiles it; called in the thread. If it fails, the call compiles.
        """
        if name not in self._calls:
            self._calls[name] = self._thread.submit(compile_it)

    def settle(self, name: str) -> None:
        """Waits for what `prepare_call` compiles; what has not begun is left to its call."""
        prepared, self._calls[name] = self._calls.get(name), None
        if prepared is not None and not prepared.cancel():
            wait([prepared])

    def stop(self) -> bool:
        """Drops the programs that wait to be compiled; no other can be prepared from now on.

        Returns:
          Whether one is being compiled. Nothing can stop that: the process ends only after it.
        """
        self._thread.shutdown(wait=False, cancel_futures=True)
        return any(one is not None and one.running() for one in self._prepared())

    def _prepared(self) -> tuple[Future | None, ...]:
        return (*self._programs.values(), *self._calls.values())
