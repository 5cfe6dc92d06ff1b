"""Which thread block multiplies which rows of each matrix: so that all read about as many bytes."""

import heapq
from typing import NamedTuple

import numpy as np

ROWS = 16  # of a matrix, that are multiplied together


class Share(NamedTuple):
    """What each block has of one thing: consecutive numbers.

    Attributes:
      first, number: int32 `[blocks]`: where they begin, and how many they are.
    """

    first: np.ndarray
    number: np.ndarray

    @classmethod
    def of(cls, count: np.ndarray) -> "Share":
        """From how many each block has."""
        return cls((np.cumsum(count) - count).astype(np.int32), count.astype(np.int32))

    @property
    def most(self) -> int:
        """The most that a block has."""
        return int(self.number.max())


class Matrix(NamedTuple):
    """What is shared out of a matrix.

    Attributes:
      groups: of rows.
      size: bytes of a group.
      least: that each block has.
    """

    groups: int
    size: int
    least: int = 0


def part(which, parts: int, count) -> tuple:
    """Where a part of `count` things begins and ends, which are split as evenly as possible."""
    return which * count // parts, (which + 1) * count // parts


def shares(blocks: int, units: int, bytes_of_unit: int, matrices: list[Matrix]) -> list[Share]:
    """The units of attention of each block, and of each matrix its groups of `ROWS` rows.

    Units are spread evenly, and the groups so that each block has about as many bytes in all.

    Args:
      blocks: their number.
      units: of attention, a split of a group of heads of a sequence each.
      bytes_of_unit: keys and values that one reads.
      matrices: whose groups are shared out.

    Raises:
      ValueError: a matrix has fewer groups than blocks must have.
    """
    of_units = np.bincount(np.arange(units) % blocks, minlength=blocks)
    loads = (of_units * bytes_of_unit).astype(np.int64)
    found = [Share.of(of_units)]
    for groups, size, least in matrices:
        if groups < least * blocks:
            raise ValueError(f"{groups} groups of rows for {blocks} blocks")
        most = -(-groups // blocks) + 1
        count = np.full(blocks, least)
        loads += least * size
        heap = [(int(load), block) for block, load in enumerate(loads)]
        heapq.heapify(heap)
        for _ in range(groups - least * blocks):
            load, block = heapq.heappop(heap)
            count[block] += 1
            loads[block] += size
            if count[block] < most:
                heapq.heappush(heap, (load + size, block))
        found.append(Share.of(count))
    return found
