import pytest

from tests.twell_jax.ffn.cases import use_twins
from twell_jax.ffn import mosaic as ffn_mosaic


@pytest.fixture
def twins(monkeypatch):
    """The kernels replaced by the functions that define them, to test what is around them."""
    use_twins(monkeypatch.setattr)
    forget()
    yield
    forget()


def forget():
    ffn_mosaic._compute.cache_clear()
    ffn_mosaic._compute_with_sparse_grads.cache_clear()
