"""The training step: the same on any mesh, with exact means, statistics and gradients."""

import dataclasses
import functools
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.errors import relative_error
from tests.twell_jax.train.small import D_FF, END, L1, VOCAB, draw, settings, trainer_on
from twell_jax.config import ConfigError
from twell_jax.data import marks
from twell_jax.ffn import FFNStats
from twell_jax.models import sharding
from twell_jax.models.transformer import graphdef
from twell_jax.train.optimizer import l1_coefficient
from twell_jax.train.sparsity_control import update
from twell_jax.train.state import init_state, over_micro_batches
from twell_jax.train.trainer import Trainer, unrolls_layers

REST = "overflow", "union", "listed", "tiles", "lasso"  # of `FFNStats`


@pytest.fixture(scope="module")
def batches():
    return [draw() for _ in range(3)]


def train(trainer, batches):
    """The state after `batches` and the metrics of each, as numpy arrays."""
    with jax.set_mesh(trainer.mesh):
        state, measured = trainer.init(), []
        for tokens in batches:
            state, metrics = trainer.step(state, trainer.put_batch(tokens), L1)
            found = {name: value for name, value in vars(metrics).items() if value is not None}
            measured.append(jax.device_get(found))
    return state, measured


def test_of_micro_batches_the_largest_needs_count_and_the_mean_of_the_rest():
    of_two = jnp.array([[1.0, 8.0], [3.0, 4.0]])  # of two layers
    stats = FFNStats(*[of_two] * 3, fired=of_two > 3, **dict.fromkeys(REST, of_two))
    found = jax.tree.map(np.ndarray.tolist, jax.device_get(over_micro_batches(stats)))
    mean, most = [2.0, 6.0], [3.0, 8.0]
    assert found == FFNStats(
        mean, mean, most, [False, True], overflow=mean, union=most, listed=most, tiles=[4.0, 12.0],
        lasso=mean,
    )  # fmt: skip


@pytest.fixture(scope="module")
def one_device(batches):
    return train(trainer_on(1), batches)


def assert_same_run(run, expected):
    (state, measured), (expected_state, expected_measured) = run, expected
    # A gate within rounding of zero may fall on either side of it, and change these by a jump.
    jumps = {"nnz": 0.02, "max_nnz": 1, "dead": 0.02, "grad_norm": 1e-3}
    for step, reference in zip(measured, expected_measured, strict=True):
        for name, value in reference.items():
            tolerance = {"rtol": 1e-5, "atol": jumps.get(name, 0)}
            np.testing.assert_allclose(step[name], value, **tolerance, err_msg=name)
    idle, expected_idle = np.asarray(state.idle_steps), np.asarray(expected_state.idle_steps)
    assert np.mean(idle != expected_idle) < 0.02
    assert int(state.step) == len(measured)


@pytest.mark.parametrize(
    ("devices", "fsdp"),
    [
        pytest.param(8, 1, id="data 8", marks=pytest.mark.slow),
        pytest.param(8, 4, id="data 2 x fsdp 4"),
    ],
)
def test_every_mesh_trains_the_same_model(batches, one_device, devices, fsdp):
    assert_same_run(train(trainer_on(devices, fsdp), batches), one_device)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_unrolled_layers_train_the_same_model_on_every_device(
    batches, one_device, monkeypatch, micro_batch
):
    monkeypatch.setattr("twell_jax.train.trainer.unrolls_layers", lambda mesh: True)
    run = settings(micro_batch=micro_batch)  # two to a step, or one
    mesh = sharding.make_mesh(run.mesh.shape(8), jax.devices("cpu")[:8])
    assert_same_run(train(Trainer(run, END, mesh), batches), one_device)


def test_layers_are_unrolled_on_gpus_that_gather_no_weights():
    def mesh(platform, fsdp):
        return SimpleNamespace(
            devices=np.array([SimpleNamespace(platform=platform)]), shape={"fsdp": fsdp}
        )

    assert unrolls_layers(mesh("gpu", 1))
    assert not unrolls_layers(mesh("gpu", 2)) and not unrolls_layers(mesh("cpu", 1))


@pytest.mark.parametrize("fsdp", [1, 4])
def test_gradients_are_reduced_over_data_once_a_step(fsdp):
    trainer = trainer_on(8, fsdp)
    assert trainer.abstract_batch.shape[0] == 2
    with jax.set_mesh(trainer.mesh):
        operands = trainer.abstract_state, trainer.abstract_batch, L1
        loops, entry = trainer.step.lower(*operands).compile().as_text().split("\nENTRY ")

    def reduced(text):
        """How many float32 elements all its all-reduces have."""
        shapes = "".join(re.findall(r"= (.*) all-reduce\(", text))
        dimensions = re.findall(r"f32\[([\d,]*)\]", shapes)
        return sum(math.prod(map(int, d.split(","))) if d else 1 for d in dimensions)

    parameters = sum(leaf.size for leaf in jax.tree.leaves(trainer.abstract_state.params))
    # Besides the gradients only a few numbers, such as the cross-entropy.
    assert 0 <= reduced(entry) - parameters / fsdp < 50
    assert (reduced(loops) == 0) == (fsdp == 1)  # within an FSDP group: in every micro-batch


@pytest.mark.parametrize("fsdp", [1, 4])
def test_attention_sees_each_devices_share(fsdp, monkeypatch):
    """XLA cannot partition cuDNN's, and refuses to also over axes of size 1."""
    attention, seen = jax.nn.dot_product_attention, []

    def spy(q, *operands, **options):
        seen.append((len(q), jax.sharding.get_abstract_mesh().auto_axes))
        return attention(q, *operands, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    trainer = trainer_on.__wrapped__(4, fsdp)
    with jax.set_mesh(trainer.mesh):
        trainer.step.trace(trainer.abstract_state, trainer.abstract_batch, L1)
    assert set(seen) == {(1, ())}


def test_layers_that_fall_back_cost_nothing():
    trainer = trainer_on(1)
    operands = trainer.abstract_state, trainer.abstract_batch, L1
    with jax.set_mesh(trainer.mesh):
        dense, fallen_back = (
            trainer.step_with(gradients).lower(*operands).as_text()
            for gradients in (None, (None,) * trainer.abstract_state.idle_steps.shape[0])
        )
    assert fallen_back == dense


def test_fsdp_splits_parameters_and_moments(batches):
    trainer = trainer_on(8, 4)
    state, _ = train(trainer, batches[:1])
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, trainer.abstract_state
    )
    matrices = [
        leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 1 and leaf.dtype == "float32"
    ]
    assert len(matrices) >= 3 * 8  # parameters and two moments
    for leaf in matrices:
        assert leaf.addressable_shards[0].data.size * 4 == leaf.size


def test_the_state_is_consumed_so_that_there_is_memory_for_one(batches):
    trainer = trainer_on(1)
    with jax.set_mesh(trainer.mesh):
        first = trainer.init()
        second, _ = trainer.step(first, trainer.put_batch(batches[0]), L1)
        trainer.reinitialise(second)
    for state in (first, second):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def reference_loss(params, batch, l1_coefficient, l1_multipliers=1.0, document_end=None):
    """CE and loss of a whole batch by the model alone, on one device, without any machinery."""
    model = nnx.merge(graphdef(settings().model), params)
    logits, stats = model(batch[:, :-1], document_end=document_end)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], axis=-1)
    l1 = (l1_multipliers * stats.l1).mean()
    return -picked.mean() + l1_coefficient * l1, (-picked.mean(), stats)


compiled_loss = jax.jit(reference_loss, static_argnames="document_end")
compiled_gradient = jax.jit(jax.grad(reference_loss, has_aux=True))


def test_metrics_are_those_of_the_batch_before_the_update(batches):
    trainer = trainer_on(1)
    with jax.set_mesh(trainer.mesh):
        params = trainer.init().params
    grads, (ce, stats) = compiled_gradient(params, batches[0], L1, jnp.ones(2))
    state, (measured,) = train(trainer, batches[:1])
    np.testing.assert_allclose(measured["ce"], ce, rtol=1e-5)
    np.testing.assert_allclose(measured["l1"], stats.l1.mean(), rtol=1e-5)
    np.testing.assert_allclose(measured["nnz"], stats.nnz, rtol=1e-5)
    np.testing.assert_array_equal(measured["max_nnz"], stats.max_nnz)
    norm = np.sqrt(sum(np.sum(np.asarray(leaf) ** 2) for leaf in jax.tree.leaves(grads)))
    np.testing.assert_allclose(measured["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose((measured["lr"], measured["l1_coefficient"]), (1e-2, L1))
    # and the gradient is that of the whole batch: the first moments are a tenth of it, clipped
    share = 0.1 * min(1, 1 / norm)
    first_moments = optax.tree.get(state.opt_state, "mu")
    for moment, grad in zip(*map(jax.tree.leaves, (first_moments, grads)), strict=True):
        assert relative_error(moment, share * np.asarray(grad)) < 1e-5


@pytest.mark.slow
def test_a_controller_weighs_the_layers_and_follows_their_means_over_all_devices(batches):
    trainer = trainer_on(8, sparsity_target=2.0)
    with jax.set_mesh(trainer.mesh):
        state = trainer.init()
        control = dataclasses.replace(
            state.control,
            log_coefficient=jnp.log(jnp.float32(L1)),
            log_multipliers=jnp.log(jnp.array([0.5, 1.5])),
        )
        state = jax.device_put(
            dataclasses.replace(state, control=control),
            jax.tree.map(lambda leaf: leaf.sharding, trainer.abstract_state),
        )
        before = jax.device_get((state.params, state.control))
        half = 0.5  # as during a warm-up
        state, measured = trainer.step(state, trainer.put_batch(batches[0]), half)
    params, control = before
    grads, (_, stats) = compiled_gradient(params, batches[0], half * L1, jnp.array([0.5, 1.5]))
    np.testing.assert_allclose(measured.l1_coefficient, half * L1, rtol=1e-5)
    np.testing.assert_allclose(measured.l1_multipliers, [0.5, 1.5], rtol=1e-5)
    norm = float(optax.tree.norm(grads))
    np.testing.assert_allclose(measured.grad_norm, norm, rtol=1e-5)
    step, run = jnp.int32(0), settings(sparsity_target=2.0)
    expected = update(control, stats.nnz, None, stats.l1, step, run)
    for found, of_reference in zip(*map(jax.tree.leaves, (state.control, expected)), strict=True):
        np.testing.assert_allclose(found, of_reference, rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("devices", "count"), [(1, 5), (1, 1), (8, 21), (8, 16)])
def test_held_out_loss_is_the_mean_over_sequences(devices, count):
    trainer, tokens = trainer_on(devices), draw(count)
    with jax.set_mesh(trainer.mesh):
        params = trainer.init().params
        found = trainer.evaluate(params, tokens)
    params = jax.device_get(params)
    one_by_one = [compiled_loss(params, row[None], 0.0)[0] for row in tokens]
    np.testing.assert_allclose(found, np.mean(one_by_one), rtol=1e-5)


@pytest.mark.slow
def test_the_loss_is_the_mean_over_the_tokens_of_answers_on_any_mesh():
    """Micro-batches and devices have unequal numbers of them."""
    ids = draw()
    counts = np.arange(ids.size).reshape(ids.shape) % 7 < np.arange(len(ids))[:, None] / 3
    tokens = marks.marked(ids, counts)
    run = settings(
        data={"source": "files", "paths": ["unused"], "format": "completion"}, micro_batch=1
    )
    mesh = sharding.make_mesh((2, 4), jax.devices("cpu")[:8])
    with jax.set_mesh(mesh):
        trainer = Trainer(run, END, mesh)
        params = trainer.init().params
        held_out_ce = trainer.evaluate(params, tokens[:5])
        params = jax.device_get(params)
        _, measured = trainer.step(trainer.init(), trainer.put_batch(tokens), 0.0)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        logits, _ = nnx.merge(graphdef(run.model), params)(ids[:, :-1])
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
        return jnp.sum(ce * counts[:, 1:]) / counts[:, 1:].sum(), ce

    (expected, ce), grads = loss(params)
    np.testing.assert_allclose(measured.ce, expected, rtol=1e-5)
    np.testing.assert_allclose(measured.grad_norm, optax.tree.norm(grads), rtol=1e-4)
    np.testing.assert_allclose(held_out_ce, ce[:5][counts[:5, 1:]].mean(), rtol=1e-5)


def test_documents_are_masked_if_asked_for():
    tokens = draw(2)
    tokens[:, 5] = END
    plain = trainer_on(1)
    with jax.set_mesh(plain.mesh):
        masked = Trainer(settings(data={"mask_documents": True}), END, plain.mesh)
        params = plain.init().params
        found, unmasked = (trainer.evaluate(params, tokens) for trainer in (masked, plain))
    expected, _ = compiled_loss(params, tokens, 0.0, document_end=END)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(found - unmasked) > 1e-4


def test_a_neuron_that_is_never_active_is_counted_as_dead_until_it_is_drawn_anew():
    trainer = trainer_on(1)
    with jax.set_mesh(trainer.mesh):
        state = trainer.init()
        gate = state.params["blocks"]["mlp"]["w_gate"]
        gate[...] = gate[...].at[1, 7].set(0.0)  # relu(0) = 0, with no gradient
        for step in (1, 2, 3):
            state, metrics = trainer.step(state, trainer.put_batch(draw()), L1)
            assert state.idle_steps[1, 7] == step
            # The window is two batches long.
            assert metrics.dead[1] >= (1 / D_FF if step >= 2 else 0)
            assert (metrics.dead[1] == 0) == (step < 2)
        assert np.median(state.idle_steps) == 0
        state, _ = trainer.step(trainer.reinitialise(state), trainer.put_batch(draw()), L1)
        assert state.idle_steps[1, 7] == 0


@pytest.mark.slow
def test_l1_makes_the_model_sparse():
    trainer = trainer_on(1)

    def train_longer(l1_coefficient):
        with jax.set_mesh(trainer.mesh):
            state, tokens = trainer.init(), trainer.put_batch(draw())
            for _ in range(50):
                state, metrics = trainer.step(state, tokens, l1_coefficient)
        return float(metrics.nnz.mean()), float(metrics.ce)

    (dense, dense_ce), (sparse, sparse_ce) = train_longer(L1), train_longer(0.3)
    assert sparse < 0.3 * dense
    assert max(dense_ce, sparse_ce) < 0.5 * np.log(VOCAB)


def test_runs_that_differ_in_l1_share_the_compiled_step():
    def lowered(**changes):
        run = settings(**changes)
        mesh = sharding.make_mesh((1, 1), jax.devices("cpu")[:1])
        with jax.set_mesh(mesh):
            trainer = Trainer(run, END, mesh)
            operands = trainer.abstract_state, trainer.abstract_batch, l1_coefficient(run, step=3)
            return trainer.step.lower(*operands).as_text()

    plain = lowered(l1_coefficient=0)
    assert lowered(l1_coefficient=0.3, l1_warmup=(2, 9)) == plain


def test_the_seed_decides_the_weights():
    first, second = (
        jax.jit(lambda run: jax.tree.leaves(init_state(run).params)[0], static_argnums=0)(run)
        for run in (settings(seed=0), settings(seed=1))
    )
    assert not np.array_equal(first, second)


def test_a_batch_that_does_not_divide_is_an_error():
    run = settings(micro_batch=3)
    mesh = sharding.make_mesh((1, 1), jax.devices("cpu")[:1])
    with pytest.raises(ConfigError, match=r"^micro_batch: 3 .* = 16$"):
        Trainer(run, END, mesh)


@pytest.mark.gpu
@pytest.mark.parametrize("fsdp", [1, 2])
def test_two_gpus_train_as_one(fsdp):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    losses, batch = [], draw()
    for devices in (1, 2):
        # In bfloat16, which cuDNN's attention needs.
        run = settings(mesh={"fsdp": min(devices, fsdp)}, model={"dtype": "bfloat16"})
        mesh = sharding.make_mesh(run.mesh.shape(devices), jax.devices()[:devices])
        trainer = Trainer(run, END, mesh)
        _, measured = train(trainer, [batch])
        losses.append(measured[0]["ce"])
    np.testing.assert_allclose(*losses, rtol=1e-3)
