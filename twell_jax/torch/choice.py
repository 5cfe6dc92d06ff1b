"""Who computes a block of torch's tensors, if the caller leaves the choice."""

from __future__ import annotations  # the documentation is built without torch

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import torch
from torch.utils.weak import WeakIdKeyDictionary

from twell_jax.ffn import explained
from twell_jax.ffn.dispatch import MANY_TOKENS

# Tokens of a block of 2048 x 5632 from which no sparse pattern of the records torch_block loses; of
# other widths as much work. With less, torch's dense block may have ended before the host
# has started the kernels: a backward has as many more, and JAX starts those that give statistics.
_Y_ALONE, _WITH_MORE = 4096, 8192
_AREA = 2048 * 5632

_DENSE_STEPS = 31  # of a block, after one in which kernels took longer; then they are tried again


class Recent:
    """What a block that is trained did in its last steps, and who computes the next.

    All calls with the same weights have the same answer, so that gradient checkpointing computes
    again what it computed before.

    Attributes:
      gained: whether kernels took less time than dense products would have, when they last ran.
    """

    def __init__(self) -> None:
        self.gained = True
        self._dense_steps, self._version = 0, -1

    def implementation(self, weight: torch.Tensor) -> Literal["torch", "mosaic"]:
        """Who computes a call with this weight, whose values change between steps."""
        if weight._version != self._version:
            self._version = weight._version
            self._dense_steps = max(self._dense_steps - 1, 0) if self.gained else _DENSE_STEPS
            self.gained = True
        return "torch" if self._dense_steps else "mosaic"


_recent = WeakIdKeyDictionary()


def recent(weight: torch.Tensor) -> Recent:
    """That of the block with this weight."""
    return _recent.setdefault(weight, Recent())


def implementation(
    device: str, dtype: str, tokens: int, width: int, neurons: int, gated: bool, y_alone: bool
) -> Literal["torch", "mosaic"]:
    """Kernels where they were measured to win, torch anywhere else.

    The records have the patterns of sparse models. If most neurons are active, kernels take longer.

    Args:
      device: the type of torch's device.
      dtype: that of all operands, as JAX calls it.
      tokens: their number.
      width, neurons: D and H.
      gated: whether there is a gate.
      y_alone: whether there will be no backward, and nobody asks for statistics.
    """
    enough = (_Y_ALONE if y_alone else _WITH_MORE) * _AREA
    if device != "cuda" or tokens < MANY_TOKENS or tokens * width * neurons < enough:
        return "torch"
    # As text, for torch.compile to take widths as constants even where it was told not to.
    return "mosaic" if _is_for_unions(f"{dtype} {width} {neurons} {gated}") else "torch"


@torch.compiler.assume_constant_result
def _is_for_unions(block: str) -> bool:
    return _algorithm(block) == "unions"


@functools.cache
def _algorithm(block: str) -> str:
    """The one that JAX's rules have for many tokens on this machine's device."""
    dtype, width, neurons, gated = block.split()
    shapes = ((n, int(width)) for n in (_WITH_MORE, int(neurons)))
    x, w = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
    _, selection = explained.select(x, w if gated == "True" else None, w, w)
    return selection.rule.algorithm
