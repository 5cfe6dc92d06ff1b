"""Leaves out, between two steps at full width, the neurons that did not fire up to the first.

A step at full width (`is_full_width`) finds which neurons fire. After it these come first in each
layer (`live_first`), together with those that fired in the steps before, back to as many as there
are between two such steps. The steps that follow take the others as never firing (`live` of
`sparse_ffn`), so that kernels skip them. The next step at full width counts those that fired there
nonetheless: they were missed.

What is skipped gets gradients of zero, and the optimizer treats it as it treats any such gradient:
moments decay, weights move by what is left of them and by weight decay. A neuron that truly does
not fire has the same gradients at full width, so missed firings are all that is approximated.

Sorting changes the order in which sums over neurons are made, so last bits.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from twell_jax.config import Config
from twell_jax.ffn import LiveWidth
from twell_jax.ffn.stats import UNION_NEURONS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Skipping:
    """The part of the training state that says which neurons are skipped.

    Attributes:
      live: int32 [layers], steps that are not at full width compute the neurons up to this one.
      missed: int32 [layers], number of neurons that fired in the last step at full width although
        the steps before it had skipped them.
    """

    live: jax.Array
    missed: jax.Array


def first_skipping(config: Config) -> Skipping | None:
    """Before the first step, which is at full width; None without `skip_dead_every`."""
    if not config.skip_dead_every:
        return None
    layers, d_ff = config.model.layers, config.model.d_ff
    return Skipping(jnp.full(layers, d_ff, jnp.int32), jnp.zeros(layers, jnp.int32))


def is_full_width[T: (int, jax.Array)](config: Config, step: T) -> T | bool:
    """Whether a step computes all neurons: every `skip_dead_every` steps, and with new gates.

    Args:
      config: a run with `skip_dead_every`.
      step: number of steps taken before it.
    """
    full = step % config.skip_dead_every == 0
    if config.reinit_every:
        full = full | (step % config.reinit_every == 0)
    return full


def live_in(skipping: Skipping, step: jax.Array, config: Config) -> jax.Array:
    """int32 [layers], number of neurons that a step computes, after `step` others."""
    return jnp.where(is_full_width(config, step), config.model.d_ff, skipping.live)


def with_live(params: nnx.State, live: jax.Array) -> nnx.State:
    """The parameters of a model whose `live_width` is false as those of one where it is true."""
    mlp = nnx.State({"live": LiveWidth(live)})
    return nnx.merge_state(params, nnx.State({"blocks": nnx.State({"mlp": mlp})}))


def counted(
    skipping: Skipping, fired: jax.Array, idle_steps: jax.Array, step: jax.Array, config: Config
) -> Skipping:
    """After a step: how many neurons the steps before missed, if it is one at full width.

    Args:
      skipping: before it.
      fired: bool [layers, d_ff], which neurons fired in it.
      idle_steps: int32 [layers, d_ff], before it.
      step: int32 [], number of steps taken before it.
      config: a run with `skip_dead_every`.
    """
    was_skipped = jnp.arange(fired.shape[1]) >= skipping.live[:, None]
    # All that are skipped have been idle; those whose gates were just drawn anew count from 0.
    missed = jnp.sum(fired & was_skipped & (idle_steps > 0), axis=1, dtype=jnp.int32)
    missed = jnp.where(is_full_width(config, step), missed, skipping.missed)
    return Skipping(skipping.live, missed)


def live_first(fired: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An order of neurons in which those that fired come first, and how many shall be computed.

    Args:
      fired: bool [layers, d_ff], which neurons have fired lately.

    Returns:
      int32 [layers, d_ff], the former index of each neuron; those that fired keep their order, and
        so do the others. int32 [layers], the number of those that fired, rounded up to chunks of
        128, as kernels compute whole chunks anyway.
    """
    order = jnp.argsort(~fired, axis=1, stable=True).astype(jnp.int32)
    chunks = -(-jnp.sum(fired, axis=1, dtype=jnp.int32) // UNION_NEURONS)
    return order, jnp.minimum(UNION_NEURONS * chunks, fired.shape[1])
