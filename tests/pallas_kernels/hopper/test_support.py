"""What the kernels refuse."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kernels import HOPPER
from tests.twell_jax.ffn.test_dispatch import H100

W = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)


@pytest.mark.parametrize(
    "flag",
    [
        "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT",
        "--xla_gpu_graph_enable_concurrent_region=true",
    ],
)
def test_kernels_that_run_at_the_same_time_are_refused(monkeypatch, flag):
    with jax.sharding.use_abstract_mesh(H100):
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
        assert HOPPER.unsupported(W) is None
        monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_autotune_level=0 {flag}")
        assert HOPPER.unsupported(W) == (
            f"its kernels must run one after the other: take {flag} out of XLA_FLAGS"
        )
