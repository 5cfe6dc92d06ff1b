"""Orbax checkpoints of a run: asynchronous, atomic, and never overwritten.

`DIRECTORY/STEP/state` holds the `TrainState`, `DIRECTORY/STEP/data` the position in the data, as
JSON, and `DIRECTORY/STEP/digests` the digests of both, by which damage is noticed, and the id of
the run. The digest of an array does not depend on how it is sharded, see
docs/design/0021-digests.md. No random state is stored: random numbers follow from the seed and the
number of the step.
"""

import hashlib
import itertools
import json
import logging
import os
import re
import sys
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
from twell_jax.train.checkpoint_errors import CannotSave, CheckpointError
from twell_jax.train.checkpoint_log import add_to_log, divert_messages, where_more_is
from twell_jax.train.durable import sync_tree
from twell_jax.train.state import TrainState

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for pending writes at its end.

    Args:
      directory: holds the checkpoints; created if missing. What Orbax says when it cannot read or
        write one goes to `log.txt` beside it.
      keep: how many of the newest checkpoints are kept.
      run: the id of the run. Checkpoints that hold another one count as broken, but not those that
        hold none, as an older version saved them. None restores those of any run.

    Raises:
      CannotSave: at the end, the last checkpoint could not be written.
    """

    def __init__(self, directory: Path, keep: int, run: str | None = None) -> None:
        self.directory, self._run = directory.absolute(), run
        divert_messages(self.directory.parent / "log.txt")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._broken: list[int] = []
        self._under_way: int | None = None  # the step whose checkpoint is written, or was last

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._write(partial(self._finish, self._manager.close))
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
          CannotSave: this checkpoint, or the one before, could not be written, or there is one of
            this step or a later one.
        """
        self._write(partial(self._finish, self._manager.wait_until_finished))
        self._set_broken_aside()
        tree = _fields(state)
        digests = {
            "arrays": {name: digest_texts(x)[0] for name, x in digests_of_arrays(tree).items()},
            "data": digest_of_json(data_position),
        } | ({"run": self._run} if self._run else {})
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(tree),
            data=ocp.args.JsonSave(data_position),
            digests=ocp.args.JsonSave(digests),
        )
        if not self._write(partial(self._manager.save, step, args=items)):
            raise CannotSave(
                f"{self.directory}: step {step} is not saved beside step "
                f"{self._manager.latest_step()}; move that elsewhere, and the same command "
                "continues"
            )
        self._under_way = step

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
        restored = self._newest(state=_and_the_step({"params": abstract_params}))
        return restored and restored.state["params"]

    def restore_position(self) -> dict[str, Any] | None:
        """Restores the position in the data alone; otherwise like `restore`."""
        restored = self._newest(state=_and_the_step({}), data=ocp.args.JsonRestore())
        return restored and restored.data

    def _newest(self, **items: ocp.args.CheckpointArgs) -> Any:
        """The items of the newest step that all processes can read and verify; None without steps.

        All processes try the steps that the first process sees.
        """
        problems: dict[int, str] = {}
        while (step := self._newest_besides(problems)) is not None:
            restored, problem = _tried(partial(_read, self.directory / str(step), items))
            if _all_agree(problem is None):  # to verify an array takes all processes
                _, problem = _tried(
                    partial(_verify, self.directory / str(step), restored, self._run)
                )
                if _all_agree(problem is None):
                    self._report_broken(problems)
                    return restored
            problems[step] = f"step {step}: {problem or 'another process cannot restore it'}"
        if problems:
            raise CheckpointError(
                f"{self.directory}: no checkpoint is whole and fits this model. Nothing changed. "
                + "; ".join(problems.values())
                + where_more_is()
            )
        self._require_known_names()
        return None

    def _require_known_names(self) -> None:
        """Raises a `CheckpointError` if there are checkpoints, although none is named as a step."""
        names = {path.parent.name for path in self.directory.glob("*/state")}
        names = {name for name in names if ocp.utils.TMP_DIR_SUFFIX not in name}
        if not _all_agree(not names):
            raise CheckpointError(
                f"{self.directory}: checkpoints are named by the number of their step, but here "
                f"are {', '.join(sorted(names)) or 'other names'}; rename them"
            )

    def _report_broken(self, problems: dict[int, str]) -> None:
        self._broken = list(problems)
        for problem in problems.values():
            log.warning(
                "checkpoint %s cannot be restored, %s%s", self.directory, problem, where_more_is()
            )

    def _finish(self, wait: Callable[[], None]) -> None:
        """Waits for the write under way, and until a power cut could not undo it."""
        wait()
        if self._under_way is not None and jax.process_index() == 0:
            sync_tree(self.directory / str(self._under_way))
        self._under_way = None

    def _write(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # of this write or of the one before, in a thread of Orbax
            add_to_log("a checkpoint cannot be written", error)
            whole = self.newest_before(sys.maxsize)
            raise CannotSave(
                f"{self.directory}: a checkpoint cannot be written: {_reason(error)}; "
                + (f"{whole} is whole, and the same command continues from it" if whole else "")
                + where_more_is()
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
    fields = vars(state) | {"rounded": None}  # which follows from the parameters
    return {name: value for name, value in fields.items() if value is not None}


def _and_the_step(tree: dict[str, Any]) -> ocp.args.PyTreeRestore:
    """Restores the arrays of `tree` of a state, and its step as an int32 of numpy."""
    step = {"step": jax.ShapeDtypeStruct((), np.int32)}
    args = ocp.checkpoint_utils.construct_restore_args(tree)
    return ocp.args.PyTreeRestore(
        step | tree,
        restore_args={"step": ocp.RestoreArgs(restore_type=np.ndarray)} | args,
        partial_restore=True,
    )


def _tried(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `call` returns, or the first line of its error."""
    try:
        return call(), None
    except Exception as error:  # Orbax raises many kinds; all mean "not this one"
        add_to_log("a checkpoint cannot be restored", error)
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


def _verify(checkpoint: Path, restored: ocp.args.Composite, run: str | None) -> None:
    """Compares what was read with the checkpoint's name, its run and the digests of what was saved.

    Raises:
      CheckpointError: they differ.
    """
    arrays = digests_of_arrays(restored.state)  # by all processes, whatever they read
    if (step := int(restored.state["step"])) != int(checkpoint.name):
        raise CheckpointError(f"it holds step {step}, so it must be named {step}")
    saved = restored.get("digests")
    if saved is None:
        log.warning(
            "checkpoint %s has no digests, as an older version saved it: damage cannot be noticed",
            checkpoint,
        )
        return
    if run and saved.get("run", run) != run:
        raise CheckpointError("another run saved it, so it does not belong here")
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


def prepare_save(abstract_state: TrainState, mesh: jax.sharding.Mesh) -> None:
    """Does what the first `Checkpoints.save` of such a state would wait for, in any thread.

    It compiles the digests. On GPUs it also allocates the page-locked memory that Orbax copies to,
    which takes seconds for billions of bytes; JAX keeps it for later.
    """
    leaves = jax.tree.leaves(_fields(abstract_state))
    with jax.set_mesh(mesh):  # which is a thread's own
        for x in leaves:
            _digest.lower(x).compile()
    if jax.default_backend() == "gpu":
        jax.block_until_ready([_zeros_on_host(x) for x in leaves])


def _zeros_on_host(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros in page-locked memory, sharded as x."""
    sharding = x.sharding.with_memory_kind("pinned_host")
    zero = np.zeros((), x.dtype)
    return jax.make_array_from_callback(
        x.shape, sharding, lambda index: np.broadcast_to(zero, x.shape)[index]
    )


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
