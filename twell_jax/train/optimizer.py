"""Schedules and the optimizer of the training recipe (arXiv 2603.23198, section 5)."""

from functools import partial
from typing import Any

import jax
import optax
from flax import nnx

from twell_jax.config import Config, OptimizerConfig

_UNDECAYED = ("scale", "bias", "b_gate", "b_up", "b_down")  # parameters of norms, and biases


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then cosine decay, or a plateau with a linear decay at the end (WSD).

    If `steps` is less than the warm-up, the run ends within it.
    """
    rest = max(steps - config.warmup_steps, 1)
    warmup = optax.linear_schedule(0.0, config.lr, config.warmup_steps)
    if config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(config.lr, rest, config.final_lr_fraction)
        return optax.join_schedules([warmup, decay], [config.warmup_steps])
    decay_steps = min(round(steps * config.decay_fraction), rest)
    plateau = optax.constant_schedule(config.lr)
    decay = optax.linear_schedule(config.lr, config.lr * config.final_lr_fraction, decay_steps)
    start = config.warmup_steps + rest - decay_steps
    return optax.join_schedules([warmup, plateau, decay], [config.warmup_steps, start])


def moved_learning_rate(before: Config, now: Config, step: int) -> str | None:
    """In a line from what to what the learning rate moves where a run goes on with other `steps`.

    Args:
      before, now: its settings before and after.
      step: number of steps taken.

    Returns:
      The line; None if the learning rate stays.
    """
    old, new = (float(learning_rate(run.optimizer, run.steps)(step)) for run in (before, now))
    if old == new or step >= now.steps:
        return None
    return (
        f"steps: {before.steps} -> {now.steps}, so by its schedule the learning rate at step "
        f"{step} moves from {old:.3g} to {new:.3g}"
    )


def l1_coefficient(config: Config, step: int) -> float:
    """The L1 coefficient: 0 until step `l1_warmup[0]`, then rising until step `l1_warmup[1]`.

    It rises linearly, or in `l1_stages` stages of equal length by equal amounts; the last stage has
    the full coefficient. Stages are for dense models whose SiLU was just replaced (after ProSparse,
    arXiv 2402.13516). With a target it is the factor of the controller's coefficient
    that rises in this way, to 1.

    Args:
      config: the run.
      step: number of steps taken.
    """
    start, end = config.l1_warmup
    full = 1.0 if config.targets else config.l1_coefficient
    if step >= end:
        return full
    if stages := config.l1_stages:
        rises = [start + round(i * (end - start) / stages) for i in range(stages)]
        return full * sum(step >= rise for rise in rises) / stages
    return full * max(step - start, 0) / max(end - start, 1)


def trained(params: nnx.State) -> nnx.State:
    """The parameters that have gradients and moments: all but numbers of live neurons."""
    return nnx.filter_state(params, nnx.Param)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW on gradients clipped by global norm, without weight decay on norms and biases."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=partial(jax.tree_util.tree_map_with_path, _is_decayed),
        ),
    )


def _is_decayed(path: tuple[Any, ...], _: jax.Array) -> bool:
    return not any(getattr(key, "key", None) in _UNDECAYED for key in path)
