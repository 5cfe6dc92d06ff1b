"""The compiled functions that advance and evaluate the state of a training run."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from twell_jax.config import Config
from twell_jax.data import marks
from twell_jax.ffn import FFNStats, Windows, order_by_use
from twell_jax.ffn.algorithms import LayerGradients
from twell_jax.ffn.stats import UNION_TOKENS
from twell_jax.models import QUANTISED_OPTIONS, sharding
from twell_jax.models.cross_entropy import mean_cross_entropy, token_cross_entropy
from twell_jax.models.transformer import graphdef
from twell_jax.train import neurons
from twell_jax.train.compile_ahead import CompileAhead
from twell_jax.train.gradient_plan import planned_every
from twell_jax.train.optimizer import learning_rate, make_optimizer, trained
from twell_jax.train.sparsity_control import update
from twell_jax.train.state import (
    StepMetrics,
    TrainState,
    abstract_state,
    init_state,
    over_micro_batches,
    with_rounded,
)

type ModelGradients = tuple[LayerGradients, ...]  # the argument `ffn_gradients` of `Transformer`


class Trainer:
    """The compiled functions of a run on one mesh. Each is compiled at its first call.

    Args:
      config: the run.
      document_end: id of the end-of-text token; used only with `data.mask_documents`.
      mesh: from `sharding.make_mesh`.

    Attributes:
      mesh: the devices.
      abstract_state: `TrainState` of shapes, dtypes and shardings, to restore a checkpoint to.
      abstract_batch: shape, dtype and sharding of a step's tokens, int32 [accumulation, sequences,
        context + 1], marked (`data.marks`) unless `data.format` is text.
      init: () -> state.
      reinitialise: state -> state, with the gates of dead neurons drawn anew. It donates the given
        state.
      sort_neurons: after a step at full width (`neurons.is_full_width`), state -> state, with the
        neurons first that were active in it or in the `skip_dead_every` steps up to it. It donates
        the given state.
      order_by_use: (state, `tiles` and `nnz` of the step that returned it) -> state, with the
        neurons of each layer in the order of `twell_jax.order_by_use`. It donates the given state.
      with_rounded: a state whose parameters come from elsewhere -> the state whose `rounded` are
        theirs. It donates the given state.
      step: `step_with(None)`.
      plans_every: steps from one `GradientPlan` to the next on this machine; 0 if there are none.

    Raises:
      ConfigError: the batch does not divide over the devices.
    """

    def __init__(self, config: Config, document_end: int, mesh: jax.sharding.Mesh) -> None:
        self.mesh = mesh
        self.plans_every = planned_every(config)
        self._config = config
        self._accumulation = config.accumulation_steps(mesh.size)
        self._optimizer = make_optimizer(config.optimizer, config.steps)
        self._learning_rate = learning_rate(config.optimizer, config.steps)
        self._has_marks = config.data.format != "text"
        self._document_end = document_end if config.data.mask_documents else None
        self._has_whole_tiles = config.micro_batch * config.model.context >= UNION_TOKENS
        self._graph = graphdef(config.model)
        if config.skip_dead_every:
            model = config.model.model_copy(update={"live_width": True})
            self._graph_with_live = graphdef(model)

        self.abstract_state = abstract_state(config, mesh)
        self.abstract_batch = jax.ShapeDtypeStruct(
            (
                self._accumulation,
                config.batch_sequences // self._accumulation,
                config.model.context + 1,
            ),
            jnp.int32,
            sharding=NamedSharding(mesh, P(None, *sharding.BATCH)),
        )
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        self._replicated = NamedSharding(mesh, P())

        self.init: Callable[[], TrainState] = jax.jit(
            partial(init_state, config), out_shardings=self._shardings
        )
        changing = partial(jax.jit, out_shardings=self._shardings, donate_argnums=0)
        self.reinitialise = changing(self._reinitialise)
        self.sort_neurons = changing(self._sort_neurons)
        self.order_by_use = changing(
            lambda state, *used: self._reordered(state, jax.vmap(order_by_use)(*used))
        )
        self.with_rounded = changing(partial(with_rounded, config=config.model))
        in_8_bits = config.model.matmul_dtype == "float8"
        self._compiler_options = QUANTISED_OPTIONS if in_8_bits else None
        self._sequence_ce = jax.jit(
            self._mean_by_sequence,
            in_shardings=(self._shardings.params, sharding.of_batch(mesh)),
            out_shardings=self._replicated,
            compiler_options=self._compiler_options,
        )
        self._steps: dict[ModelGradients | None, jax.stages.Wrapped] = {}
        self.steps = CompileAhead(self._compiled_step, self.step_with)
        self.step = self.step_with(None)

    def put_batch(self, tokens: np.ndarray) -> jax.Array:
        """Moves this process's tokens of a step, `[sequences, context + 1]`, to the devices."""
        tokens = tokens.reshape(self._accumulation, -1, tokens.shape[-1])
        return jax.make_array_from_process_local_data(self.abstract_batch.sharding, tokens)

    def step_with(self, ffn_gradients: ModelGradients | None) -> jax.stages.Wrapped:
        """The step whose layers have these gradients; None leaves them to the config.

        Returns:
          A jitted function (`TrainState`, tokens, `l1_coefficient` of this step) ->
          (`TrainState`, `StepMetrics`). It donates the given state. The coefficient is an operand,
          so that runs that differ only in it share the compiled program. If the state has a
          controller, its own coefficient is multiplied by this one.
        """
        if ffn_gradients not in self._steps:
            self._steps[ffn_gradients] = jax.jit(
                partial(self._step, ffn_gradients),
                in_shardings=(self._shardings, self.abstract_batch.sharding, self._replicated),
                out_shardings=(self._shardings, self._replicated),
                donate_argnums=0,
                compiler_options=self._compiler_options,
            )
        return self._steps[ffn_gradients]

    def _compiled_step(self, ffn_gradients: ModelGradients | None) -> jax.stages.Compiled:
        with jax.set_mesh(self.mesh):  # which is a thread's own
            step = self.step_with(ffn_gradients)
            return step.lower(self.abstract_state, self.abstract_batch, 0.0).compile()

    def evaluate(self, params: nnx.State, tokens: np.ndarray) -> float:
        """The mean cross-entropy of sequences `tokens: int32 [n, context + 1]`, nats per token.

        Tokens may be marked unless `data.format` is text; the mean is over those that count.
        """
        total, sequences = 0.0, self.abstract_batch.shape[1]
        for start in range(0, len(tokens), sequences):
            chunk = tokens[start : start + sequences]
            # A short last chunk is filled up with its own rows, which do not count.
            padded = np.resize(chunk, (sequences, *chunk.shape[1:]))
            batch = jax.make_array_from_callback(
                padded.shape, sharding.of_batch(self.mesh), padded.__getitem__
            )
            total += float(np.asarray(self._sequence_ce(params, batch))[: len(chunk)].sum())
        labels = tokens[:, 1:]
        return total / len(tokens) * (labels.size / int(np.sum(marks.counts(labels))))

    def compile_evaluation(self, tokens: np.ndarray) -> None:
        """Compiles what `evaluate` calls for such tokens."""
        shape = self.abstract_batch.shape[1], tokens.shape[1]
        placed = sharding.of_batch(self.mesh)
        batch = jax.ShapeDtypeStruct(shape, tokens.dtype, sharding=placed)
        with jax.set_mesh(self.mesh):  # which is a thread's own
            self._sequence_ce.lower(self.abstract_state.params, batch).compile()

    def compile_ordering(self, ffn_gradients: ModelGradients | None) -> None:
        """Compiles `order_by_use` for what a step with these gradients measures."""
        with jax.set_mesh(self.mesh):
            given = self.abstract_state, self.abstract_batch, 0.0
            _, measured = jax.eval_shape(self.step_with(ffn_gradients), *given)
            used = [
                jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=self._replicated)
                for of in (measured.tiles, measured.nnz)
            ]
            self.order_by_use.lower(self.abstract_state, *used).compile()

    def _mean_by_sequence(self, params: nnx.State, tokens: jax.Array) -> jax.Array:
        """The mean over all tokens of each sequence; marked ones have a cross-entropy of zero."""
        ce, _ = self._cross_entropy(token_cross_entropy, params, tokens)
        if self._has_marks:
            ce *= marks.counts(tokens[:, 1:])
        return jnp.mean(ce, axis=-1)

    def _cross_entropy(
        self,
        kind: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
        params: nnx.State,
        tokens: jax.Array,
        ffn_gradients: ModelGradients | None = None,
        windows: Windows | None = None,
        unroll: bool = False,
    ) -> tuple[jax.Array, FFNStats]:
        skips = self._config.skip_dead_every and "live" in params["blocks"]["mlp"]
        model = nnx.merge(self._graph_with_live if skips else self._graph, params)
        tokens = marks.ids(tokens) if self._has_marks else tokens
        x, stats = model.hidden(
            tokens[:, :-1],
            document_end=self._document_end,
            ffn_gradients=ffn_gradients,
            windows=windows,
            unroll=unroll,
        )
        x, unembedding = model.head(x)
        return kind(x, unembedding, tokens[:, 1:]), stats

    def _loss(
        self,
        params: nnx.State,
        tokens: jax.Array,
        l1_coefficient: jax.Array,
        l1_multipliers: jax.Array | None,
        windows: Windows | None,
        weight: jax.Array | None,
        ffn_gradients: ModelGradients | None,
    ) -> tuple[jax.Array, tuple[jax.Array, FFNStats]]:
        in_8_bits = self._config.model.matmul_dtype == "float8"
        kind = partial(mean_cross_entropy, in_8_bits=in_8_bits)
        if weight is not None:
            kind = partial(kind, weights=weight * marks.counts(tokens[:, 1:]))
        ce, stats = self._cross_entropy(
            kind, params, tokens, ffn_gradients, windows, unrolls_layers(self.mesh)
        )
        l1, share = stats.l1, self._config.lasso_share
        if stats.lasso is not None:
            l1 = (1 - share) * l1 + share * stats.lasso
        l1 = l1 if l1_multipliers is None else l1_multipliers * l1
        return ce + l1_coefficient * jnp.mean(l1), (ce, stats)

    def _gradients(
        self,
        ffn_gradients: ModelGradients | None,
        params: nnx.State,
        batch: jax.Array,
        l1_coefficient: jax.Array,
        l1_multipliers: jax.Array | None,
        windows: Windows | None,
        weight: jax.Array | None,
        matrices: nnx.State | None,
    ) -> tuple[nnx.State, tuple[jax.Array, FFNStats]]:
        """Sums a replica's gradients over its micro-batches; also returns the loss and stats."""

        def loss(changing: nnx.State, *operands: Any) -> Any:
            return self._loss(nnx.merge_state(params, changing), *operands)

        def accumulate(total: nnx.State, tokens: jax.Array) -> tuple[nnx.State, Any]:
            operands = tokens, l1_coefficient, l1_multipliers, windows, weight, ffn_gradients
            grads, aux = jax.grad(loss, has_aux=True)(changing, *operands)
            if unrolls_layers(self.mesh):
                grads = jax.tree.map(_one_after_the_other, grads)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, grads), aux

        changing = nnx.merge_state(trained(params), matrices or nnx.State({}))
        zeros = jax.tree.map(jnp.zeros_like, trained(params))
        grads, aux = jax.lax.scan(accumulate, zeros, batch)
        return jax.tree.map(lambda g: g[None], grads), aux

    def _step(
        self,
        ffn_gradients: ModelGradients | None,
        state: TrainState,
        batch: jax.Array,
        l1_coefficient: jax.Array,
    ) -> tuple[TrainState, StepMetrics]:
        control, skipping, multipliers = state.control, state.skipping, None
        if control is not None:
            l1_coefficient = l1_coefficient * jnp.exp(control.log_coefficient)
            multipliers = jnp.exp(control.log_multipliers)
        params, live = state.params, None
        if skipping is not None:
            live = neurons.live_in(skipping, state.step, self._config)
            params = neurons.with_live(params, live)
        windows = lasso_windows(self._config, state.step)
        # shard_map, because XLA would reduce gradients over "data" in every micro-batch.
        grads, (ce, stats) = jax.shard_map(
            partial(self._gradients, ffn_gradients),
            mesh=self.mesh,
            in_specs=(P(), P(None, "data"), P(), P(), P(), P(), P()),
            out_specs=P("data"),
            axis_names={"data"},
            check_vma=False,
        )(params, batch, l1_coefficient, multipliers, windows, self._weight(batch), state.rounded)
        grads = jax.tree.map(lambda g: jnp.mean(g, axis=0) / self._accumulation, grads)
        before = trained(state.params)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, before)
        params = nnx.merge_state(state.params, optax.apply_updates(before, updates))

        union = jnp.mean(stats.union, axis=0)
        stats = over_micro_batches(stats)
        idle = jnp.where(stats.fired, 0, state.idle_steps + 1)
        metrics = StepMetrics(
            ce=jnp.mean(ce),
            l1=jnp.mean(stats.l1),
            l1_coefficient=l1_coefficient,
            lr=self._learning_rate(state.step),
            grad_norm=optax.tree.norm(grads),
            nnz=stats.nnz,
            max_nnz=stats.max_nnz,
            dead=jnp.mean(idle >= self._config.dead_steps, axis=-1, dtype=jnp.float32),
            overflow=stats.overflow,
            mean_union=union if self._has_whole_tiles else None,
            l1_multipliers=multipliers,
            live=live,
            lasso=None if stats.lasso is None else jnp.mean(stats.lasso),
        )
        if self.plans_every:
            metrics = replace(metrics, union=stats.union, listed=stats.listed, tiles=stats.tiles)
        if skipping is not None:
            counted_in = stats.fired, state.idle_steps, state.step
            skipping = neurons.counted(skipping, *counted_in, self._config)
            metrics = replace(metrics, missed=skipping.missed)
        if control is not None:
            measured = stats.nnz, union, stats.l1
            control = update(control, *measured, state.step, self._config)
        state = TrainState(state.step + 1, params, opt_state, idle, control, skipping)
        return with_rounded(state, self._config.model), metrics

    def _weight(self, batch: jax.Array) -> jax.Array | None:
        """What the cross-entropy of each token that counts is multiplied by; None if all do.

        The mean over all tokens of a step then is that over those that count, which no micro-batch
        knows. Float32 []; if none counts, both are zero.
        """
        if not self._has_marks:
            return None
        labels = batch[..., 1:]
        return labels.size / jnp.maximum(jnp.sum(marks.counts(labels), dtype=jnp.float32), 1)

    def _reinitialise(self, state: TrainState) -> TrainState:
        dead = state.idle_steps >= self._config.dead_steps
        params, opt_state = neurons.reinitialise(
            state.params,
            state.opt_state,
            dead,
            key=jax.random.fold_in(jax.random.key(self._config.seed), state.step),
            scale=self._config.model.init_scale,
            optimizer=self._optimizer,
        )
        idle = jnp.where(dead, 0, state.idle_steps)
        state = replace(state, params=params, opt_state=opt_state, idle_steps=idle)
        return with_rounded(state, self._config.model)

    def _sort_neurons(self, state: TrainState) -> TrainState:
        assert state.skipping is not None
        order, live = neurons.live_first(state.idle_steps < self._config.skip_dead_every)
        return replace(self._reordered(state, order), skipping=replace(state.skipping, live=live))

    def _reordered(self, state: TrainState, order: jax.Array) -> TrainState:
        moments = state.opt_state, state.params, order, self._optimizer
        state = replace(
            state,
            params=neurons.reorder(state.params, order),
            opt_state=neurons.reorder_moments(*moments),
            idle_steps=jnp.take_along_axis(state.idle_steps, order, axis=1),
        )
        return with_rounded(state, self._config.model)


def _one_after_the_other(of_layers: jax.Array) -> jax.Array:
    """The same gradients, but those of matrices are copied to their places layer by layer.

    XLA does that beside the backward pass. It would concatenate unrolled layers where it adds their
    gradients or computes moments, element by element, which is slower than memory.
    """
    if of_layers.ndim < 3:
        return of_layers
    written = jax.lax.empty(of_layers.shape, of_layers.dtype)
    for layer in reversed(range(len(of_layers))):  # as they come
        written = jax.lax.optimization_barrier(written.at[layer].set(of_layers[layer]))
    return written


def unrolls_layers(mesh: jax.sharding.Mesh) -> bool:
    """Whether the layers of a step are unrolled on this mesh.

    On a GPU the copies of a loop over layers take 5 % of a step (docs/design/0015). On CPUs they
    take less than compiling does, and with FSDP a loop bounds how many layers are gathered at once.
    """
    return mesh.devices.flat[0].platform == "gpu" and mesh.shape["fsdp"] == 1


def lasso_windows(config: Config, step: jax.Array) -> Windows | None:
    """The windows of a step, whose grid begins at random; None without a `lasso_share`."""
    if not config.lasso_share:
        return None
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    key, _ = jax.random.split(key)  # not the key of `reinitialise`
    offset = jax.random.randint(key, (), 0, config.lasso_window)
    return Windows(offset, length=config.lasso_window)
