"""A barrier across thread blocks; those that are waited for must get onto the GPU meanwhile.

What one has stored to GMEM by ordinary stores before it arrives can be read behind the barrier by
each of them, also by TMA: the one fence between the two kinds of access, behind the wait, is
enough. One that waits for seconds traps, so that a fault ends the program with an error.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.decode import on_host

_MOST_POLLS = 1 << 24  # some seconds


@primitive
def arrive(arrivals_ref) -> None:
    """This block arrives: adds one to `arrivals_ref` (GMEM, int32 scalar)."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def step(_, arrivals_ref):
        ptx = mgpu.utils.inline_ptx
        mgpu.warpgroup_barrier()
        ptx(
            "@$1 red.release.gpu.global.add.u32 [$0], 1;",
            simt.gmem_address(arrivals_ref, const(0)),
            simt.is_first_thread(),
            has_side_effects=True,
        )

    step(arrivals_ref)


@arrive.in_jax
def _arrive(arrivals_ref):
    """Blocks are counted in the log "arrivals"; the reference gets 1, to show where they arrive."""
    arrivals = on_host.log("arrivals")
    arrivals_ref[...] = on_host.in_order(lambda: arrivals.note("arrived"))


@primitive
def wait(arrivals_ref, count: int) -> None:
    """Waits until `count` blocks have arrived."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def step(_, arrivals_ref):
        ptx = mgpu.utils.inline_ptx
        ptx(
            f"""{{.reg .pred more, stuck; .reg .b32 seen, polls;
                mov.b32 polls, 0;
                @!$1 bra done;
                poll: ld.acquire.gpu.global.b32 seen, [$0];
                add.u32 polls, polls, 1;
                setp.gt.u32 stuck, polls, {_MOST_POLLS};
                @stuck trap;
                setp.lt.u32 more, seen, {count};
                @more bra poll;
                done: }}""",
            simt.gmem_address(arrivals_ref, const(0)),
            simt.is_first_thread(),
            has_side_effects=True,
        )
        mgpu.warpgroup_barrier()
        ptx("fence.proxy.async.global;", has_side_effects=True)

    step(arrivals_ref)


@wait.in_jax
def _wait(arrivals_ref, count):
    """Also notes `count`, as far as there is one launch in which blocks arrive."""
    del arrivals_ref
    arrivals = on_host.log("arrivals")

    def wait():
        arrivals.note(count)
        arrivals.wait_until(lambda entries: entries.count("arrived") >= count)

    on_host.in_order(wait)
