"""What generation reports of its speed, with a clock that the test turns."""

import numpy as np
import pytest

from twell_jax.inference import ENDED, rates
from twell_jax.inference.rates import Timed

PROMPTS = [[1] * 30, [2] * 10]


@pytest.fixture
def clock(monkeypatch):
    """`clock.now` is the time in seconds."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(rates.time, "perf_counter", lambda: Clock.now)
    return Clock


def timed(clock, steps):
    """Steps whose prompts take 2 s, every other step 0.25 s, and whatever follows a step 0.25 s."""

    def generated():
        clock.now += 2 - 0.25
        for tokens in steps:
            clock.now += 0.25
            yield np.array(tokens)

    found = Timed(generated())
    clock.now += 50  # before the first step is asked for
    seen = []
    for tokens in found:
        clock.now += 0.25
        seen.append(tokens.tolist())
    assert seen == [list(tokens) for tokens in steps]
    return found.rates(PROMPTS)


def test_prompts_and_decoding_are_timed_apart_and_ended_sequences_do_not_count(clock):
    found = timed(clock, [(5, 6), (7, 8), (9, ENDED), (3, ENDED), (4, ENDED)])
    assert (found.prompt_tokens, found.prompt_seconds) == (40, 2.0)
    assert (found.steps, found.tokens, found.seconds) == (4, 5, 2.0)
    assert (found.step_ms, found.tokens_per_second) == (500, 2.5)
    assert str(found) == (
        "prefill: 40 tokens, 20 tokens/s; decode: 5 tokens, 2 tokens/s, 500.000 ms a step"
    )


@pytest.mark.parametrize("steps", [[], [(5, 6)]])
def test_there_are_no_rates_without_a_decode_step(clock, steps):
    assert timed(clock, steps) is None
