"""The counter of the job queue, which only a GPU can count with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.unions.pipeline import JobQueue

BLOCKS, TIMES = 200, 3
COUNT = BLOCKS * TIMES


def ask_for_all():
    """The numbers that blocks get, `[BLOCKS, TIMES]`, and the counter after them; twice."""

    def body(taken, numbers, *, jobs):
        queue, block = JobQueue(taken, jobs, posted=None, read=None), lax.axis_index("block")

        @pl.loop(0, TIMES)
        def _(i):
            numbers[block, i] = queue.answer(queue.ask(jnp.int32(COUNT)), 0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((BLOCKS, TIMES), jnp.int32),
        scratch_types=dict(jobs=plgpu.SMEM((3, 4), jnp.int32)),
        grid=(BLOCKS,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    taken = jax.new_ref(jnp.zeros(1, jnp.int32))
    runs = []
    for _ in range(2):
        numbers = kernel(taken)
        runs.append((numbers, taken[...]))
    return runs


def test_lowers_without_a_gpu(lower):
    assert lower(ask_for_all).count("@mosaic_gpu") == 2


@pytest.mark.gpu
def test_each_number_is_given_once_and_the_counter_is_0_again():
    for numbers, taken in jax.jit(ask_for_all)():
        np.testing.assert_array_equal(np.sort(numbers, axis=None), np.arange(COUNT))
        assert taken == 0
