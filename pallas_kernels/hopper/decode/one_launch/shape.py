"""The numbers that decide what a step does, and what a thread block needs for it."""

import dataclasses
import functools

import numpy as np

from pallas_kernels.hopper.decode.one_launch import plan
from pallas_kernels.hopper.decode.one_launch.attention import MOST_HEADS, key_tiles, keys_of_stage
from pallas_kernels.hopper.decode.one_launch.plan import ROWS, Matrix, Share
from pallas_kernels.hopper.decode.one_launch.products import BLOCK_WARPS, STAGE_WORDS, TOKENS, WORDS
from pallas_kernels.rectifiers import Rectifier

_SMEM = 226 * 1024  # bytes of a block, without barriers
_LISTED = 512  # open rows that are listed; of more, all rows are looked at
_ALIGNED = 1024  # bytes: where references to shared memory begin
STAGE_BYTES = ROWS * STAGE_WORDS * 4
DOWN_ROWS, DOWN_COLUMNS = 128, 64  # of a stage of `down`
UNITS, QKV, OUT, GATE, DOWN = range(5)  # of `Shape.shares`
MOST_TOKEN_WORDS = 128  # of a lane, so that it has registers for what else it needs
LEAST_SLOTS = 4  # of the ring: keys with their values, and as many on their way
_ACTIVATION_WORDS = 16384  # of a dense block's tokens, about what the parts of 32 tokens take
_MERGED = 4096  # words that a block takes of the other splits: 16 of each thread, a stage's memory


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a step.

    Attributes:
      blocks: thread blocks, one on each SM.
      layers, batch, capacity: of the model and of the cache.
      width, neurons: D and H.
      heads, kv_heads, size: of attention.
      gated: whether there is a gate projection.
      is_sparse: whether rows of neurons that are not open are left out.
      rectifier: the activation; None for SiLU.
      itemsizes: bytes of a number of query, key and value, of `out`, and of gate and up: 2, or 1
        for 8-bit floats.
      rotated: features of a head that have positions.
      window: tokens that a token attends to, itself included; None: all.
      residual_scale: what blocks add to the stream is multiplied with it.
      stored_bytes: of a number of the cache: 2, or 1 for 8-bit floats.
    """

    blocks: int
    layers: int
    batch: int
    capacity: int
    width: int
    neurons: int
    heads: int
    kv_heads: int
    size: int
    gated: bool
    is_sparse: bool
    rectifier: Rectifier | None
    itemsizes: tuple[int, int, int]
    rotated: int
    window: int | None
    residual_scale: float
    stored_bytes: int

    def itemsize(self, which: int) -> int:
        """Bytes of a number of the matrices `which`, QKV, OUT or GATE."""
        return self.itemsizes[which - 1]

    def words_of_row(self, which: int) -> int:
        """Words of a row of these matrices."""
        features = self.attended if which == OUT else self.width
        return features * self.itemsize(which) // 4

    def stages(self, which: int) -> int:
        """Stages of a group of rows of these matrices."""
        return -(-self.words_of_row(which) // STAGE_WORDS)

    @property
    def group(self) -> int:
        """Query heads of a unit of attention: those that share a key/value head, or an equal part
        of them, at most eight."""
        shared = self.heads // self.kv_heads
        return max(part for part in range(1, MOST_HEADS + 1) if shared % part == 0)

    @property
    def groups(self) -> int:
        """Into how many such groups the query heads fall."""
        return self.heads // self.group

    @property
    def attended(self) -> int:
        """Features of what attention returns for a token."""
        return self.heads * self.size

    @property
    def projected(self) -> int:
        """Features of query, key and value."""
        return (self.heads + 2 * self.kv_heads) * self.size

    @property
    def tiles(self) -> int:
        """Of tokens, which are multiplied together."""
        return -(-self.batch // TOKENS)

    @property
    def token_words(self) -> int:
        """Registers of a lane that hold tokens in 16 bits."""
        return self.tiles * WORDS * -(-max(self.width, self.attended) // (2 * STAGE_WORDS))

    @property
    def down_stages_at_once(self) -> int:
        """Stages of `down` whose activations are in shared memory together."""
        most = self.most_down_stages
        fit = (_ACTIVATION_WORDS // self.batch - 4) // (DOWN_ROWS // 2)
        return -(-most // -(-most // fit))

    @property
    def row_words(self) -> int:
        """Words of a token's activations in shared memory; lanes that read eight tokens read
        different banks."""
        return self.down_stages_at_once * DOWN_ROWS // 2 + 4

    @property
    def hidden_words(self) -> int:
        """Words of an open row's activations in shared memory, see `products.add_rows`."""
        return 4 * (self.tiles | 1)

    @property
    def _down_stages(self) -> int:
        return -(-self.neurons // DOWN_ROWS)

    @property
    def down_splits(self) -> int:
        """Into how many parts the rows of `down` are split."""
        return max(1, min(self._down_stages, self.blocks // (self.width // DOWN_COLUMNS)))

    def rows_of_split(self, split) -> tuple:
        """The first of the stages of a part, and how many it has."""
        first, end = plan.part(split, self.down_splits, self._down_stages)
        return first, end - first

    @property
    def most_down_stages(self) -> int:
        """The most stages that a part has."""
        return -(-self._down_stages // self.down_splits)

    @property
    def key_splits(self) -> int:
        """Into how many splits the stored keys of a group are split, for blocks that had no unit.

        With more than one, no block has more than one unit.
        """
        by_blocks = self.blocks // (self.batch * self.groups)
        by_memory = 1 + _MERGED // (self.group * (self.size + 2))
        return max(1, min(by_blocks, by_memory, -(-self.capacity // self.keys)))

    @property
    def merged_words(self) -> int:
        """Words that the splits of a group but the first post: values, tops and totals."""
        return (self.key_splits - 1) * self.group * (self.size + 2)

    @property
    def mask_warps(self) -> int:
        """Warps that say which of 16 rows are open, each for two tokens or more."""
        return min(-(-self.batch // 2), 4)

    @property
    def open_words(self) -> int:
        """Words that an open row's activations have."""
        return -(-self.batch // 2)

    @property
    def words(self) -> int:
        """The most words of an exchange."""
        tokens = self.tiles * TOKENS
        most = tokens * max(self.projected, self.attended, self.width) // 2
        most = max(most, self.batch * self.groups * self.merged_words)
        if self.is_sparse:
            most = max(most, self.neurons * self.open_words)
        else:
            parts = self.down_splits * self.batch * self.width
            most = max(most, tokens * self.neurons // 2, parts)
        return most + most % 2  # two are taken at once

    @functools.cached_property
    def shares(self) -> list[Share]:
        """Of attention's units; of the rows of query, key and value, of `out`, and of what is
        activated; and of the parts of `down` in a dense block."""
        activated = 2 if self.gated and not self.is_sparse else 1
        of_qkv, of_out, of_gate = (ROWS * size for size in self.itemsizes)
        matrices = [
            Matrix(self.projected // ROWS, of_qkv * self.width),
            Matrix(self.width // ROWS, of_out * self.attended),
            Matrix(self.neurons // ROWS, of_gate * self.width * activated, least=1),
        ]
        if not self.is_sparse:
            size = 2 * self.most_down_stages * DOWN_ROWS * DOWN_COLUMNS
            matrices.append(Matrix(self.down_splits * self.width // DOWN_COLUMNS, size))
        units = self.batch * self.groups * self.key_splits
        read = 2 * self.stored_bytes * self.capacity * self.size // self.key_splits
        return plan.shares(self.blocks, units, read, matrices)

    @property
    def table(self) -> np.ndarray:
        """The shares of each block, int32 `[blocks, 2 * shares + 2]`: where each begins, and how
        many it has; the number of tokens; and a column for the first sequence of the cache."""
        more = np.full(self.blocks, self.batch, np.int32), np.zeros(self.blocks, np.int32)
        return np.stack([*(part for share in self.shares for part in share), *more], axis=1)

    @property
    def most_gates(self) -> int:
        """The most groups of gates that a block has."""
        return self.shares[3].most

    @property
    def scratch_words(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """What a block keeps in shared memory besides the ring: shapes and types.

        "columns", or "x" in a dense block, lie where "parts" do: when they are there, nobody has or
        wants these.
        """
        columns = self.tiles * TOKENS
        states = key_tiles(self.size) + self.key_splits - 1  # and of the other splits
        found = {
            "parts": (
                ((2 if self.is_sparse else 4) * self.tiles, BLOCK_WARPS, ROWS * TOKENS),
                "float32",
            ),
            "squares": ((2 * columns, BLOCK_WARPS), "float32"),  # and sums for layer norms
            "q": ((self.group + 2, self.size // 2 + 4), "int32"),
            "values": ((states, self.group, self.size), "float32"),
            "tops": ((states, self.group, 2), "float32"),
        }
        if 1 in self.itemsizes:
            found["largest"] = (columns, BLOCK_WARPS), "int32"
            found["token_scales"] = (columns,), "float32"
        if not self.is_sparse:
            return found | {"x": ((self.batch, self.row_words), "int32")}
        return found | {
            "gates": ((self.most_gates, ROWS * columns), "float32"),
            "own_masks": ((self.most_gates * self.mask_warps,), "int32"),
            "own_rows": ((self.most_gates * ROWS,), "int32"),
            "counts": ((BLOCK_WARPS + 1,), "int32"),
            "masks": ((self.neurons // ROWS,), "int32"),
            "listed": ((_LISTED,), "int32"),
            "columns": ((256, 8), "int32"),
            "hidden": ((256, self.hidden_words), "int32"),
        }

    @property
    def slots(self) -> int:
        """Stages that the ring has room for."""
        words = {name: int(np.prod(shape)) for name, (shape, _) in self.scratch_words.items()}
        there = words.pop("columns" if self.is_sparse else "x")
        words["parts"] = max(words["parts"], there)
        sizes = (4 * size for size in words.values())
        taken = sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)
        return (_SMEM - taken) // STAGE_BYTES

    @property
    def keys(self) -> int:
        """Keys of a stage."""
        return keys_of_stage(self.size, self.stored_bytes)
