"""The back ends that tests run with, and back ends of which they replace a function."""

from typing import Any

import pytest

from pallas_kernels.kernels import AMPERE, HOPPER, MMA, REFERENCE, Kernels

# A new one is a line here.
BACK_ENDS = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(HOPPER, id="hopper", marks=pytest.mark.gpu),
    pytest.param(MMA, id="mma", marks=pytest.mark.gpu),
    pytest.param(AMPERE, id="ampere", marks=pytest.mark.gpu),
]
by_each_that_decodes = pytest.mark.parametrize(
    "back_end", [param for param in BACK_ENDS if param.values[0].decodes], indirect=True
)


class _Changed:
    def __init__(self, kernels: Kernels, functions: dict[str, Any]) -> None:
        self._kernels = kernels
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def changed(kernels: Kernels, **functions: Any) -> Any:
    """The back end with other functions of these names."""
    return _Changed(kernels, functions)
