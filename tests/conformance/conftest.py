import pytest

from tests.conformance.cases import BACK_ENDS
from twell_jax.ffn import dispatch


@pytest.fixture(params=BACK_ENDS)
def back_end(request, monkeypatch):
    """Each back end in turn serves implementation="mosaic"."""
    monkeypatch.setattr(dispatch, "BACK_ENDS", (request.param,))
    return request.param
