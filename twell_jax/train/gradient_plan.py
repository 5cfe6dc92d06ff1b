"""Which layers compute their gradients sparsely, chosen from what earlier steps measured.

Sparse gradients win where a layer's pattern fits into their room, which depends on how many neurons
neighbouring tokens share, and lose where it does not. Whether it fits, only trying tells: a layer
is tried when few of its neurons fire, and when it overflows, next at markedly fewer. Every choice
is a program of its own, to be compiled, so that choices should be rare.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_FIRST_SHARE = 1 / 16  # of the neurons: real patterns that fit have fewer non-zeros per token
_AFTER_OVERFLOW = 0.7  # of the non-zeros at which a layer did not fit


@dataclass(frozen=True)
class Choice:
    """The layers' choices between dense and sparse gradients.

    Attributes:
      sparse: for each layer, whether its gradients are computed sparsely.
      limits: for each layer, the mean non-zeros per token below which it is tried; never rising,
        so that the choices come to rest.
    """

    sparse: tuple[bool, ...]
    limits: tuple[float, ...]

    @classmethod
    def dense(cls, layers: int, d_ff: int) -> "Choice":
        """All layers dense, as a run begins."""
        return cls((False,) * layers, (_FIRST_SHARE * d_ff,) * layers)

    @classmethod
    def restore(cls, saved: dict[str, Any]) -> "Choice":
        """From what `dataclasses.asdict` made of a choice, by way of JSON."""
        return cls(tuple(saved["sparse"]), tuple(saved["limits"]))

    def after(self, nnz: Sequence[float], overflow: Sequence[float]) -> "Choice":
        """The next choice.

        Args:
          nnz: for each layer, the mean non-zeros per token in some step under this choice.
          overflow: for each layer, how often it overflowed in that step.
        """
        sparse, limits = [], []
        rows = zip(self.sparse, self.limits, nnz, overflow, strict=True)
        for was_sparse, limit, non_zeros, overflowed in rows:
            if was_sparse and overflowed:
                limit = min(limit, _AFTER_OVERFLOW * non_zeros)
            limits.append(limit)
            sparse.append(non_zeros < limit if not was_sparse else not overflowed)
        return Choice(tuple(sparse), tuple(limits))
