"""The back ends that tests run with, and back ends of which they replace a function."""

import types
from typing import Any

import pytest

from pallas_kernels.kernels import HOPPER, REFERENCE, Kernels

# A new one is a line here.
BACK_ENDS = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(HOPPER, id="hopper", marks=pytest.mark.gpu),
]


def changed(kernels: Kernels, **functions: Any) -> Kernels:
    """The back end with other functions of these names."""
    other = types.ModuleType(kernels.name)
    vars(other).update(vars(kernels) | functions)
    return other
