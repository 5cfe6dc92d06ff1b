"""Plans which layers compute sparse gradients, from the statistics of earlier steps.

Sparse gradients win in layers whose pattern fits into their memory and lose in others. Whether it
fits depends on how many neurons neighbouring tokens share, and only a trial tells: a layer is tried
when few of its neurons fire. If it overflows, the next trial waits until markedly fewer fire.

Each plan has to be compiled, so plans should change rarely. A trial is announced one plan ahead:
the program can be compiled while the old one trains on, and the step at which it takes over does
not depend on how long that takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twell_jax.ffn import Gradients

_FIRST_SHARE = 1 / 16  # first limit, of the neurons; real patterns that fit have fewer non-zeros
_AFTER_OVERFLOW = 0.7  # next limit, of the non-zeros with which a layer overflowed


@dataclass(frozen=True)
class GradientPlan:
    """Dense or sparse gradients for each layer. Checkpoints hold its fields by name.

    Attributes:
      sparse: for each layer, whether its gradients are computed sparsely.
      limits: for each layer, the mean non-zeros per token below which it is tried. Limits never
        rise, so plans come to rest.
      announced: for each layer, whether the next plan makes it sparse; only of dense layers.
    """

    sparse: tuple[bool, ...]
    limits: tuple[float, ...]
    announced: tuple[bool, ...]

    @classmethod
    def dense(cls, layers: int, d_ff: int) -> "GradientPlan":
        """The plan that a run begins with: all layers dense."""
        return cls((False,) * layers, (_FIRST_SHARE * d_ff,) * layers, (False,) * layers)

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> "GradientPlan":
        """The inverse of `dataclasses.asdict`, also after a passage through JSON."""
        announced = saved.get("announced", [False] * len(saved["sparse"]))  # older ones lack it
        return cls(tuple(saved["sparse"]), tuple(saved["limits"]), tuple(announced))

    @property
    def ffn_gradients(self) -> tuple[Gradients | None, ...]:
        """The argument `ffn_gradients` of `Transformer`; None is the dense default."""
        return _arguments(self.sparse)

    @property
    def next_ffn_gradients(self) -> tuple[Gradients | None, ...]:
        """`ffn_gradients` of the next plan, unless a layer overflows before."""
        return _arguments([a or b for a, b in zip(self.sparse, self.announced, strict=True)])

    def revised(self, nnz: Sequence[float], overflow: Sequence[float]) -> "GradientPlan":
        """The next plan, from the statistics of a step that was computed with this one.

        Args:
          nnz: for each layer, the mean non-zeros per token.
          overflow: for each layer, the share of its calls that overflowed, from 0 to 1.
        """
        sparse, limits, announced = [], [], []
        rows = zip(self.sparse, self.limits, self.announced, nnz, overflow, strict=True)
        for was_sparse, limit, was_announced, non_zeros, overflowed in rows:
            if was_sparse and overflowed:
                limit = min(limit, _AFTER_OVERFLOW * non_zeros)
            sparse.append(was_announced or (was_sparse and not overflowed))
            limits.append(limit)
            announced.append(not was_sparse and not was_announced and non_zeros < limit)
        return GradientPlan(tuple(sparse), tuple(limits), tuple(announced))


def _arguments(sparse: Sequence[bool]) -> tuple[Gradients | None, ...]:
    return tuple("sparse" if is_sparse else None for is_sparse in sparse)
