import pytest

from pallas_kernels.hopper.common.primitives import interpreting


@pytest.fixture
def interpreted(capsys):
    """`interpreting`; no race may be found."""
    yield interpreting
    assert "RACE" not in capsys.readouterr().out
