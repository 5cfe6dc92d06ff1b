"""What a back end offers: the functions that make up the feed-forward block.

A back end is a folder with a file for each of these functions, and one instance of `Kernels`.
`pallas_kernels.reference` says in pure JAX what each of them computes; the docstrings of
`pallas_kernels.hopper` say it in words. tests/conformance runs the same cases on all back ends.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax

from pallas_kernels import hopper, reference
from pallas_kernels.hopper.decode.gate import Gate
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.layouts.tile_union import Plan
from pallas_kernels.quantised import Quantised
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.weights import Weights

type Arrays = tuple[jax.Array, ...]

MAX_FEW_TOKENS = hopper.few_tokens.MAX_TOKENS  # the most that `few_tokens_ffn` takes


class Kernels(NamedTuple):
    """A back end. The arrows show what its functions return.

    Attributes:
      name: shown to people.
      unsupported: given a weight `[H, D]` of a block -> why the back end cannot serve the block on
        this device; None if it can.
      few_tokens_ffn: the whole block for up to 64 tokens -> y, nnz `[M]`, l1 `[M]`, fired `[H]`.
      gate_pack: the gate projection -> the gate in TwELL (`layouts.twell`).
      fused_ffn: up and down projection for the entries of a TwELL gate -> y, nnz, l1, heavy rows.
      dense_block: the whole block, densely, for a prompt -> y, h.
      dense_rows: the dense block for the rows on a list -> their y, l1, fired, and what a backward
        needs of them.
      place_rows: puts these rows into y, in place; with a residual, what they add to its rows.
      round_tokens: tokens in 8 bits -> these, for products with `Quantised` weights.
      gate_union: the gate projection of the live neurons -> the gate as tile unions
        (`layouts.tile_union`), in three arrays: gate, masks, counts.
      union_plan: decides which neurons each row tile computes -> plan, nnz, heavy rows, statistics
        of the tiles.
      union_up: the up projection on the unions -> blocks of h, with or without the gates; l1.
      union_down: sums blocks times gathered weights over the unions, and adds a residual if there
        is one -> y, or dx.
      neuron_lists: the tokens that use each group of neurons (`layouts.neuron_lists`) -> the lists,
        and the lengths that they have with room for all.
      hidden_grads: the gradients behind h, in place -> h and these on the neuron lists.
      weight_grads: the gradients for weights from neuron lists -> these.

    For decoding, with the residual stream of up to 64 tokens (`layouts.stream`):
      project: products of the normed stream with matrices, side by side -> `[M, N]`.
      project_attend: `project`, and attention to a cache, which gets keys and values -> `[M, N]`.
      add_product: adds a product to the stream -> the stream.
      add_product_gate: `add_product`, and the gate of a sparse block -> stream, `Gate`.
      add_product_hidden: `add_product`, and a dense block's hidden activation -> stream, `[M, H]`.
      add_ffn: adds what a sparse block makes of its gate -> the stream.
    """

    name: str
    unsupported: Callable[[jax.Array | jax.ShapeDtypeStruct], str | None]
    few_tokens_ffn: Callable[[jax.Array, Weights, Rectifier], Arrays]
    gate_pack: Callable[..., jax.Array]
    fused_ffn: Callable[..., tuple[jax.Array, jax.Array, jax.Array, HeavyRows]]
    dense_block: Callable[..., tuple[jax.Array, jax.Array]]
    dense_rows: Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]]
    place_rows: Callable[..., None]
    round_tokens: Callable[[jax.Array], Quantised]
    gate_union: Callable[..., Arrays]
    union_plan: Callable[..., tuple[Plan, jax.Array, HeavyRows, jax.Array]]
    union_up: Callable[..., tuple[jax.Array, jax.Array]]
    union_down: Callable[..., jax.Array]
    neuron_lists: Callable[[jax.Array, int, int], tuple[NeuronLists, jax.Array]]
    hidden_grads: Callable[..., Arrays]
    weight_grads: Callable[[Arrays, jax.Array, NeuronLists], Arrays]
    project: Callable[..., jax.Array]
    project_attend: Callable[..., jax.Array]
    add_product: Callable[..., Stream]
    add_product_gate: Callable[..., tuple[Stream, Gate]]
    add_product_hidden: Callable[..., tuple[Stream, jax.Array]]
    add_ffn: Callable[..., Stream]


def _back_end(name: str, folder: ModuleType) -> Kernels:
    """The back end in `folder`, which has each function in a file of the same name."""
    return Kernels(
        name=name,
        unsupported=folder.support.unsupported,
        few_tokens_ffn=folder.few_tokens.few_tokens_ffn,
        gate_pack=folder.gate_pack.gate_pack,
        fused_ffn=folder.fused_ffn.fused_ffn,
        dense_block=folder.dense_block.dense_block,
        dense_rows=folder.dense_rows.dense_rows,
        place_rows=folder.place_rows.place_rows,
        round_tokens=folder.round_tokens.round_tokens,
        gate_union=folder.gate_union.gate_union,
        union_plan=folder.union_plan.union_plan,
        union_up=folder.union_up.union_up,
        union_down=folder.union_down.union_down,
        neuron_lists=folder.neuron_lists.neuron_lists,
        hidden_grads=folder.hidden_grads.hidden_grads,
        weight_grads=folder.weight_grads.weight_grads,
        project=folder.token_product.project,
        project_attend=folder.token_pairs.project_attend,
        add_product=folder.token_product.add_product,
        add_product_gate=folder.token_pairs.add_product_gate,
        add_product_hidden=folder.token_pairs.add_product_hidden,
        add_ffn=folder.token_ffn.add,
    )


HOPPER = _back_end("Hopper", hopper)
REFERENCE = _back_end("reference", reference)
