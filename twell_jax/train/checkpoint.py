"""Orbax checkpoints of a run: asynchronous, atomic, and never overwritten.

`DIRECTORY/STEP/state` holds the `TrainState`, `DIRECTORY/STEP/data` the position in the data, as
JSON, and `DIRECTORY/STEP/digests` the digests of both, by which damage is noticed. The digest of an
array does not depend on how it is sharded, see docs/design/0021-digests.md. No random state is
stored: random numbers follow from the seed and the number of the step.
"""

import hashlib
import inspect
import itertools
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils

from twell_jax import untrusted
from twell_jax.train.state import TrainState

log = logging.getLogger(__name__)

_NOISY = "absl", "asyncio"  # loggers; Orbax logs by way of absl


class CheckpointError(RuntimeError):
    """Checkpoints exist, but none of them can be restored."""


class CannotSave(RuntimeError):
    """A checkpoint could not be written, say because the disk is full."""


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for pending writes at its end.

    Args:
      directory: holds the checkpoints; created if missing. What Orbax says when it cannot read or
        write one goes to `log.txt` beside it.
      keep: how many of the newest checkpoints are kept.

    Raises:
      CannotSave: at the end, the last checkpoint could not be written.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory.absolute()
        _divert_messages(self.directory.parent / "log.txt")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._broken: list[int] = []

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._write(self._manager.close)
        except CannotSave as another:
            if error is None:
                raise
            if not isinstance(error, CannotSave):
                log.error("%s", another)

    def newest_before(self, step: int) -> Path | None:
        """The directory of the newest checkpoint before `step` that is not known to be broken."""
        steps = [s for s in self._manager.all_steps() if s < step and s not in self._broken]
        return self.directory / str(max(steps)) if steps else None

    def save(self, step: int, state: TrainState, data_position: dict[str, Any]) -> None:
        """Starts writing a checkpoint; returns as soon as `state` may be donated.

        Raises:
          CannotSave: this checkpoint, or the one before, could not be written.
        """
        self._set_broken_aside()
        tree = _fields(state)
        digests = {
            "arrays": {name: digest_texts(x)[0] for name, x in digests_of_arrays(tree).items()},
            "data": digest_of_json(data_position),
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(tree),
            data=ocp.args.JsonSave(data_position),
            digests=ocp.args.JsonSave(digests),
        )
        self._write(partial(self._manager.save, step, args=items))

    def restore(self, abstract_state: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """The state and the data position of the newest whole checkpoint; None if there is none.

        Broken checkpoints are logged; the next `save` renames them to STEP.broken.

        Raises:
          CheckpointError: there are checkpoints, but none can be restored.
        """
        restored = self._newest(
            state=ocp.args.StandardRestore(_fields(abstract_state)), data=ocp.args.JsonRestore()
        )
        return restored and (TrainState(**restored.state), restored.data)

    def restore_params(self, abstract_params: nnx.State) -> nnx.State | None:
        """Restores the parameters alone, a third of the bytes; otherwise like `restore`."""
        tree = {"params": abstract_params}
        args = ocp.args.PyTreeRestore(
            tree,
            restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
            partial_restore=True,
        )
        restored = self._newest(state=args)
        return restored and restored.state["params"]

    def restore_position(self) -> dict[str, Any] | None:
        """Restores the position in the data alone; otherwise like `restore`."""
        restored = self._newest(data=ocp.args.JsonRestore())
        return restored and restored.data

    def _newest(self, **items: ocp.args.CheckpointArgs) -> Any:
        """The items of the newest step that all processes can read and verify; None without steps.

        All processes try the steps that the first process sees.
        """
        problems: dict[int, str] = {}
        while (step := self._newest_besides(problems)) is not None:
            restored, problem = _tried(partial(_read, self.directory / str(step), items))
            if _all_agree(problem is None):  # to verify an array takes all processes
                _, problem = _tried(partial(_verify, self.directory / str(step), restored))
                if _all_agree(problem is None):
                    self._report_broken(problems)
                    return restored
            problems[step] = f"step {step}: {problem or 'another process cannot restore it'}"
        if problems:
            raise CheckpointError(
                f"{self.directory}: no checkpoint is whole and fits this model. Nothing changed. "
                + "; ".join(problems.values())
                + _where_more_is()
            )
        return None

    def _report_broken(self, problems: dict[int, str]) -> None:
        self._broken = list(problems)
        for problem in problems.values():
            log.warning(
                "checkpoint %s cannot be restored, %s%s", self.directory, problem, _where_more_is()
            )

    def _write(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # of this write or of the one before, in a thread of Orbax
            _add_to_log("a checkpoint cannot be written", error)
            whole = self.newest_before(sys.maxsize)
            raise CannotSave(
                f"{self.directory}: a checkpoint cannot be written: {_reason(error)}; "
                + (f"{whole} is whole, and the same command continues from it" if whole else "")
                + _where_more_is()
            ) from error

    def _newest_besides(self, tried: Container[int]) -> int | None:
        newest = max((s for s in self._manager.all_steps() if s not in tried), default=-1)
        newest = int(multihost_utils.broadcast_one_to_all(newest))
        return newest if newest >= 0 else None

    def _set_broken_aside(self) -> None:
        if jax.process_index() == 0:
            for step in self._broken:
                names = (self.directory / f"{step}.broken{n or ''}" for n in itertools.count())
                free = next(path for path in names if not path.exists())
                (self.directory / str(step)).rename(free)
        if self._broken:
            multihost_utils.sync_global_devices("broken checkpoints are set aside")
            self._manager.reload()
        self._broken = []


def _fields(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds of a state: nothing of a field that the run has no use for.

    Checkpoints that were saved before there was this field have the same structure.
    """
    return {name: value for name, value in vars(state).items() if value is not None}


def _tried(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `call` returns, or the first line of its error."""
    try:
        return call(), None
    except Exception as error:  # Orbax raises many kinds; all mean "not this one"
        _add_to_log("a checkpoint cannot be restored", error)
        return None, _reason(error)


def _reason(error: Exception) -> str:
    if code := re.search(r"os_error_code='(\d+)'", str(error)):  # of TensorStore
        return os.strerror(int(code[1]))
    line, *_ = [*str(error).strip().splitlines(), ""]
    return untrusted.plain(f"{type(error).__name__}: {line[:200]}")


def _all_agree(agreed: bool) -> bool:
    return bool(multihost_utils.process_allgather(agreed).all())


def _read(checkpoint: Path, items: dict[str, ocp.args.CheckpointArgs]) -> ocp.args.Composite:
    """Reads items of a checkpoint, and its digests if it has some."""
    for path in checkpoint.rglob("*"):  # Orbax would wait for what a pipe will bring
        untrusted.require_regular(path)
    if (checkpoint / "digests").exists():
        items = items | {"digests": ocp.args.JsonRestore()}
    # Without barriers between processes: if one failed, the others would wait forever.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={jax.process_index()}
    )
    handler = ocp.CompositeCheckpointHandler()
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        return reader.restore(checkpoint, args=ocp.args.Composite(**items))


def _verify(checkpoint: Path, restored: ocp.args.Composite) -> None:
    """Compares what was read with the digests of what was saved.

    Raises:
      CheckpointError: they differ.
    """
    arrays = digests_of_arrays(restored.get("state"))  # by all processes, whatever they read
    saved = restored.get("digests")
    if saved is None:
        log.warning(
            "checkpoint %s has no digests, as an older version saved it: damage cannot be noticed",
            checkpoint,
        )
        return
    of_saved = saved["arrays"]
    damaged = [name for name, x in arrays.items() if set(digest_texts(x)) != {of_saved.get(name)}]
    if "data" in restored and digest_of_json(restored.data) != saved["data"]:
        damaged.append("the position in the data")
    if damaged:
        raise CheckpointError(f"not as saved: {', '.join(damaged)}")


def digests_of_arrays(tree: Any) -> dict[str, jax.Array]:
    """The digest of each array of a tree, computed on its devices; all of its processes call it.

    Returns:
      uint32 [2], replicated, for the path of each array, such as "params/embed/embedding/value".
    """
    digests = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        # One after the other: processes on CPUs may wait for each other forever if reductions of
        # several programs are under way.
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        digests[name] = jax.block_until_ready(_digest(x))
    return digests


def digest_texts(digest: jax.Array) -> list[str]:
    """A digest in hexadecimal, as each device of this process has it.

    They differ only if the array's replicas do. The first is that of the first replica.
    """
    values = (np.asarray(shard.data) for shard in digest.addressable_shards)
    return [value.astype(">u4").tobytes().hex() for value in values]


def digest_of_json(tree: Any) -> str:
    """The digest of what JSON keeps of a tree."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


@jax.jit
def _digest(x: jax.Array) -> jax.Array:
    """The sum and the sum of squares, modulo 2^32, of a hash of each element and its index."""
    word = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        index = index * jnp.uint32(size) + along
    hashed, zero = _mixed(bits ^ _mixed(index)), jnp.uint32(0)
    # One reduction of both: XLA would keep `hashed`, as large as x, for a second one.
    sums = jax.lax.reduce(
        (hashed, hashed * hashed),
        (zero, zero),
        lambda total, more: (total[0] + more[0], total[1] + more[1]),
        tuple(range(bits.ndim)),
    )
    return jnp.stack(sums)


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of all uint32 in which each bit of x decides about half of the bits."""
    # The constants are those of "lowbias32", https://github.com/skeeto/hash-prospector
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


class _LogFile(logging.Handler):
    """Keeps off the terminal what Orbax says when a checkpoint cannot be read or written.

    For one cause Orbax and asyncio log hundreds of lines, some of them from threads that end later.
    We name the cause in one line; everything else is added to the file at `path`. What cannot be
    written there, as on a full disk, is lost.
    """

    path: Path
    written = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with self.path.open("a") as file:
                file.write(f"{self.format(record)}\n")
            self.written = True
        except OSError:
            pass


_log_file = _LogFile(logging.WARNING)
_log_file.setFormatter(
    logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
)
_show_unraisable = sys.unraisablehook


def _divert_messages(path: Path) -> None:
    """From now on, messages go to the end of the file at `path`, created with the first of them."""
    global _show_unraisable
    _log_file.path, _log_file.written = path, False
    for logger in map(logging.getLogger, _NOISY):
        logger.propagate = False
        if _log_file not in logger.handlers:
            logger.addHandler(_log_file)
    warnings.filterwarnings("ignore", r"coroutine 'Store\.", RuntimeWarning)  # Orbax's, at an error
    if sys.unraisablehook is not _divert_unraisable:
        _show_unraisable, sys.unraisablehook = sys.unraisablehook, _divert_unraisable


def _add_to_log(message: str, error: Exception) -> None:
    """Adds an error with its traceback to the file."""
    record = logging.getLogger(__name__).makeRecord(
        __name__, logging.ERROR, "", 0, message, (), (type(error), error, error.__traceback__)
    )
    _log_file.handle(record)


def _where_more_is() -> str:
    """Words that end a message: where there is more, if there is."""
    return f"; details: {_log_file.path}" if _log_file.written else ""


def _divert_unraisable(unraisable: Any) -> None:
    """Takes what is left of coroutines whose event loop ended with the first error of several."""
    error = unraisable.exc_value
    if inspect.iscoroutine(unraisable.object) or str(error) == "Event loop is closed":
        _add_to_log("left behind by an earlier error", error)
    else:
        _show_unraisable(unraisable)
