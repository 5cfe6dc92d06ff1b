import pytest

from tests import hub
from tests.twell_jax.models.pretrained.small import make
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import save_pretrained


@pytest.fixture
def saved(tmp_path):
    """A model and the directory where it was saved."""
    model = make()
    save_pretrained(tmp_path / "saved", model, ByteTokenizer())
    return model, tmp_path / "saved"


@pytest.fixture(scope="module")
def server():
    """What a local hub has published, and its address."""
    with hub.serve() as (published, address):
        yield published, address
