"""benchmarks.collectives: time in NCCL's kernels, from made-up profiles."""

import jax.numpy as jnp
import pytest

from benchmarks import collectives
from benchmarks.collectives import Event

MS = 1e6  # in nanoseconds


def on_gpu(index, stream, name, start, end):
    return Event(f"/device:GPU:{index}", f"Stream #{stream}", name, start * MS, end * MS)


FIRST = [
    on_gpu(0, 7, "gemm", 0, 10),
    on_gpu(0, 7, "loop_add_fusion", 14, 20),
    on_gpu(0, 9, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)", 8, 13),
    on_gpu(0, 11, "ncclDevKernel_AllGather_RING_LL", 12, 16),
]
SECOND = [
    on_gpu(1, 7, "gemm", 0, 10),
    on_gpu(1, 9, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4, 8),
]
ELSEWHERE = [
    Event("/device:GPU:0", "XLA Ops", "ncclAllReduce", 0, 90 * MS),
    Event("/host:CPU", "Stream", "ncclGroupEnd", 0, 90 * MS),
]


def test_time_in_collectives_and_where_nothing_else_runs():
    found = collectives.summarise([*FIRST, *SECOND, *ELSEWHERE], devices=2)
    # From 8 to 16 and from 4 to 8; alone from 10 to 14.
    assert found == pytest.approx({"collective_ms": (8 + 4) / 2, "exposed_ms": 4 / 2})


def test_one_device_has_none():
    found = collectives.summarise([SECOND[0], *ELSEWHERE[1:]], devices=1)
    assert found == {"collective_ms": 0, "exposed_ms": 0}


@pytest.mark.parametrize(
    ("events", "devices", "message"),
    [
        (ELSEWHERE, 1, "kernels of 0 GPUs, not of 1"),
        (FIRST, 2, "kernels of 1 GPUs, not of 2"),
        ([FIRST[0], SECOND[0]], 2, "no kernel of NCCL"),
    ],
)
def test_a_profile_that_lacks_something_is_an_error(events, devices, message):
    with pytest.raises(ValueError, match=message):
        collectives.summarise(events, devices)


def test_the_profiler_is_understood():
    events = list(collectives.trace(lambda: jnp.ones(8) + 1))
    assert any(event.plane == "/host:CPU" for event in events)
    assert all(event.start <= event.end for event in events)
