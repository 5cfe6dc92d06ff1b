"""Plans each layer's gradients, dense or sparse, from what earlier steps measured.

A step measures the capacity that the sparse gradients of each layer need, also where they are dense
(`FFNStats.union` and `listed`). So a layer becomes sparse when its need is below the capacity, with
a margin, and nothing has to be tried. If it exceeds the capacity all the same, its gradients are
exact, and from the next plan on it has a wider margin.

Each plan has to be compiled, so plans should change rarely: all layers have the same capacity, and
keep it until it becomes too small. A change is announced one plan ahead: its program is compiled
while the old one trains on, and the step at which it takes over does not depend on how long that
takes. Only the plan with all layers sparse, to which most runs come, takes over at once: it is
compiled from the start. What the newest step needs says before which plan is likely to be announced
next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from twell_jax.config import Config
from twell_jax.ffn import CannotServe, dispatch
from twell_jax.ffn.algorithms import (
    CAPACITY,
    MARGIN,
    Case,
    LayerGradients,
    Request,
    lasso_problem,
)

type Measured = tuple[jax.Array | np.ndarray, ...]

_CLOSE = 1.03  # times the need of a layer must fit, for them to stay so
_AFTER_OVERFLOW = 1.2  # times the margin
# Where the run decides, so many tokens lie between two plans, and at least and at most so many
# steps: time for the next program to be compiled.
_TOKENS, _FEWEST, _MOST = 10**7, 10, 100


def planned_every(config: Config) -> int:
    """Steps from one plan of a run to the next on this machine; 0 if there are none.

    "auto" plans wherever kernels serve sparse gradients and the configuration asks for no others.
    """
    every = config.sparse_gradients_every
    if every != "auto":
        return every
    if not _may_be_sparse(config):
        return 0
    return max(_FEWEST, min(_MOST, _TOKENS // config.batch_tokens))


def _may_be_sparse(config: Config) -> bool:
    model = config.model
    lasso = config.lasso_share and lasso_problem(True, config.data.mask_documents)
    if model.ffn_gradients is not None or lasso:
        return False
    weight = jax.ShapeDtypeStruct((model.d_ff, model.d_model), model.dtype)
    kernels, why = dispatch.back_end(weight)
    case = Case(
        tokens=config.micro_batch * model.context,
        width=model.d_model,
        neurons=model.d_ff,
        gated=model.gated,
        activation=model.ffn_activation,
        back_end=kernels.name if kernels else None,
        no_back_end=why,
    )
    try:
        dispatch.select(case, Request(model.ffn_implementation, gradients="sparse"))
    except CannotServe:
        return False
    return True


def largest_measured(before: Measured, of_step: Measured, step: int, every: int) -> Measured:
    """What the next plan follows from, after one more step.

    Args:
      before: `union`, `listed` and `overflow` (`StepMetrics`), the largest since the last plan.
      of_step: those of the step.
      step: its number, from 1 on.
      every: steps from one plan to the next.
    """
    *needs, overflow = map(jnp.maximum, before, of_step)
    # Needs fall at first, so that older ones say too much.
    union, listed = of_step[:2] if step % every == every // 2 else needs
    return union, listed, overflow


@dataclass(frozen=True)
class GradientPlan:
    """The gradients of each layer.

    Attributes:
      capacities: for each layer, the capacity of its sparse gradients, 0 if they are dense. Saved
        plans may have others than `CAPACITY`, which they keep until the next change.
      announced: the capacities of the next plan, unless they become too small, or all layers fit.
      margins: for each layer, its capacity over what it needs, at least, when it becomes sparse.
        They never fall, so plans come to rest.
    """

    capacities: tuple[float, ...]
    announced: tuple[float, ...]
    margins: tuple[float, ...]

    @classmethod
    def dense(cls, layers: int) -> "GradientPlan":
        """The plan that a run begins with: all layers dense."""
        return cls((0.0,) * layers, (0.0,) * layers, (MARGIN,) * layers)

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> "GradientPlan":
        """The inverse of `saved`, also after a passage through JSON."""
        return cls(*(tuple(saved[name]) for name in ("rooms", "announced", "margins")))

    def saved(self) -> dict[str, tuple[float, ...]]:
        """What checkpoints hold of the plan; they call the capacities "rooms"."""
        return {"rooms": self.capacities, "announced": self.announced, "margins": self.margins}

    @property
    def all_sparse(self) -> "GradientPlan":
        """This plan with all layers sparse."""
        return replace(self, capacities=(CAPACITY,) * len(self.capacities))

    @property
    def sparse(self) -> tuple[bool, ...]:
        """For each layer, whether its gradients are sparse."""
        return tuple(capacity > 0 for capacity in self.capacities)

    @property
    def ffn_gradients(self) -> tuple[LayerGradients, ...]:
        """The argument `ffn_gradients` of `Transformer`; None is the dense default."""
        return _arguments(self.capacities)

    @property
    def next_ffn_gradients(self) -> tuple[LayerGradients, ...]:
        """`ffn_gradients` of the announced plan."""
        return _arguments(self.announced)

    def likely(self, union: Sequence[float], listed: Sequence[float]) -> "GradientPlan":
        """The plan to come if needs, which the newest step measured, do not rise much again.

        Args:
          union, listed: as `revised` takes them.
        """
        union, listed = ([MARGIN * share for share in shares] for shares in (union, listed))
        settled = self
        for _ in range(2):  # one to announce it, one to follow
            settled = settled.revised(union, listed, [0.0] * len(self.capacities))
        return settled

    def revised(
        self, union: Sequence[float], listed: Sequence[float], overflow: Sequence[float]
    ) -> "GradientPlan":
        """The next plan, from what steps measured since this one was made.

        Args:
          union, listed: for each layer, as in `FFNStats`, the largest of the newest steps.
          overflow: for each layer, the largest share of a step's calls that overflowed, 0 to 1.
        """
        needs = [max(shares) for shares in zip(union, listed, strict=True)]
        margins = tuple(
            margin * (_AFTER_OVERFLOW if overflowed else 1)
            for margin, overflowed in zip(self.margins, overflow, strict=True)
        )
        announced_fits = all(
            capacity == 0 or need < capacity
            for capacity, need in zip(self.announced, needs, strict=True)
        )
        capacities = self.announced if announced_fits else self.capacities
        of_layers = zip(capacities, needs, margins, overflow, strict=True)
        wanted = tuple(_capacity(*of_layer) for of_layer in of_layers)
        if wanted == self.all_sparse.capacities:
            capacities = wanted
        return GradientPlan(capacities, wanted, margins)


def _capacity(now: float, need: float, margin: float, overflowed: float) -> float:
    """The capacity for a layer that has the capacity `now`; 0 if its need is too large."""
    stays = now and not overflowed
    return CAPACITY if need * (_CLOSE if stays else margin) <= CAPACITY else 0.0


def _arguments(capacities: Sequence[float]) -> tuple[LayerGradients, ...]:
    return tuple(capacity or None for capacity in capacities)
