"""What a trainer compiles ahead of its calls is what the calls take."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.twell_jax.train.small import END, L1, draw, on_one_device, settings
from twell_jax.train import checkpoint, sample


@pytest.fixture(scope="module")
def tokens():
    return draw()


@pytest.fixture
def compilations():
    """The programs that XLA has compiled, or found in JAX's cache on the disk, so far."""
    found = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_what_is_compiled_ahead_is_not_compiled_at_its_call(tokens, compilations):
    run = settings(sparse_gradients_every=2)
    trainer = on_one_device(run)
    dense = (None,) * run.model.layers
    held_out, tokenizer = draw(3), SimpleNamespace(eot_id=END, decode=str)
    data = SimpleNamespace(held_out=held_out, held_out_bytes=9, tokenizer=tokenizer)
    write = sample.writer(run, data, trainer.abstract_state.params, trainer.mesh)
    with jax.set_mesh(trainer.mesh):
        step = trainer.steps.get(dense)
        state, measured = step(trainer.init(), trainer.put_batch(tokens), L1)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(trainer.compile_ordering, dense).result()
        thread.submit(trainer.compile_evaluation, held_out).result()
        thread.submit(write.compile).result()
        thread.submit(checkpoint.prepare_save, trainer.abstract_state, trainer.mesh).result()
    assert len(compilations) >= 4
    del compilations[:]
    with jax.set_mesh(trainer.mesh):
        trainer.evaluate(state.params, held_out)
        write(state.params)
        checkpoint.digests_of_arrays(vars(state))
        trainer.order_by_use(state, measured.tiles, measured.nnz)
    assert not compilations


@pytest.mark.slow
def test_a_step_that_is_prepared_is_the_step_at_its_call(tokens):
    trainer = on_one_device(settings())
    gradients = (None, "dense")
    trainer.steps.prepare(gradients)
    prepared = trainer.steps.get(gradients)
    assert isinstance(prepared, jax.stages.Compiled)
    with jax.set_mesh(trainer.mesh):
        operands = trainer.put_batch(tokens), L1
        steps = prepared, trainer.step_with(gradients)
        states, _ = zip(*(step(trainer.init(), *operands) for step in steps), strict=True)
    for ours, theirs in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(ours, theirs)
