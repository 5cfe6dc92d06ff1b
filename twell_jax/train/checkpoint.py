"""Orbax checkpoints of a run: asynchronous, atomic, and never overwritten.

`DIRECTORY/STEP/state` holds the `TrainState`, `DIRECTORY/STEP/data` the position in the data, as
JSON, and `DIRECTORY/STEP/digests` the digests of both, by which damage is noticed. No random state
is stored: random numbers follow from the seed and the number of the step.
"""

import itertools
import logging
import os
import re
import sys
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils

from twell_jax.train import digest, noise
from twell_jax.train.state import TrainState

log = logging.getLogger(__name__)


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
        noise.divert_to(self.directory.parent / "log.txt")
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
            "arrays": {name: digest.texts(x)[0] for name, x in digest.of_arrays(tree).items()},
            "data": digest.of_json(data_position),
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
                + noise.where()
            )
        return None

    def _report_broken(self, problems: dict[int, str]) -> None:
        self._broken = list(problems)
        for problem in problems.values():
            log.warning(
                "checkpoint %s cannot be restored, %s%s", self.directory, problem, noise.where()
            )

    def _write(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # of this write or of the one before, in a thread of Orbax
            noise.add("a checkpoint cannot be written", error)
            whole = self.newest_before(sys.maxsize)
            raise CannotSave(
                f"{self.directory}: a checkpoint cannot be written: {_reason(error)}; "
                + (f"{whole} is whole, and the same command continues from it" if whole else "")
                + noise.where()
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
        noise.add("a checkpoint cannot be restored", error)
        return None, _reason(error)


def _reason(error: Exception) -> str:
    if code := re.search(r"os_error_code='(\d+)'", str(error)):  # of TensorStore
        return os.strerror(int(code[1]))
    line, *_ = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {line[:200]}"


def _all_agree(agreed: bool) -> bool:
    return bool(multihost_utils.process_allgather(agreed).all())


def _read(checkpoint: Path, items: dict[str, ocp.args.CheckpointArgs]) -> ocp.args.Composite:
    """Reads items of a checkpoint, and its digests if it has some."""
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
    arrays = digest.of_arrays(restored.get("state"))  # by all processes, whatever they read
    saved = restored.get("digests")
    if saved is None:
        log.warning(
            "checkpoint %s has no digests, as an older version saved it: damage cannot be noticed",
            checkpoint,
        )
        return
    of_saved = saved["arrays"]
    damaged = [name for name, x in arrays.items() if set(digest.texts(x)) != {of_saved.get(name)}]
    if "data" in restored and digest.of_json(restored.data) != saved["data"]:
        damaged.append("the position in the data")
    if damaged:
        raise CheckpointError(f"not as saved: {', '.join(damaged)}")
