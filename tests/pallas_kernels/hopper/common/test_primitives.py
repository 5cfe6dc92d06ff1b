"""Which function a primitive calls, on a device and in the interpreter."""

import jax.numpy as jnp
import pytest

from pallas_kernels.hopper.common.primitives import count_together, interpreting, primitive
from pallas_kernels.hopper.common.support import sm_count


@primitive
def doubled(x):
    return 2 * x


@primitive
def without_twin():
    pass


@doubled.in_jax
def _(x):
    return f"2 * {x}"


def test_twins_are_called_in_the_interpreter_alone():
    with interpreting(sms=5):
        assert doubled(3) == "2 * 3" and sm_count() == 5
        with interpreting(sms=7):
            assert sm_count() == 7
        assert sm_count() == 5
        with pytest.raises(NotImplementedError, match="without_twin has no twin"):
            without_twin()
    assert doubled(3) == 6


def test_counters_begin_at_0_in_each_interpretation():
    for _ in range(2):
        with interpreting() as interpretation:
            before = [int(count_together("n", lambda n, by: n + by, jnp.int32(4))) for _ in "abc"]
        assert before == [0, 4, 8] and interpretation.counters == {"n": 12}
