"""What the kernels refuse."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.hopper.common import support
from pallas_kernels.kernels import AMPERE, HOPPER, MMA
from pallas_kernels.quantised import E4M3, Quantised
from tests.devices import H100

W = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)


@pytest.mark.parametrize(
    "flag",
    [
        "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT",
        "--xla_gpu_graph_enable_concurrent_region=true",
        "--xla_gpu_graph_enable_concurrent_region",
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


@pytest.mark.parametrize(
    ("kind", "capability", "serves"),
    [
        ("NVIDIA H200", "9.0", ["Hopper", "MMA", "Ampere"]),
        ("NVIDIA GeForce RTX 5090", "12.0", ["MMA", "Ampere"]),
        ("NVIDIA A100-SXM4-80GB", "8.0", ["Ampere"]),
        ("Tesla T4", "7.5", []),
        ("NVIDIA B200", "10.0", []),
        ("AMD Instinct MI300X", "gfx942", []),
    ],
)
def test_gpus_are_known_by_their_compute_capability(monkeypatch, kind, capability, serves):
    gpu = SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(support, "current", lambda: gpu)
    found = [kernels.name for kernels in (HOPPER, MMA, AMPERE) if not kernels.unsupported(W)]
    assert found == serves
    assert serves or HOPPER.unsupported(W) == f"it needs a Hopper GPU, got {kind}"


@pytest.mark.parametrize("gate", [HOPPER.gate_pack, HOPPER.gate_union])
@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        ((4, 128), (128, 192), r"x must be .*\[4, 192\].*\[4, 128\]"),
        ((4, 96), (128, 96), r"D a multiple of 64.*\[128, 96\]"),
        ((4, 8256), (128, 8256), r"D a multiple of 64 from 128 to 8192.*\[128, 8256\]"),
        ((4, 128), (192, 128), r"H a multiple of 128.*\[192, 128\]"),
        ((4, 128), (65536 + 128, 128), r"H a multiple of 128 up to 65536.*\[65664, 128\]"),
        ((0, 128), (128, 128), r"x must be .*at least one row.*\[0, 128\]"),
        ((4, 4, 128), (128, 128), r"x must be .*\[4, 4, 128\]"),
    ],
)
def test_bad_shapes_of_a_gate_are_named(gate, x, w, message):
    with pytest.raises(ValueError, match=message):
        gate(jnp.zeros(x, jnp.bfloat16), jnp.zeros(w, jnp.bfloat16))


@pytest.mark.parametrize("gate", [HOPPER.gate_pack, HOPPER.gate_union])
@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (jnp.float32, jnp.float32, "w_gate must be a bfloat16 or float16 .* got float32"),
        (jnp.bfloat16, jnp.float16, "x must be float16 .* got bfloat16"),
        (jnp.int16, jnp.int16, "w_gate must be a bfloat16 or float16 .* got int16"),
    ],
)
def test_bad_dtypes_of_a_gate_are_named(gate, x, w, message):
    with pytest.raises(ValueError, match=message):
        gate(jnp.zeros((4, 128), x), jnp.zeros((128, 128), w))


@pytest.mark.parametrize(
    ("values", "scale", "message"),
    [
        ((128, 192), (128, 1), "w must have D a multiple of 128"),
        ((128, 128), (1, 128), r"w.scale must be float32 \[128, 1\] .* got float32 \[1, 128\]"),
        ((256, 128), (256, 1), r"w.values must be float8_e4m3fn \[128, 128\]"),
    ],
)
def test_bad_shapes_of_8_bits_are_named(values, scale, message):
    w = Quantised(jnp.zeros(values, E4M3), jnp.zeros(scale, jnp.float32))
    with pytest.raises(ValueError, match=message):
        support.check_quantised("w", w, (128, values[1]))
