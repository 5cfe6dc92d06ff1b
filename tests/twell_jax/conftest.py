import pytest
import yaml

from tests.twell_jax.configs import VALID


@pytest.fixture
def path(tmp_path):
    """A file with a valid configuration."""
    file = tmp_path / "valid.yaml"
    file.write_text(yaml.safe_dump(VALID))
    return file
