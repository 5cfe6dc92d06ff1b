import functools

import pytest


@pytest.fixture
def interpreted(interpreted):
    """`interpreted` on an H100's number of SMs, as these kernels wait for each other's blocks."""
    return functools.partial(interpreted, sms=132)
