import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import register_rows, scales
from pallas_kernels.hopper.unions import gathered_matmul, job_queue, row_copies


@pytest.fixture
def interpreted(monkeypatch, capsys):
    """`with interpreted():` runs kernels of `gathered_matmul` on the CPU and looks for races."""

    def gather_rows(source_ref, indices, limit, column, target_ref):
        n, width = target_ref.shape
        source = jnp.pad(source_ref[...], ((0, 0), (0, width)))
        rows = jax.lax.dynamic_slice_in_dim(source[indices], column, width, axis=1)
        target_ref[...] = jnp.where((jnp.arange(n) < limit)[:, None], rows, 0)

    def fetch_indices(indices_ref, target_ref, active):
        @pl.when(active)
        def _():
            target_ref[...] = indices_ref[...]

    questions = []  # for each kernel, the counts that it asked with

    def take(taken_ref, count):
        counter, counts = itertools.count(), []
        questions.append(counts)

        def answer(count):
            counts.append(int(count))
            return np.int32(next(counter) % count)

        return jax.experimental.io_callback(answer, jax.ShapeDtypeStruct((), jnp.int32), count)

    def read(ref):
        return ref[...]

    def gather_scales(scale_ref, indices_ref):
        return scale_ref[...].at[indices_ref[...]].get(mode="clip")

    @contextlib.contextmanager
    def run(detect_races=True):
        monkeypatch.setattr(row_copies, "gather_rows", gather_rows)
        monkeypatch.setattr(row_copies, "await_rows", lambda *, lag: plgpu.commit_smem())
        monkeypatch.setattr(row_copies, "load_indices", read)
        monkeypatch.setattr(row_copies, "fetch_indices", fetch_indices)
        monkeypatch.setattr(row_copies, "read_indices", read)
        monkeypatch.setattr(scales, "gather", gather_scales)
        monkeypatch.setattr(job_queue, "_take", take)
        monkeypatch.setattr(job_queue, "_broadcast_first", lambda value, scratch_ref: value)
        monkeypatch.setattr(gathered_matmul, "sm_count", lambda: 3)
        monkeypatch.setattr(plgpu, "griddepcontrol_launch_dependents", lambda: None)
        params = plgpu.InterpretGPUParams(detect_races=detect_races)
        with plgpu.force_gpu_interpret_mode(params):
            yield
        assert "RACE" not in capsys.readouterr().out
        for counts in questions:  # the counter is 0 again
            assert not counts or len(counts) % counts[0] == 0

    return run


@pytest.fixture
def rows_in_jax(monkeypatch):
    """What `gather` does with rows, in JAX, for the interpreter."""

    def load_row(ref, active):
        zeros = jnp.zeros(ref.shape, ref.dtype)
        row = jax.lax.cond(active, lambda: ref[...], lambda: zeros)
        return jnp.pad(row, (0, -row.size % 1024))

    def store_row(ref, row):
        ref[...] = row[: ref.shape[0]]

    def copy_row(source_ref, target_ref):
        target_ref[...] = source_ref[...]

    monkeypatch.setattr(register_rows, "copy_row", copy_row)
    monkeypatch.setattr(register_rows, "load_row", load_row)
    monkeypatch.setattr(register_rows, "store_row", store_row)
    monkeypatch.setattr(register_rows, "widen", lambda row: row.astype(jnp.float32))
    monkeypatch.setattr(register_rows, "sum_rows", lambda rows, _: [jnp.sum(row) for row in rows])
