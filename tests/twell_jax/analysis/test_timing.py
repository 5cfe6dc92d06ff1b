"""Clocks are those of what computes, and stop when the results are there."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twell_jax.analysis import timing


def test_results_are_waited_for():
    def sleep(x):
        time.sleep(0.02)
        return x

    x = jnp.ones(3)
    sleeping = jax.jit(lambda x: jax.pure_callback(sleep, x, x))
    assert timing.milliseconds(sleeping, x, calls=2, repeats=3) >= 20


def test_the_clock_is_lowered_without_a_gpu(lower):
    assert lower(lambda: timing._gpu_clock(3.0)).count("@mosaic_gpu") == 1


@pytest.mark.gpu
def test_the_clock_of_a_gpu_goes_on_while_it_is_held():
    stamps = [timing._clock(hold) for hold in (0.0, 5.0, 0.0)]
    first, held, last = (np.asarray(stamp).view(np.int64)[0] for stamp in stamps)
    assert first + 5e6 <= held <= last
