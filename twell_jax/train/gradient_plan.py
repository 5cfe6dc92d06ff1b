"""Plans each layer's gradients, dense or sparse, from what earlier steps measured.

A step measures the capacity that the sparse gradients of each layer need, also where they are dense
(`FFNStats.union` and `listed`). So a layer becomes sparse when its need is below the capacity, with
a margin, and nothing has to be tried. If it exceeds the capacity all the same, its gradients are
exact, and from the next plan on it has a wider margin.

Each plan has to be compiled, so plans should change rarely: all layers have the same capacity, and
keep it until it becomes too small. No step waits for that: what a plan announces is followed once
its program is ready, if measurements still ask for it then. The program with all layers sparse, to
which most runs come, is compiled from the start.
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
# steps.
_TOKENS, _FEWEST, _MOST = 10**7, 10, 100


def planned_every(config: Config) -> int:
    """Steps from one plan of a run to the next on this machine; 0 if there are none.

    "auto" plans wherever kernels that were measured serve sparse gradients and the configuration
    asks for no others.
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
    is_asked = model.ffn_implementation == "mosaic" or (kernels is not None and kernels.recorded)
    if not is_asked and not dispatch.was_measured_to_gain(case, model.dtype):
        return False
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
      announced: the capacities to change to once their program is compiled.
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
        capacities = (CAPACITY,) * len(self.capacities)
        return replace(self, capacities=capacities, announced=capacities)

    @property
    def sparse(self) -> tuple[bool, ...]:
        """For each layer, whether its gradients are sparse."""
        return tuple(capacity > 0 for capacity in self.capacities)

    @property
    def ffn_gradients(self) -> tuple[LayerGradients, ...]:
        """The argument `ffn_gradients` of `Transformer`; None is the dense default."""
        return tuple(capacity or None for capacity in self.capacities)

    @property
    def followed(self) -> "GradientPlan":
        """This plan once what it announces is done."""
        return replace(self, capacities=self.announced)

    def unexpected(self, overflow: Sequence[float]) -> list[float]:
        """What of `overflow` says something new, else 0: a layer that is already to become dense
        goes on to overflow until that is compiled."""
        of_layers = zip(overflow, self.announced, strict=True)
        return [share if capacity else 0.0 for share, capacity in of_layers]

    def revised(
        self, union: Sequence[float], listed: Sequence[float], overflow: Sequence[float]
    ) -> "GradientPlan":
        """This plan with what steps ask for that measured this since it was made.

        Args:
          union, listed: for each layer, as in `FFNStats`, the largest of the newest steps.
          overflow: for each layer, the largest share of a step's calls that overflowed, 0 to 1.
        """
        needs = [max(shares) for shares in zip(union, listed, strict=True)]
        overflow = self.unexpected(overflow)
        margins = tuple(
            margin * (_AFTER_OVERFLOW if overflowed else 1)
            for margin, overflowed in zip(self.margins, overflow, strict=True)
        )
        of_layers = zip(self.announced, needs, margins, overflow, strict=True)
        announced = tuple(_capacity(*of_layer) for of_layer in of_layers)
        return replace(self, announced=announced, margins=margins)


def _capacity(now: float, need: float, margin: float, overflowed: float) -> float:
    """The capacity for a layer for which `now` is announced; 0 if its need is too large."""
    stays = now and not overflowed
    return CAPACITY if need * (_CLOSE if stays else margin) <= CAPACITY else 0.0
