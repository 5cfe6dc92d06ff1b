"""Moves the L1 coefficient until as few neurons are active as wanted, for a token or for 256.

The controller is an integrator in the logarithm: it raises the coefficient while more neurons are
active than wanted, and lowers it while fewer are. The statistics answer late, so the controller
acts on where the present trend leads within a horizon; otherwise it would go on raising the
coefficient while a model already becomes sparser, and neurons that die do not come back. It moves
by a bounded amount in each step, whatever was measured, and between fixed bounds. What is clipped
is the coefficient itself, so nothing winds up behind a bound.

With a target for a token and another for 256 neighbours, U, the larger of the two errors counts:
that of the target which is further from being met or, once both are met, which is closer to being
missed. So neither is exceeded, and the coefficient is no larger than the stricter one needs.

It runs inside the compiled step, on arrays that are a part of the training state. Nothing has to be
read on the host, checkpoints keep the arrays to the bit, and it sees means over all devices.

Multipliers distribute the coefficient over the layers. Where training has settled, the last unit
of L1 that a layer gave up cost as much CE as its coefficient says. A layer whose activations have
the mean size s gives up s units of L1 for each non-zero, and so pays CE of s times its coefficient
for it. Coefficients in proportion to 1 / s let a non-zero cost the same CE in every layer, which is
how a mean over layers is reached at the least CE. This is the reweighted L1 of Candes, Wakin and
Boyd (2008), with one weight for each layer. A non-zero counts as the same time in every layer, also
on the way to a U.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from twell_jax.config import Config

LEAST, MOST = 1e-8, 10.0  # the coefficient's bounds; published and tried ones: 1e-5 to 1e-1
MOST_MULTIPLIER = 2.0  # and the least is its inverse
_FIRST = 1e-5  # coefficient to start with if the config has none
_OF_RUN = 1 / 10  # the horizon's share of a run,
_SHORTEST, _LONGEST = 10, 500  # and its bounds in steps
_GAIN = 5.0  # change of the coefficient's logarithm per horizon and unit of error,
_MOST_ERROR = 0.7  # which is the logarithm of what is expected over wanted, within this bound
_NOISE = 1 / 12  # share of the horizon over which the noise of batches is smoothed
_TREND = 1 / 4  # share of the horizon over which a trend is seen
_SPIKE = 2.0  # a step counts at most so many times as much or as little as those before
_DEAD = 0.05  # less than this share of the target counts as so much: 0 has no logarithm

# How a value and its target are told, by the key of the target.
_IN_WORDS: dict[str, Callable[[float, float], str]] = {
    "sparsity_target": lambda nnz, target: (
        f"{nnz:.1f} neurons are active for a token, not {target:g}"
    ),
    "union_target": lambda union, target: (
        f"256 neighbouring tokens use {union:.1%} of the neurons, not {target:.1%}"
    ),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparsityControl:
    """The controller's part of the training state.

    Attributes:
      log_coefficient: float32 [], the logarithm of the L1 coefficient.
      log_multipliers: float32 [layers], the logarithms of what it is multiplied by in each layer.
      measured: float32 [targets], what each target is for, mean over layers, smoothed over steps:
        mean non-zeros per token, U, or both in this order.
      earlier: float32 [targets], the same, smoothed once more: what it was some steps before.
    """

    log_coefficient: jax.Array
    log_multipliers: jax.Array
    measured: jax.Array
    earlier: jax.Array


def first_control(config: Config) -> SparsityControl | None:
    """The controller before the first step; None without a target."""
    if not config.targets:
        return None
    coefficient = min(max(config.l1_coefficient or _FIRST, LEAST), MOST)
    of_random_weights = {"sparsity_target": config.model.d_ff / 2, "union_target": 1.0}
    measured = jnp.array([of_random_weights[key] for key in config.targets], jnp.float32)
    multipliers = jnp.zeros(config.model.layers, jnp.float32)
    return SparsityControl(jnp.float32(math.log(coefficient)), multipliers, measured, measured)


def update(
    control: SparsityControl,
    nnz: jax.Array,
    union: jax.Array,
    l1: jax.Array,
    step: jax.Array,
    config: Config,
) -> SparsityControl:
    """The controller after a step.

    The coefficient is not raised, only lowered, until the warm-ups of the L1 coefficient and of the
    learning rate have ended. If a statistic is not finite or was not measured, nothing changes.

    Args:
      control: the controller before it.
      nnz: float32 [layers], mean non-zeros per token in the step.
      union: float32 [layers], U in the step (`StepMetrics.mean_union`).
      l1: float32 [layers], mean over tokens of sum_n |h_n| in the step.
      step: int32 [], number of steps taken before it.
      config: a run with a target.
    """
    horizon = min(max(_OF_RUN * config.steps, _SHORTEST), _LONGEST)
    targets = jnp.array(list(config.targets.values()), jnp.float32)
    of_layers = {"sparsity_target": nnz, "union_target": union}
    found = jnp.stack([of_layers[key] for key in config.targets])
    is_known = jnp.all(jnp.isfinite(found) & (found >= 0))  # `NOT_MEASURED` is below 0
    is_known &= jnp.all(jnp.isfinite(nnz) & jnp.isfinite(l1))
    now = jnp.mean(found, axis=1)
    now = jnp.clip(now, control.measured / _SPIKE, control.measured * _SPIKE)
    now = jnp.maximum(now, _DEAD * targets)
    smoothed = _moved(control.measured, now, _NOISE * horizon)
    earlier = _moved(control.earlier, smoothed, _TREND * horizon)
    # `earlier` is behind by _TREND of a horizon, and the trend is taken to go on for a whole one.
    expected = jnp.log(smoothed) + (jnp.log(smoothed) - jnp.log(earlier)) / _TREND
    error = jnp.max(jnp.clip(expected - jnp.log(targets), -_MOST_ERROR, _MOST_ERROR))
    error = jnp.where(step >= config.sparsity_control_start, error, jnp.minimum(error, 0))
    log_coefficient = control.log_coefficient + _GAIN / horizon * error
    following = SparsityControl(
        jnp.clip(log_coefficient, math.log(LEAST), math.log(MOST)),
        _moved(control.log_multipliers, _wanted_multipliers(nnz, l1), horizon),
        smoothed,
        earlier,
    )
    return jax.tree.map(lambda new, old: jnp.where(is_known, new, old), following, control)


def out_of_reach(
    config: Config, step: int, coefficient: float, measured: Mapping[str, float]
) -> str | None:
    """Why the run cannot reach a target, in a line; None as long as it may.

    Args:
      config: a run with a target.
      step: number of steps taken before the one that measured.
      coefficient: the L1 coefficient of the step.
      measured: by the key of each target, what it is for in the step, mean over layers.
    """
    targets = config.targets
    if step < config.sparsity_control_start:
        return None
    exceeded = [key for key in targets if measured[key] > targets[key]]
    # At the other bound, one target that is met keeps the others from it.
    too_few = [key for key in targets if measured[key] < targets[key]]
    if coefficient >= 0.999 * MOST and exceeded:
        key, bound, still, other = exceeded[0], MOST, "still", "larger"
    elif coefficient <= 1.001 * LEAST and len(too_few) == len(targets):
        key, bound, still, other = too_few[0], LEAST, "only", "smaller"
    else:
        return None
    return (
        f"{key}: the L1 coefficient has reached its bound {bound:g}, and {still} "
        f"{_IN_WORDS[key](measured[key], targets[key])}; start again with a {other} target"
    )


def _moved(average: jax.Array, value: jax.Array, steps: float) -> jax.Array:
    """The moving average over so many steps, after one more value."""
    return average + (value - average) / max(steps, 1)


def _wanted_multipliers(nnz: jax.Array, l1: jax.Array) -> jax.Array:
    """float32 [layers], logarithms; 0, for a multiplier of 1, where no neuron is active."""
    active = (nnz > 0) & (l1 > 0)
    size = jnp.log(jnp.where(active, l1, 1)) - jnp.log(jnp.where(active, nnz, 1))
    mean = jnp.sum(size) / jnp.maximum(jnp.sum(active), 1)
    most = math.log(MOST_MULTIPLIER)
    return jnp.where(active, jnp.clip(mean - size, -most, most), 0)
