"""The state of a training run, and what a step measures."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from twell_jax.config import Config, ModelConfig
from twell_jax.ffn import FFNStats
from twell_jax.models import sharding
from twell_jax.models.transformer import Transformer, matrices_in
from twell_jax.train.neurons import Skipping, first_skipping
from twell_jax.train.optimizer import make_optimizer, trained
from twell_jax.train.sparsity_control import SparsityControl, first_control


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes.

    Attributes:
      step: int32 [], number of steps taken.
      params: the model's parameters.
      opt_state: moments and counters of the optimizer.
      idle_steps: int32 [layers, d_ff], number of steps since each neuron was last active.
      control: of the L1 coefficient; None, which checkpoints do not hold, without a target.
      skipping: which neurons steps leave out; None likewise without `skip_dead_every`.
      rounded: the matrices of all layers in the compute dtype (`with_rounded`), which the
        optimizer writes with `params`; None if that rounds nothing. Checkpoints do not hold them.
    """

    step: jax.Array
    params: nnx.State
    opt_state: optax.OptState
    idle_steps: jax.Array
    control: SparsityControl | None = None
    skipping: Skipping | None = None
    rounded: nnx.State | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step, before its update; means are over all tokens of the step.

    Attributes:
      ce: float32 [], cross-entropy in nats per token.
      l1: float32 [], L1 norm of h, mean over tokens and layers.
      l1_coefficient: float32 [], the coefficient of l1 in the loss, without multipliers.
      lr: float32 [], the learning rate.
      grad_norm: float32 [], the global norm of the gradient before clipping.
      nnz: float32 [layers], mean number of non-zero activations per token.
      max_nnz: int32 [layers], largest number of non-zero activations of a token.
      dead: float32 [layers], fraction of neurons not active for `dead_window_tokens`.
      overflow: float32 [layers], share of the calls in which dense gradients replaced sparse ones,
        from 0 to 1; see `FFNStats`.
      mean_union: float32 [layers], U: the share of neurons that 256 neighbouring tokens use between
        them (`FFNStats.union`), mean over micro-batches and replicas. Each device has whole tiles,
        so any mesh has the same ones; only of the tokens that may leave a union, each device has
        a number of its own. None if a micro-batch on a device has fewer than 256 tokens.
      l1_multipliers: float32 [layers], what the coefficient is multiplied by in each layer; None
        without a target.
      union, listed: float32 [layers], the capacity that sparse gradients need (see `FFNStats`),
        the largest of all micro-batches and replicas; None without `sparse_gradients_every`, as
        dense layers would compute them for nothing.
      tiles: int32 [layers, d_ff], in how many tiles of tokens each neuron was active (see
        `FFNStats`); None likewise. It is for `Trainer.order_by_use`; the metrics that are logged do
        not have it.
      live, missed: int32 [layers], number of neurons that the step computed, and of those that were
        active in the last step at full width although skipped before it; None without
        `skip_dead_every`.
      lasso: float32 [], tile lasso of h, mean over layers; None without a `lasso_share`.
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
    mean_union: jax.Array | None
    l1_multipliers: jax.Array | None = None
    union: jax.Array | None = None
    listed: jax.Array | None = None
    tiles: jax.Array | None = None
    live: jax.Array | None = None
    missed: jax.Array | None = None
    lasso: jax.Array | None = None


def init_state(config: Config) -> TrainState:
    """The state before the first step, with parameters drawn from the seed."""
    params = nnx.state(Transformer(config.model, rngs=nnx.Rngs(config.seed)))
    opt_state = make_optimizer(config.optimizer, config.steps).init(trained(params))
    idle = jnp.zeros((config.model.layers, config.model.d_ff), jnp.int32)
    step = jnp.zeros((), jnp.int32)
    control, skipping = first_control(config), first_skipping(config)
    state = TrainState(step, params, opt_state, idle, control, skipping)
    return with_rounded(state, config.model)


def with_rounded(state: TrainState, config: ModelConfig) -> TrainState:
    """The state with the matrices of all layers in the compute dtype, as its parameters are now.

    Scales, biases and the embedding stay as they are.
    """
    if jnp.dtype(config.param_dtype).itemsize <= jnp.dtype(config.dtype).itemsize:
        return state  # nothing is rounded
    matrices = nnx.filter_state(trained(state.params), lambda _, leaf: leaf.ndim > 2)
    return replace(state, rounded=jax.tree.map(partial(matrices_in, config.dtype), matrices))


def abstract_state(config: Config, mesh: jax.sharding.Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, as `jax.ShapeDtypeStruct`s."""
    state = jax.eval_shape(partial(init_state, config))
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        state,
        sharding.of_params(state, mesh),
    )


def over_micro_batches(stats: FFNStats) -> FFNStats:
    """Combines stats over their leading axis, the micro-batches, which are equally large."""
    return FFNStats(
        l1=jnp.mean(stats.l1, axis=0),
        nnz=jnp.mean(stats.nnz, axis=0),
        max_nnz=jnp.max(stats.max_nnz, axis=0),
        fired=jnp.any(stats.fired, axis=0),
        overflow=jnp.mean(stats.overflow, axis=0),
        union=jnp.max(stats.union, axis=0),
        listed=jnp.max(stats.listed, axis=0),
        tiles=jnp.sum(stats.tiles, axis=0),
        lasso=None if stats.lasso is None else jnp.mean(stats.lasso, axis=0),
    )
