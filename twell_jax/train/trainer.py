"""The state of a training run and the compiled functions that advance and evaluate it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from twell_jax.config import Config
from twell_jax.ffn.api import FFNStats
from twell_jax.models import sharding
from twell_jax.models.transformer import Transformer, graphdef
from twell_jax.train.optimizer import learning_rate, make_optimizer
from twell_jax.train.reinit import reinitialise


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes.

    Attributes:
      step: int32 [], steps taken.
      params: the model's parameters.
      opt_state: moments and counters of the optimizer.
      idle_steps: int32 [layers, d_ff], steps since each neuron last fired.
    """

    step: jax.Array
    params: nnx.State
    opt_state: optax.OptState
    idle_steps: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """Measured in one step, before its update; means are over all tokens of the step.

    Attributes:
      ce, l1: float32 [], cross-entropy in nats per token and L1 of h (mean over tokens and layers).
      l1_coefficient, lr, grad_norm: float32 [].
      nnz, max_nnz, dead: [layers], mean and largest number of non-zero activations of a token, and
        the fraction of neurons that have not fired for `dead_window_tokens`.
      overflow: float32 [layers], how often sparse gradients were replaced by dense ones, from 0 to
        1; see `FFNStats`.
    """

    ce: jax.Array
    l1: jax.Array
    l1_coefficient: jax.Array
    lr: jax.Array
    grad_norm: jax.Array
    nnz: jax.Array
    max_nnz: jax.Array
    dead: jax.Array
    overflow: jax.Array


@dataclass(frozen=True)
class Trainer:
    """Compiled functions of a run on one mesh.

    Attributes:
      mesh: the devices.
      abstract_state: `TrainState` of shapes, dtypes and shardings (what a checkpoint restores to).
      abstract_batch: the tokens that `step` takes, int32 [accumulation, sequences, context + 1].
      init: () -> state.
      step: (state, tokens, L1 coefficient) -> state, metrics; the given state is consumed. What is
        compiled does not depend on the coefficient, so that runs which differ in it alone share it.
      step_with: for each layer whether its gradients are sparse (a tuple) -> such a step, which is
        compiled at its first call. `step` is that with None, which leaves it to the config.
      reinitialise: state -> state, with the gates of dead neurons drawn anew; the given state is
        consumed.
      evaluate: (params, int32 [n, context + 1]) -> mean held-out cross-entropy, nats per token.
    """

    mesh: jax.sharding.Mesh
    abstract_state: TrainState
    abstract_batch: jax.ShapeDtypeStruct
    init: Callable[[], TrainState]
    step: Callable[[TrainState, jax.Array, float], tuple[TrainState, StepMetrics]]
    step_with: Callable[[tuple[bool, ...] | None], Callable]
    reinitialise: Callable[[TrainState], TrainState]
    evaluate: Callable[[nnx.State, np.ndarray], float]

    def put_batch(self, tokens: np.ndarray) -> jax.Array:
        """This process's `[sequences, context + 1]` share of a step's tokens, onto the devices."""
        tokens = tokens.reshape(self.abstract_batch.shape[0], -1, tokens.shape[-1])
        return jax.make_array_from_process_local_data(self.abstract_batch.sharding, tokens)


def make_trainer(config: Config, document_end: int, mesh: jax.sharding.Mesh) -> Trainer:
    """Builds the functions of a run; nothing is computed yet.

    Args:
      config: the run.
      document_end: id of the end-of-text token (used if `data.mask_documents`).
      mesh: from `sharding.make_mesh`.

    Raises:
      ConfigError: if the batch does not divide over the devices.
    """
    accumulation = config.accumulation_steps(mesh.size)
    optimizer = make_optimizer(config.optimizer, config.steps)
    lr = learning_rate(config.optimizer, config.steps)
    dead_steps = -(-config.dead_window_tokens // config.batch_tokens)
    document_end = document_end if config.data.mask_documents else None
    graph = graphdef(config.model)

    def cross_entropy(params, tokens, implementations=None):
        model = nnx.merge(graph, params)
        logits, stats = model(
            tokens[:, :-1], document_end=document_end, ffn_implementations=implementations
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]), stats

    def loss(params, tokens, l1_coefficient, implementations):
        ce, stats = cross_entropy(params, tokens, implementations)
        ce = jnp.mean(ce)
        return ce + l1_coefficient * jnp.mean(stats.l1), (ce, stats)

    def gradients(implementations, params, batch, l1_coefficient):
        """One copy's sums over the micro-batches, and what the loss measured in each of them."""

        def accumulate(total, tokens):
            operands = params, tokens, l1_coefficient, implementations
            grads, aux = jax.grad(loss, has_aux=True)(*operands)
            return jax.tree.map(jnp.add, total, grads), aux

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, aux = jax.lax.scan(accumulate, zeros, batch)
        return jax.tree.map(lambda g: g[None], grads), aux

    def step(implementations, state, batch, l1_coefficient):
        # By hand over "data": XLA would reduce the gradients in every micro-batch.
        grads, (ce, stats) = jax.shard_map(
            partial(gradients, implementations),
            mesh=mesh,
            in_specs=(P(), P(None, "data"), P()),
            out_specs=P("data"),
            axis_names={"data"},
            check_vma=False,
        )(state.params, batch, l1_coefficient)
        grads = jax.tree.map(lambda g: jnp.mean(g, axis=0) / accumulation, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        stats = _over_micro_batches(stats)
        idle = jnp.where(stats.fired, 0, state.idle_steps + 1)
        metrics = StepMetrics(
            ce=jnp.mean(ce),
            l1=jnp.mean(stats.l1),
            l1_coefficient=l1_coefficient,
            lr=lr(state.step),
            grad_norm=optax.tree.norm(grads),
            nnz=stats.nnz,
            max_nnz=stats.max_nnz,
            dead=jnp.mean(idle >= dead_steps, axis=-1, dtype=jnp.float32),
            overflow=stats.overflow,
        )
        return TrainState(state.step + 1, params, opt_state, idle), metrics

    def revive(state):
        dead = state.idle_steps >= dead_steps
        params, opt_state = reinitialise(
            state.params,
            state.opt_state,
            dead,
            key=jax.random.fold_in(jax.random.key(config.seed), state.step),
            scale=config.model.init_scale,
            optimizer=optimizer,
        )
        return TrainState(state.step, params, opt_state, jnp.where(dead, 0, state.idle_steps))

    abstract = abstract_state(config, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    replicated = NamedSharding(mesh, P())
    sequences = config.batch_sequences // accumulation
    batch = jax.ShapeDtypeStruct(
        (accumulation, sequences, config.model.context + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, P(None, *sharding.BATCH)),
    )

    @cache
    def step_with(sparse):
        dense = config.model.ffn_implementation
        implementations = sparse and tuple("unions" if s else dense for s in sparse)
        return jax.jit(
            partial(step, implementations),
            in_shardings=(shardings, batch.sharding, replicated),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        )

    sequence_ce = jax.jit(
        lambda params, tokens: jnp.mean(cross_entropy(params, tokens)[0], axis=-1),
        in_shardings=(shardings.params, sharding.of_batch(mesh)),
        out_shardings=replicated,
    )

    def evaluate(params, tokens):
        total = 0.0
        for start in range(0, len(tokens), sequences):
            chunk = tokens[start : start + sequences]
            # A short last chunk repeats its rows; only the real ones count.
            padded = np.resize(chunk, (sequences, *chunk.shape[1:]))
            batch = jax.make_array_from_callback(
                padded.shape, sharding.of_batch(mesh), lambda index, padded=padded: padded[index]
            )
            total += float(np.sum(sequence_ce(params, batch)[: len(chunk)]))
        return total / len(tokens)

    return Trainer(
        mesh=mesh,
        abstract_state=abstract,
        abstract_batch=batch,
        init=jax.jit(partial(init_state, config), out_shardings=shardings),
        step=step_with(None),
        step_with=step_with,
        reinitialise=jax.jit(revive, out_shardings=shardings, donate_argnums=0),
        evaluate=evaluate,
    )


def init_state(config: Config) -> TrainState:
    """The state before the first step, drawn from the seed."""
    params = nnx.state(Transformer(config.model, rngs=nnx.Rngs(config.seed)))
    opt_state = make_optimizer(config.optimizer, config.steps).init(params)
    idle = jnp.zeros((config.model.layers, config.model.d_ff), jnp.int32)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, idle)


def abstract_state(config: Config, mesh: jax.sharding.Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, as `jax.ShapeDtypeStruct`s."""
    state = jax.eval_shape(partial(init_state, config))
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        state,
        sharding.of_params(state, mesh),
    )


def _over_micro_batches(stats: FFNStats) -> FFNStats:
    """Combines stats with a leading axis of equally large micro-batches."""
    return FFNStats(
        l1=jnp.mean(stats.l1, axis=0),
        nnz=jnp.mean(stats.nnz, axis=0),
        max_nnz=jnp.max(stats.max_nnz, axis=0),
        fired=jnp.any(stats.fired, axis=0),
        overflow=jnp.mean(stats.overflow, axis=0),
    )
