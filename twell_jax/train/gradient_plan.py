"""Plans each layer's gradients, dense or sparse with one of a few rooms, from what steps measured.

A step measures the room that the sparse gradients of each layer need, also where they are dense
(`FFNStats.union` and `listed`). So a layer becomes sparse when it fits into a room, with a margin,
and nothing has to be tried. If it overflows all the same, its gradients are exact, and from the
next plan on it has a wider margin.

Each plan has to be compiled, so plans should change rarely. A layer keeps its room until it becomes
too small, or until the plan as a whole would shrink markedly. A change is announced one plan ahead,
unless a layer overflows: the program can be compiled while the old one trains on, and the step at
which it takes over does not depend on how long that takes. Neighbouring layers with the same room
run in one loop, which is compiled once; the plan keeps the number of loops small.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from twell_jax.models.transformer import LayerGradients

# With the last one a layer reserves no more memory than with dense gradients, and all patterns that
# fit into it with the margin take less time (docs/design/0028).
ROOMS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
MARGIN = 1.1  # times the need of a layer, for the room that it gets first
_CLOSE = 1.03  # times the need of a layer, for the room that it may keep
_AFTER_OVERFLOW = 1.2  # times the margin
_SHRINK = 2 / 3  # the rooms of all layers shrink if their sum falls to this share
_MOST_LOOPS = 4  # as far as neighbouring layers can be merged by giving some of them more room


@dataclass(frozen=True)
class GradientPlan:
    """The gradients of each layer. Checkpoints hold its fields by name.

    Attributes:
      rooms: for each layer, the `gradient_capacity` of its sparse gradients; 0 if they are dense.
      announced: the rooms of the next plan, unless a layer overflows or they become too small.
      margins: for each layer, its room over what it needs, at least, when the room is chosen. They
        never fall, so plans come to rest.
    """

    rooms: tuple[float, ...]
    announced: tuple[float, ...]
    margins: tuple[float, ...]

    @classmethod
    def dense(cls, layers: int) -> "GradientPlan":
        """The plan that a run begins with: all layers dense."""
        return cls((0.0,) * layers, (0.0,) * layers, (MARGIN,) * layers)

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> "GradientPlan":
        """The inverse of `dataclasses.asdict`, also after a passage through JSON."""
        return cls(**{name: tuple(of_layers) for name, of_layers in saved.items()})

    @property
    def sparse(self) -> tuple[bool, ...]:
        """For each layer, whether its gradients are sparse."""
        return tuple(room > 0 for room in self.rooms)

    @property
    def ffn_gradients(self) -> tuple[LayerGradients, ...]:
        """The argument `ffn_gradients` of `Transformer`; None is the dense default."""
        return _arguments(self.rooms)

    @property
    def next_ffn_gradients(self) -> tuple[LayerGradients, ...]:
        """`ffn_gradients` of the announced plan."""
        return _arguments(self.announced)

    def revised(
        self, union: Sequence[float], listed: Sequence[float], overflow: Sequence[float]
    ) -> "GradientPlan":
        """The next plan, from the largest of what steps measured since this one was made.

        Args:
          union, listed: for each layer, as in `FFNStats`.
          overflow: for each layer, the share of a step's calls that overflowed, from 0 to 1.
        """
        needs = [max(shares) for shares in zip(union, listed, strict=True)]
        margins = tuple(
            margin * (_AFTER_OVERFLOW if overflowed else 1)
            for margin, overflowed in zip(self.margins, overflow, strict=True)
        )
        announced_fits = all(
            room == 0 or need < room for room, need in zip(self.announced, needs, strict=True)
        )
        rooms = self.announced if announced_fits else self.rooms
        of_layers = zip(rooms, needs, margins, overflow, strict=True)
        wanted = _in_few_loops([_room(*of_layer) for of_layer in of_layers])
        if any(overflow):
            return GradientPlan(wanted, wanted, margins)
        return GradientPlan(rooms, wanted if _pays(rooms, wanted) else rooms, margins)


def _room(now: float, need: float, margin: float, overflowed: float) -> float:
    """The room for a layer that has the room `now`; 0 if none is large enough."""
    to_keep = margin if overflowed else _CLOSE
    return min(
        (room for room in ROOMS if room >= need * (to_keep if room == now else margin)), default=0.0
    )


def _pays(rooms: Sequence[float], wanted: Sequence[float]) -> bool:
    """Whether another plan is worth a compilation."""
    pairs = list(zip(rooms, wanted, strict=True))
    needed = any(now < then or (now and not then) for now, then in pairs)
    return needed or (any(rooms) and sum(wanted) <= _SHRINK * sum(rooms))


def _in_few_loops(rooms: Sequence[float]) -> tuple[float, ...]:
    """`rooms`, some of them larger, so that few neighbours differ; dense layers stay dense."""
    runs = [(room, len(list(equal))) for room, equal in groupby(rooms)]
    while len(runs) > _MOST_LOOPS:
        added = [  # room, by merging a run with the next one; inf if one of them is dense
            abs(a - b) * (a_layers if a < b else b_layers) if a and b else math.inf
            for (a, a_layers), (b, b_layers) in pairwise(runs)
        ]
        least = min(added)
        if least == math.inf:
            break
        i = added.index(least)
        (a, a_layers), (b, b_layers) = runs[i : i + 2]
        runs[i : i + 2] = [(max(a, b), a_layers + b_layers)]
    return tuple(room for room, layers in runs for _ in range(layers))


def _arguments(rooms: Sequence[float]) -> tuple[LayerGradients, ...]:
    return tuple(room or None for room in rooms)
