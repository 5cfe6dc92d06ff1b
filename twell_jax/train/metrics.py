"""Fetches a run's metrics from the device a step late; checks, shows and stores them.

`metrics.jsonl` holds them, and TensorBoard and Weights & Biases get the same numbers if asked for.
"""

import glob
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from twell_jax import untrusted
from twell_jax.config import Config, ConfigError
from twell_jax.train import pace
from twell_jax.train.checkpoint import Checkpoints
from twell_jax.train.durable import write_atomically
from twell_jax.train.gradient_plan import GradientPlan
from twell_jax.train.sample import Sample
from twell_jax.train.sparsity_control import out_of_reach
from twell_jax.train.state import StepMetrics

log = logging.getLogger(__name__)

# What records of steps hold: lists with a value per layer, and numbers that are shown.
_OF_LAYERS = {"nnz", "max_nnz", "dead"}  # that every version has written
_OF_STEPS = {"ce", "l1", "tokens_per_second"}
# Texts of evaluations, and of that of the model that a run begins with.
_TEXTS = {
    "held_out_ce": {"prompt", "sample"},
    "source_ce": {"source_activation", "source_prompt", "source_sample"},
}
_MAY_BE_NULL = {"flops_utilisation", "joules_per_token", "seconds", "joules"}
_MOST_BYTES = 2**32  # of metrics.jsonl: a million records of the largest models


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient became inf or NaN; nothing computed from it was checkpointed."""


class Log:
    """`metrics.jsonl`, a line of JSON per logged step or evaluation; a context manager.

    The first of several processes writes, the others do nothing.

    Args:
      path: the file. Records after `step` are removed, as a continued run writes them again.
      step: the step at which the run starts or continues.
      sinks: the names of those in `SINKS` that get every number too.

    Attributes:
      last: the last record at the start; None without one, and in the other processes.

    Raises:
      ConfigError: the file is broken, or a sink cannot start or is not installed.
    """

    def __init__(self, path: Path, step: int, sinks: Iterable[str] = ()) -> None:
        self._file, self._sinks = None, list[Sink]()
        self.last: dict[str, Any] | None = None
        if jax.process_index() > 0:
            return
        self._sinks = [_opened(name, path.parent, step) for name in sinks]
        # Before its first step nothing is kept: a run that starts anew may have other settings.
        kept = [record for record in read(path) if record["step"] <= step] if step else []
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a")
        self.last = kept[-1] if kept else None

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()
        for sink in self._sinks:
            sink.close()

    def write(self, record: dict[str, Any]) -> None:
        """Adds `record`, which has a "step".

        Values are numbers, None, lists with one per layer, or texts, which no sink gets.
        """
        if not self._file:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        numbers: dict[str, float] = {}
        for name, value in record.items():
            layers = enumerate(value) if isinstance(value, list) else [("all", value)]
            if value is not None and not isinstance(value, str):
                numbers |= {f"{name}/{layer}": number for layer, number in layers}
        for sink in self._sinks:
            sink.add(numbers, record["step"])

    def sync(self) -> None:
        """Returns when what was written is on the disk, so that a power cut cannot undo it."""
        if self._file:
            os.fsync(self._file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, without a last line that a kill cut short.

    Raises:
      ConfigError: any other line is not JSON, or not what a run with one number of layers writes.
    """
    if not path.exists():
        return []
    records, layers = [], 0
    for number, line in enumerate(untrusted.read(path, _MOST_BYTES).split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{path}:{number}: not a line of JSON; mend or remove it") from None
        found = _layers(record)
        if found is None or (layers and found and found != layers):
            raise ConfigError(f"{path}:{number}: not a record of this run; mend or remove it")
        layers = layers or found
        records.append(record)
    return records


def _layers(record: Any) -> int | None:
    """The number of layers of a step's record; 0 for that of an evaluation, None for no record."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    unknown = {name for name in record.keys() & _MAY_BE_NULL if record[name] is None}
    for key, texts in _TEXTS.items():
        if key in record:
            unknown |= {name for name in texts if isinstance(record.get(name), str)}
    numbers = [value for name, value in record.items() if name not in lists.keys() | unknown]
    numbers += [value for values in lists.values() for value in values]
    if not all(isinstance(number, int | float) for number in numbers):
        return None
    if "ce" not in record:
        return None if lists else 0
    if not (lists.keys() >= _OF_LAYERS and record.keys() >= _OF_STEPS):
        return None
    lengths = {len(values) for values in lists.values()}
    return lengths.pop() if len(lengths) == 1 else None


class Sink(NamedTuple):
    """A program that shows a run's metrics: TensorBoard, or Weights & Biases.

    Attributes:
      add: called with numbers by name and the step that they are of.
      close: called once, at the end.
    """

    add: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


def _opened(name: str, directory: Path, step: int) -> Sink:
    """The sink of this name, a key of `SINKS`, for a run that starts or continues at `step`.

    It writes below `directory`, which exists.

    Raises:
      ConfigError: its package is not installed, or it cannot start.
    """
    try:
        return SINKS[name](directory, step)
    except ImportError as error:
        raise ConfigError(
            f"{name}: needs {error.name}: in your clone, pip install -e '.[{name}]'"
        ) from None


def _tensorboard(directory: Path, step: int) -> Sink:
    from tensorboardX import SummaryWriter

    # TensorBoard hides events from `purge_step` on that earlier sessions wrote.
    writer = SummaryWriter(str(directory), purge_step=step + 1)

    def add(numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    return Sink(add, writer.close)


def _wandb(directory: Path, step: int) -> Sink:
    import wandb

    # A continued run goes on under its id. Steps that were logged before are ignored there.
    stored = directory / "wandb" / "id"
    run_id = untrusted.read(stored, _MOST_BYTES).decode() if stored.exists() else None
    if run_id is not None and not untrusted.is_inside(run_id):
        raise ConfigError(f"{stored}: is no id of a run at Weights & Biases; remove the file")
    while run_id and _has_session_of_this_second(stored.parent, run_id):
        time.sleep(0.05)
    try:
        run = wandb.init(dir=directory, name=directory.name, id=run_id, resume="allow")
    except wandb.Error as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"wandb: {reason}; WANDB_MODE=offline needs no account") from error
    stored.parent.mkdir(exist_ok=True)
    write_atomically(stored, run.id)
    return Sink(lambda numbers, step: run.log(dict(numbers), step=step), run.finish)


def _has_session_of_this_second(directory: Path, run_id: str) -> bool:
    """Whether W&B would write into the directory of an earlier session, over what that wrote.

    It names a session's directory by the second in which it starts, and the run's id.
    """
    return any(directory.glob(f"*run-{datetime.now():%Y%m%d_%H%M%S}-{glob.escape(run_id)}"))


# By the key of a configuration that asks for it, which is also the name of its extra.
SINKS: dict[str, Callable[[Path, int], Sink]] = {"tensorboard": _tensorboard, "wandb": _wandb}


class Recorder:
    """Handles the metrics of a step while the next one runs, so that the device never waits.

    Args:
      config: the run.
      log: receives every `log_every`-th record, with `init_from` the first one, too, and all
        evaluations, with the run's totals of seconds and joules (`pace.Meter`).
      show: called with each record and whether it is logged.
      checkpoints: for the error message, which names the last good one.
    """

    def __init__(
        self,
        config: Config,
        log: Log,
        show: Callable[[dict[str, Any], bool], None],
        checkpoints: Checkpoints,
    ) -> None:
        self._config, self._log, self._show, self._checkpoints = config, log, show, checkpoints
        self._pending: tuple[int, StepMetrics] | None = None
        self._plan: GradientPlan | None = None  # of the pending step
        self._clock: tuple[int, float, float | None] | None = None  # a step, when it ended, joules
        self._tokens_per_second = 0.0
        self._joules_per_token: float | None = None
        self._meter = pace.Meter(log.last)
        self._has_warned = False

    def add(self, step: int, measured: StepMetrics, plan: GradientPlan | None = None) -> None:
        """Takes the metrics of `step`, which may still be running, and handles the step before.

        `plan` is the gradient plan of the step, if it had one.

        Raises:
          NonFiniteLoss: see `flush`.
        """
        self.flush()
        if plan and self._plan and plan.capacities != self._plan.capacities:
            self._clock = None  # the time for compiling another program does not count
        self._plan = plan
        self._pending = step, measured

    def add_evaluation(
        self,
        step: int,
        held_out_ce: float,
        unigram_ce: float,
        bits_per_byte: float | None = None,
        sample: Sample | None = None,
    ) -> None:
        """Records a held-out evaluation after `step`, whose own record must have been flushed.

        Args:
          step: number of steps taken.
          held_out_ce: in nats per token.
          unigram_ce: that of the unigram baseline, for plots.
          bits_per_byte: the first one in bits per byte; None if the text is not known.
          sample: a text that the model wrote, if it did.

        Raises:
          NonFiniteLoss: see `flush`.
        """
        self._clock = None  # the time for evaluating does not count
        self._require_finite(step, updates=step, held_out_ce=held_out_ce)
        found: dict[str, Any] = {"held_out_ce": held_out_ce, "unigram_ce": unigram_ce}
        if bits_per_byte is not None:
            found["bits_per_byte"] = bits_per_byte
        if sample is not None:
            found |= {"prompt": sample.prompt, "sample": sample.text}
        self._log.write({"step": step, **found, **self._meter.totals()})

    def add_source(
        self,
        activation: str,
        held_out_ce: float,
        bits_per_byte: float | None,
        sample: Sample | None,
    ) -> None:
        """Records how the model of `init_from` reads the held-out text, before the first step.

        Args:
          activation: that it was trained with.
          held_out_ce, bits_per_byte, sample: as of `add_evaluation`.
        """
        found: dict[str, Any] = {"source_ce": held_out_ce, "source_activation": activation}
        if bits_per_byte is not None:
            found["source_bits_per_byte"] = bits_per_byte
        if sample is not None:
            found |= {"source_prompt": sample.prompt, "source_sample": sample.text}
        self._log.write({"step": 0, **found})

    def flush(self) -> None:
        """Waits for the last step added; checks, shows and logs what it measured.

        Raises:
          NonFiniteLoss: the message names the step and the last good checkpoint.
        """
        if self._pending is None:
            return
        (step, measured), self._pending = self._pending, None
        record: dict[str, Any] = {"step": step, "tokens": step * self._config.batch_tokens}
        values = {name: value for name, value in vars(measured).items() if value is not None}
        record |= {name: np.asarray(value).tolist() for name, value in values.items()}
        if targets := self._config.targets:
            record |= targets
            self._warn_if_out_of_reach(record)
        if self._plan:
            record["sparse_gradients"] = list(self._plan.sparse)
        checked = {name: record[name] for name in ("ce", "l1", "grad_norm")}
        self._require_finite(step, updates=step - 1, **checked)
        logged = step % self._config.log_every == 0 or step == self._config.steps
        # The first step measures what its parameters do before they change.
        logged = logged or (step == 1 and self._config.init_from is not None)
        record |= self._measured_pace(step, logged)
        self._show(record, logged)
        if logged:
            self._log.write(record | self._meter.totals())

    def _warn_if_out_of_reach(self, record: dict[str, Any]) -> None:
        """Warns once that a target cannot be reached."""
        of_layers = {"sparsity_target": "nnz", "union_target": "mean_union"}
        found = {key: float(np.mean(record[of_layers[key]])) for key in self._config.targets}
        why = out_of_reach(self._config, record["step"] - 1, record["l1_coefficient"], found)
        if why and not self._has_warned and jax.process_index() == 0:
            log.warning("step %d: %s", record["step"], why)
            self._has_warned = True

    def _measured_pace(self, step: int, logged: bool) -> dict[str, float | None]:
        """Rates since the clock was set, which is set anew if the step is logged."""
        now, sets = time.monotonic(), logged or self._clock is None
        joules = pace.joules() if sets else None
        if self._clock is not None:  # not in the first step, which compiles
            since, then, used = self._clock
            tokens = (step - since) * self._config.batch_tokens
            self._tokens_per_second = tokens / (now - then)
            if joules is not None and used is not None:
                self._joules_per_token = pace.joules_per_token(joules - used, tokens)
        if sets:
            self._clock = step, now, joules
        return {
            "tokens_per_second": self._tokens_per_second,
            "flops_utilisation": pace.flops_utilisation(
                self._config.model, self._tokens_per_second
            ),
            "joules_per_token": self._joules_per_token,
        }

    def _require_finite(self, step: int, *, updates: int, **measured: float) -> None:
        """Checks values measured in `step`, on parameters after `updates` updates."""
        if not all(map(math.isfinite, measured.values())):
            values = ", ".join(f"{name}={value}" for name, value in measured.items())
            good = self._checkpoints.newest_before(updates)
            raise NonFiniteLoss(
                f"step {step}: not finite: {values}; last good checkpoint: {good or 'none'}"
            )
