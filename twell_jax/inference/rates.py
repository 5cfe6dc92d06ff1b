"""How quickly `generate` reads prompts and writes tokens."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from twell_jax.inference.generation import ENDED


@dataclass(frozen=True)
class Rates:
    """What a generation took, prompts and decoding apart.

    The first new token of each sequence belongs to the prompts, the others to decoding: a step
    appends one token to every sequence, also to those that have ended, whose tokens do not count.

    Attributes:
      prompt_tokens: tokens of all prompts, without padding.
      prompt_seconds: until the host had the first new tokens.
      steps: number of decode steps, at least 1.
      tokens: those that these steps appended to sequences that had not ended.
      seconds: from the first new tokens to the last, by the clock of the host, which reads them and
        may print them meanwhile. The device takes steps four at a time, so up to three that nobody
        wanted are in it.
    """

    prompt_tokens: int
    prompt_seconds: float
    steps: int
    tokens: int
    seconds: float

    @property
    def step_ms(self) -> float:
        """Milliseconds of a decode step."""
        return self.seconds / self.steps * 1e3

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        prompt = f"{self.prompt_tokens / self.prompt_seconds:,.0f} tokens/s"
        return (
            f"prefill: {self.prompt_tokens} tokens, {prompt}; "
            f"decode: {self.tokens} tokens, {self.tokens_per_second:,.0f} tokens/s, "
            f"{self.step_ms:.3f} ms a step"
        )


class Timed:
    """The steps of `generate`, in order, which it keeps with the time when each came.

    What has to be compiled is part of the time: run a step before.

    Attributes:
      tokens: int `[B]` of each step so far, as `generate` yields them.
      seconds: when each came, counted from when the first was asked for.
    """

    def __init__(self, steps: Iterator[np.ndarray]):
        self._steps = steps
        self.tokens: list[np.ndarray] = []
        self.seconds: list[float] = []

    def __iter__(self) -> Iterator[np.ndarray]:
        start = time.perf_counter()
        for tokens in self._steps:
            self.seconds.append(time.perf_counter() - start)
            self.tokens.append(tokens)
            yield tokens

    def rates(self, prompts: Sequence[Sequence[int]]) -> Rates | None:
        """The rates of the steps so far, which continue `prompts`; None without a decode step."""
        if len(self.tokens) < 2:
            return None
        return Rates(
            prompt_tokens=sum(map(len, prompts)),
            prompt_seconds=self.seconds[0],
            steps=len(self.tokens) - 1,
            tokens=int(np.sum(np.array(self.tokens[1:]) != ENDED)),
            seconds=self.seconds[-1] - self.seconds[0],
        )
