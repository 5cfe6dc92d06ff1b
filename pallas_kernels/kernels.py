"""What a back end offers: protocols for the feed-forward block, for decoding, and for training.

A back end is a package that has each of these functions, such as `pallas_kernels.hopper`; its
`__init__` imports them, when the first is asked for. `pallas_kernels.reference` says in pure JAX
what each computes, the docstrings in `hopper` say it in words, with shapes. mypy compares both with
the protocols: types of `hopper`, names of arguments of the reference, which leaves the types to
these. tests/conformance runs the same cases on all back ends.
"""

import importlib
from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax.typing import DTypeLike

from pallas_kernels.layers import Layers
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.stream import MAX_TOKENS as MAX_FEW_TOKENS
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.layouts.tile_union import Plan
from pallas_kernels.quantised import Cache, Operand, Quantised, Tokens
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights

__all__ = [
    "AMPERE", "HOPPER", "MAX_FEW_TOKENS", "MMA", "REFERENCE", "BlockKernels", "DecodeKernels",
    "Kernels",
]  # fmt: skip

type Array = jax.Array


class BlockKernels(Protocol):
    """The kernels of the feed-forward block.

    Attributes:
      name: shown to people.
      recorded: whether records say where they gain. If not, they serve callers who ask for kernels,
        and blocks that were measured on the card.
    """

    name: str
    recorded: bool

    def __hash__(self) -> int:
        """They are arguments of functions that are cached."""

    def unsupported(self, w: Array | jax.ShapeDtypeStruct) -> str | None:
        """Why the back end cannot serve a block with a weight `[H, D]` here; None if it can."""

    def no_8_bits(self) -> str | None:
        """Why the back end, which serves here, multiplies no 8-bit floats; None if it does."""

    def few_tokens_ffn(
        self, x: Array, weights: Weights, rectifier: Rectifier = RELU
    ) -> tuple[Array, Array, Array, Array]:
        """The whole block for up to 64 tokens: y, nnz `[M]`, l1 `[M]`, fired `[H]`."""

    def dense_block(
        self, x: Array, weights: Weights, rectifier: Rectifier = RELU
    ) -> tuple[Array, Array]:
        """The whole block, densely, for a prompt: y, h."""

    def dense_rows(
        self, heavy: HeavyRows, weights: Weights, rectifier: Rectifier = RELU, keep: int = 0
    ) -> tuple[Array, Array, Array, Array | None]:
        """The dense block for the rows on a list: their y, l1, fired, what a backward needs."""

    def place_rows(
        self,
        count: Array,
        rows: Array,
        y_rows: Array,
        y_ref: jax.Ref,
        residual: Array | None = None,
    ) -> None:
        """Puts these rows into y, in place; with a residual, what they add to its rows."""

    def round_tokens(self, x: Array) -> Quantised:
        """Tokens in 8 bits, for products with `Quantised` weights."""

    def gate_pack(
        self,
        x: Operand,
        w_gate: Operand,
        rectifier: Rectifier = RELU,
        *,
        dtype: DTypeLike | None = None,
    ) -> Array:
        """The gate projection, packed in TwELL (`layouts.twell`)."""

    def fused_ffn(
        self,
        x: Array | Tokens,
        packed: Array,
        w_up: Operand | None,
        w_down: Array,
        rectifier: Rectifier = RELU,
    ) -> tuple[Array, Array, Array, HeavyRows]:
        """Up and down projection for the entries of a TwELL gate: y, nnz, l1, heavy rows."""

    def gate_union(
        self,
        x: Operand,
        w_gate: Operand,
        rectifier: Rectifier = RELU,
        live: Array | None = None,
        *,
        dtype: DTypeLike | None = None,
    ) -> tuple[Array, Array, Array]:
        """The gate projection of the live neurons as tile unions: gate, masks, counts."""

    def union_plan(
        self,
        x: Array | Tokens,
        gate_ref: jax.Ref,
        masks: Array,
        counts: Array,
        *,
        max_items: int | None = None,
        max_heavy: int | None = None,
    ) -> tuple[Plan, Array, HeavyRows, Array]:
        """Which neurons each row tile computes: plan, nnz, heavy rows, `tile_union.needs_of`."""

    def union_up(
        self,
        x: Operand,
        gate: Array,
        w_up: Operand | None,
        plan: Plan,
        rectifier: Rectifier = RELU,
        *,
        with_gate: bool = False,
    ) -> tuple[Array, Array]:
        """The up projection on the unions: chunks of h, with or without the gates; l1."""

    def union_down(
        self,
        h: Array,
        weights: tuple[Array, ...],
        plan: Plan,
        m: int,
        residual: Array | None = None,
    ) -> Array:
        """Sums chunks times gathered weights over the unions, adds a residual: y, or dx."""

    def neuron_lists(self, counts: Array, m: int, capacity: int) -> tuple[NeuronLists, Array]:
        """The tokens that use each group of neurons, and how long these lists would be in full."""

    def hidden_grads(
        self,
        dy: Array,
        w_down: Array,
        h_ref: jax.Ref | Array,
        l1_grad: Array,
        plan: Plan,
        lists: NeuronLists | None,
        rectifier: Rectifier = RELU,
        extra: Array | None = None,
        into: jax.Ref | None = None,
    ) -> tuple[Array, ...]:
        """The gradients behind h, there or in place; h and these on the neuron lists, if there are
        any."""

    def weight_grads(
        self, values: tuple[Array, ...], x: Array, lists: NeuronLists
    ) -> tuple[Array, ...]:
        """The gradients for weights from neuron lists."""


class DecodeKernels(Protocol):
    """The kernels of a decoding step, for up to 64 tokens (`layouts.stream`).

    Attributes:
      decodes: whether there are any; if not, XLA decodes.
    """

    decodes: bool

    def has_room(
        self,
        *,
        batch: int,
        capacity: int,
        width: int,
        neurons: int,
        heads: int,
        kv_heads: int,
        size: int,
        gated: bool,
        is_sparse: bool,
        in_8_bits: tuple[bool, bool, bool, bool],
    ) -> bool:
        """Whether a launch that computes all layers for so many sequences has enough memory."""

    def decode_layers(
        self,
        stream: Stream,
        layers: Layers,
        k_cache: Cache,
        v_cache: Cache,
        lengths: Array,
        rope: tuple[Array, Array],
        *,
        heads: int,
        kv_heads: int,
        eps: float,
        rectifier: Rectifier | None,
        is_sparse: bool,
        launches: int,
        window: int | None = None,
        residual_scale: float = 1.0,
    ) -> Stream:
        """All layers for one new token of each sequence; the cache gets its keys and values.

        A launch computes all layers for a part of the sequences, which are a multiple of eight but
        for the last ones; with `launches=0`, each layer has launches for all sequences.

        A token attends to `window` tokens, itself included, or to all. What a block adds to the
        stream is multiplied with `residual_scale`.
        """

    def project(
        self,
        stream: Stream,
        weights: tuple[Operand, ...],
        layer: Array,
        *,
        k_axis: int,
        eps: float,
        bias: Array | None = None,
        dtype: DTypeLike | None = None,
    ) -> Array:
        """Products of the normed stream with matrices, side by side, `[M, N]`: for the logits."""


class TransformerKernels(Protocol):
    """The kernels for what lies around the block."""

    def norm_grads(
        self, x: Array, of_normed: Array, of_x: Array, scale: Array, *, eps: float
    ) -> tuple[Array, Array]:
        """The gradients for x, which an RMSNorm and a residual use, and for the norm's scale."""

    def round_both(
        self,
        parts: tuple[Array, ...],
        inverse: Array,
        dtype: DTypeLike,
        angles: tuple[Array, Array] | None = None,
        rotated: int = 0,
    ) -> tuple[Array, Array]:
        """Arrays in 8 bits, side by side, some rotated back; and their transpose."""

    def transposed(self, matrix: Array) -> Array:
        """The transpose of a matrix."""


class Kernels(BlockKernels, DecodeKernels, TransformerKernels, Protocol):
    """A whole back end."""


class _WhenUsed:
    """A package that is imported when one of its functions is first asked for.

    To import Pallas takes nearly as long as to import JAX.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._package), name)


if TYPE_CHECKING:
    from pallas_kernels import ampere, hopper, mma, reference

    AMPERE: Kernels = ampere
    HOPPER: Kernels = hopper
    MMA: Kernels = mma
    REFERENCE: Kernels = reference
else:
    AMPERE, HOPPER, MMA, REFERENCE = (
        _WhenUsed(f"pallas_kernels.{package}")
        for package in ("ampere", "hopper", "mma", "reference")
    )
