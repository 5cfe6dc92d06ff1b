"""For processes that tests start: something happens at an exact point of a run."""

import importlib
from collections.abc import Callable


def after_calls(where: str, calls: int, act: Callable) -> None:
    """From now on, `act(*args)` comes before each call of a function but the first `calls`.

    `where` names it, such as "twell_jax.train.metrics:Recorder:add".
    """
    module, *owner, name = where.split(":")
    target = importlib.import_module(module)
    for part in owner:
        target = getattr(target, part)
    original, count = getattr(target, name), 0

    def wrapped(*args, **kwargs):
        nonlocal count
        count += 1
        if count > calls:
            act(*args)
        return original(*args, **kwargs)

    setattr(target, name, wrapped)
