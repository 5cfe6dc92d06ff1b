"""Eight virtual CPU devices, GPU tests only on Hopper, modest hypothesis budgets."""

import hypothesis
import jax
import pytest

# Has an effect only on the CPU backend, and only before it starts.
jax.config.update("jax_num_cpu_devices", 8)

hypothesis.settings.register_profile("twell", deadline=None, max_examples=40)
hypothesis.settings.load_profile("twell")


def pytest_collection_modifyitems(items):
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _has_hopper():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a GPU of compute capability 9.0"))


def _has_hopper() -> bool:
    return jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"
