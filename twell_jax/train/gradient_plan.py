"""Plans each layer's gradients, dense or sparse, from what earlier steps measured.

A step measures the room that the sparse gradients of each layer need, also where they are dense
(`FFNStats.union` and `listed`). So a layer becomes sparse when it fits into the room, with a
margin, and nothing has to be tried. If it overflows all the same, its gradients are exact, and from
the next plan on it has a wider margin.

Each plan has to be compiled, so plans should change rarely: all layers have the same room, and keep
it until it becomes too small. A change is announced one plan ahead, unless a layer overflows: the
program can be compiled while the old one trains on, and the step at which it takes over does not
depend on how long that takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from twell_jax.models.transformer import LayerGradients

# A layer then reserves no more memory than with dense gradients, and all patterns that fit with the
# margin take less time (docs/design/0028).
ROOM = 3 / 4
MARGIN = 1.1  # times the need of a layer must fit, for its gradients to become sparse
_CLOSE = 1.03  # times the need of a layer must fit, for them to stay so
_AFTER_OVERFLOW = 1.2  # times the margin


@dataclass(frozen=True)
class GradientPlan:
    """The gradients of each layer. Checkpoints hold its fields by name.

    Attributes:
      rooms: for each layer, the capacity of its sparse gradients; 0 if they are dense.
        Saved plans may have other rooms than `ROOM`, which they keep until the next change.
      announced: the rooms of the next plan, unless a layer overflows or they become too small.
      margins: for each layer, its room over what it needs, at least, when it becomes sparse. They
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
    def all_sparse(self) -> "GradientPlan":
        """This plan with all layers sparse."""
        return replace(self, rooms=(ROOM,) * len(self.rooms))

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
        wanted = tuple(_room(*of_layer) for of_layer in of_layers)
        if any(overflow):
            return GradientPlan(wanted, wanted, margins)
        return GradientPlan(rooms, wanted, margins)


def _room(now: float, need: float, margin: float, overflowed: float) -> float:
    """The room for a layer that has the room `now`; 0 if its need is too large."""
    stays = now and not overflowed
    return ROOM if need * (_CLOSE if stays else margin) <= ROOM else 0.0


def _arguments(rooms: Sequence[float]) -> tuple[LayerGradients, ...]:
    return tuple(room or None for room in rooms)
