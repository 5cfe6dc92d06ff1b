"""The estimate without a GPU is that of the records, and right within its error on others."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import estimate as fits
from twell_jax.analysis import estimate


def test_the_coefficients_are_those_that_the_records_give():
    for name, coefficients in fits.fitted().items():
        assert getattr(estimate, name) == pytest.approx(coefficients, rel=5e-3), name


def test_the_module_names_the_records():
    text = Path(estimate.__file__).read_text()
    for name in (fits.STUDY, fits.GOALS, fits.GRADIENTS, fits.FEW):
        assert name in text


def test_records_that_it_was_not_fitted_to_are_within_the_stated_error():
    errors = {name: np.abs(found) for name, found in fits.errors().items()}
    assert {name: len(found) for name, found in errors.items()} == {
        "forward": 72, "both": 26, "decode": 2, "model": 12,
    }  # fmt: skip
    for name, found in errors.items():
        assert found.max() <= estimate.ERRORS[name]
        assert np.median(found) <= estimate.ERRORS[name] / 2 or name == "decode"
