"""Programs that show a run's metrics: TensorBoard and Weights & Biases."""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from twell_jax.config import ConfigError


class Sink(NamedTuple):
    """Takes the numbers of a run.

    Attributes:
      add: called with numbers by name and the step that they are of.
      close: called once, at the end.
    """

    add: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


def open_sinks(names: Iterable[str], directory: Path, step: int) -> list[Sink]:
    """The sinks of these names, keys of `SINKS`, for a run that starts or continues at `step`.

    They write below `directory`, which exists.

    Raises:
      ConfigError: the package of a sink is not installed, or it cannot start.
    """
    return [_open(name, directory, step) for name in names]


def _open(name: str, directory: Path, step: int) -> Sink:
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
    run_id = stored.read_text() if stored.exists() else None
    while run_id and _has_session_of_this_second(stored.parent, run_id):
        time.sleep(0.05)
    try:
        run = wandb.init(dir=directory, name=directory.name, id=run_id, resume="allow")
    except wandb.Error as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"wandb: {reason}; WANDB_MODE=offline needs no account") from error
    stored.parent.mkdir(exist_ok=True)
    stored.write_text(run.id)
    return Sink(lambda numbers, step: run.log(dict(numbers), step=step), run.finish)


def _has_session_of_this_second(directory: Path, run_id: str) -> bool:
    """Whether W&B would write into the directory of an earlier session, over what that wrote.

    It names a session's directory by the second in which it starts, and the run's id.
    """
    return any(directory.glob(f"*run-{datetime.now():%Y%m%d_%H%M%S}-{run_id}"))


# By the key of a configuration that asks for it, which is also the name of its extra.
SINKS: dict[str, Callable[[Path, int], Sink]] = {"tensorboard": _tensorboard, "wandb": _wandb}
