"""A target of U in the training step: what is followed on a mesh is what one device would see."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests import pattern_shares, seeds
from tests.twell_jax.train.small import END, VOCAB, on_one_device, settings
from twell_jax.models import sharding
from twell_jax.models.transformer import graphdef
from twell_jax.train.sparsity_control import update
from twell_jax.train.trainer import Trainer

SEQUENCES, CONTEXT, D_FF, ALIVE = 8, 256, 640, np.array([400, 200])


def run_on_eight():
    """Two replicas on four devices each, which have a sequence each."""
    run = settings(
        model={"context": CONTEXT, "d_model": 16, "heads": 1, "d_ff": D_FF},
        batch_tokens=SEQUENCES * CONTEXT, micro_batch=1,
        union_target=0.5, sparsity_target=40.0, mesh={"fsdp": 4},
    )  # fmt: skip
    return run, Trainer(run, END, sharding.make_mesh((2, 4), jax.devices("cpu")[:8]))


@pytest.fixture(scope="module")
def tokens():
    """Sequences of one token, whose neighbours share neurons, of two tokens, and of any."""
    sizes = (1, 1, 1, 1, 2, 2, 4, VOCAB)
    kinds = [seeds.rng().choice(VOCAB, size, replace=False) for size in sizes]
    return np.array([seeds.rng().choice(kind, CONTEXT + 1) for kind in kinds], np.int32)


@pytest.mark.slow
def test_it_follows_the_mean_over_all_tiles_of_all_devices(tokens):
    run, trainer = run_on_eight()
    with jax.set_mesh(trainer.mesh):
        state = trainer.init()
        gate = state.params["blocks"]["mlp"]["w_gate"]
        alive = np.arange(D_FF)[None, :, None] < ALIVE[:, None, None]
        gate[...] = jax.device_put(gate[...] * alive, gate[...].sharding)
        params, control = jax.device_get((state.params, state.control))
        state, measured = trainer.step(state, trainer.put_batch(tokens), 1e-3)
    model = nnx.merge(graphdef(run.model), params)

    @jax.jit
    def of_tokens(tokens):
        _, stats = model.hidden(tokens, per_token_stats=True)
        return stats.fired, stats.l1

    fired, l1 = map(np.asarray, of_tokens(tokens[:, :-1]))
    fired = fired.reshape(2, -1, D_FF)
    unions = np.array([pattern_shares.shares(layer)[0] for layer in fired])
    assert 0.2 < unions[1] < 0.45 < unions[0] < 0.7  # of 640 neurons, and tiles differ
    np.testing.assert_allclose(measured.mean_union, unions, rtol=1e-2)
    assert measured.union is None and measured.listed is None
    statistics = fired.sum(2).mean(1), unions, l1.mean((1, 2))
    expected = update(control, *statistics, np.int32(0), run)
    for found, of_reference in zip(*map(jax.tree.leaves, (state.control, expected)), strict=True):
        np.testing.assert_allclose(found, of_reference, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("context", "measures"), [(256, True), (128, False)])
def test_without_a_target_it_is_of_256_tokens_or_not_measured(context, measures):
    run = settings(model={"context": context}, batch_tokens=2 * context, micro_batch=1)
    trainer = on_one_device(run)
    with jax.set_mesh(trainer.mesh):
        operands = trainer.abstract_state, trainer.abstract_batch, 0.0
        _, measured = jax.eval_shape(trainer.step, *operands)
    assert (measured.mean_union is not None) == measures
