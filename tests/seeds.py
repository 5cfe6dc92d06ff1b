"""One seed for all tests (`--seed`), and a stream of random numbers of its own for each test.

A test draws the same whether it runs alone, in another order or on another worker.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np

_streams: np.random.SeedSequence | None = None


@contextlib.contextmanager
def drawn_for(name: str, seed: int) -> Iterator[None]:
    """Inside, all numbers follow from `name` (a test or a fixture) and `seed`."""
    global _streams
    before = _streams
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), np.uint32)
    _streams = np.random.SeedSequence([seed, *words.tolist()])
    try:
        yield
    finally:
        _streams = before


def rng() -> np.random.Generator:
    """A generator whose numbers differ from those of every other one."""
    if _streams is None:
        raise RuntimeError("random numbers are for tests and fixtures; a module has none")
    (stream,) = _streams.spawn(1)
    return np.random.default_rng(stream)


def integer() -> int:
    """A seed for jax.random.key, nnx.Rngs or torch: an integer in [0, 2^31)."""
    return int(rng().integers(2**31))
