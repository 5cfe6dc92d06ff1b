"""The feed-forward block on tile unions, and its gradients, in Pallas kernels.

For gradients the forward keeps g and h = g u on the unions, in `capacity` of the memory that they
take densely. Tokens of unions that do not fit are computed densely. If they are few the backward
touches only what is not zero; else it computes everything again, densely:

    dh = dy w_down^T    dg = dh u    du = dh g        on the unions, as the forward
    dx = dg w_gate + du w_up                          on the unions
    dw_gate = dg^T x    dw_up = du^T x    dw_down = h^T dy    on the lists of each neuron's tokens

Tokens that leave the unions are few there, too few for kernels of their own.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import in_place
from pallas_kernels.hopper.dense_rows import dense_rows
from pallas_kernels.hopper.gate_union import gate_union
from pallas_kernels.hopper.hidden_grads import chain_rule, hidden_grads
from pallas_kernels.hopper.union_down import union_down
from pallas_kernels.hopper.union_plan import union_plan
from pallas_kernels.hopper.union_up import union_up
from pallas_kernels.hopper.weight_grads import weight_grads
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.neuron_lists import NeuronLists, neuron_lists
from pallas_kernels.layouts.tile_union import CHUNK, GROUP, Plan

_MAX_HEAVY = 256  # tokens outside the unions that the sparse backward takes
_PARTS = 16  # in which the dense backward goes through tokens and neurons


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """What the forward keeps for the gradients, besides its operands.

    Attributes:
      fits: bool `[1]`, whether the rest is complete.
      hidden: h and the gates, by `union_up`.
      plan, lists: where they are.
      heavy: int32 `[256]`, the tokens outside the unions, ascending, then M.
    """

    fits: jax.Array
    hidden: jax.Array
    plan: Plan
    lists: NeuronLists
    heavy: jax.Array


def forward(x, w_gate, w_up, w_down, *, capacity: float | None = None):
    """The block for `x: [M, D]`.

    Returns:
      y `[M, D]`, nnz `[M]`, the sum of |h|, which neurons fired, and `Kept` if there is a capacity.
    """
    m = x.shape[0]
    w_first, w_second = (w_up, None) if w_gate is None else (w_gate, w_up)
    gate, masks, counts = gate_union(x, w_first)
    gate_ref = in_place.mutable(gate)
    keep = capacity is not None
    max_items = max(1, int(capacity * len(gate) * len(w_down) / CHUNK)) if keep else None
    plan, nnz, heavy = union_plan(x, gate_ref, masks, counts, max_items=max_items)
    h, l1 = union_up(x, in_place.contents(gate_ref), w_second, plan, with_gate=keep)
    y = union_down(h, (w_down,), plan, m)
    # One after the other: then the hidden activation of heavy tokens takes the place of the gates.
    y, heavy = in_place.apart((y, heavy))
    y_ref = in_place.mutable(y)
    heavy_l1, heavy_fired = dense_rows(*heavy, w_gate, w_up, w_down, y_ref)
    out = in_place.contents(y_ref)[:m], nnz, l1 + heavy_l1, tile_union.fired(masks) | heavy_fired
    if not keep:
        return out
    slots = max(1, int(capacity * counts.size / GROUP)) * GROUP
    lists, lists_fit = neuron_lists(counts, m, slots)
    count, rows, _ = heavy
    rows = rows[:_MAX_HEAVY]
    rows = jnp.sort(jnp.where(jnp.arange(rows.size) < count, rows, m))
    is_finite = jnp.all(counts[:, :m] <= 127)
    fits = lists_fit & (count <= _MAX_HEAVY) & is_finite
    # Apart, or XLA runs union_up twice in a loop over layers, to write to the stack of all as well.
    return *out, in_place.apart(Kept(fits, h, plan, lists, rows))


def backward(kept: Kept, x, w_gate, w_up, w_down, dy, l1_grad):
    """Gradients for x and the weights, from those for y and for the sum of |h|."""

    def sparse(*operands):
        return _sparse_backward(kept, *operands)

    return lax.cond(kept.fits[0], sparse, dense_backward, x, w_gate, w_up, w_down, dy, l1_grad)


def _sparse_backward(kept, x, w_gate, w_up, w_down, dy, l1_grad):
    m = x.shape[0]
    first_weights = (w_up,) if w_gate is None else (w_gate, w_up)

    def rows_of(a):
        return a.at[kept.heavy].get(mode="fill", fill_value=0)

    heavy = _dense_hidden(rows_of(x), first_weights, w_down, rows_of(dy), l1_grad)
    dx_heavy = _dense_dx(heavy, first_weights)
    # First of all: what XLA takes for these matmuls is free again when the lists are made.
    dy, heavy, dx_heavy = in_place.apart((dy, heavy, dx_heavy))

    h_ref = in_place.mutable(kept.hidden)
    entries = hidden_grads(dy, w_down, h_ref, l1_grad[None], kept.plan, kept.lists)
    dx = union_down(in_place.contents(h_ref), first_weights, kept.plan, m)
    dx = dx.at[kept.heavy].set(dx_heavy, mode="drop")
    slots = kept.lists.slots(jnp.minimum(kept.heavy, m - 1))
    slots = jnp.where(kept.heavy < m, slots, kept.lists.tokens.size)
    h, *grads = [
        entry.at[slots].set(a.reshape(len(a), -1, GROUP).swapaxes(0, 1), mode="drop")
        for entry, a in zip(entries, heavy, strict=True)
    ]
    dw_first = weight_grads(tuple(grads), x, kept.lists)
    dw_gate, dw_up = (None, *dw_first) if w_gate is None else dw_first
    return dx[:m], dw_gate, dw_up, *weight_grads((h,), dy, kept.lists)


def dense_backward(x, w_gate, w_up, w_down, dy, l1_grad):
    """The gradients by XLA, from the operands alone, in parts to save memory.

    For x, tokens are taken in parts, for weights neurons: no gradient is a sum over parts.
    """
    m = x.shape[0]
    first_weights = (w_up,) if w_gate is None else (w_gate, w_up)

    def of_tokens(operands):
        x, dy = operands
        return _dense_dx(_dense_hidden(x, first_weights, w_down, dy, l1_grad), first_weights)

    def of_neurons(weights):
        *first_weights, w_down = weights
        h, *grads = _dense_hidden(x, first_weights, w_down, dy, l1_grad)
        dw_down = _product(h.T, dy).astype(x.dtype)
        return *(_product(grad.T, x).astype(x.dtype) for grad in grads), dw_down

    def in_parts(f, *arrays):
        out = lax.map(f, [a.reshape(_PARTS, -1, a.shape[1]) for a in arrays])
        return jax.tree.map(lambda a: a.reshape(-1, a.shape[2]), out)

    dx = in_parts(of_tokens, *(jnp.pad(a, ((0, -m % _PARTS), (0, 0))) for a in (x, dy)))
    *dw_gate, dw_up, dw_down = in_parts(of_neurons, *first_weights, w_down)
    return dx[:m], dw_gate[0] if dw_gate else None, dw_up, dw_down


def _dense_hidden(x, first_weights, w_down, dy, l1_grad):
    """h and the gradients for its factors, of some tokens and neurons, by XLA."""
    gate, *up = [_product(x, w.T) for w in first_weights]
    gate = jnp.maximum(gate, 0).astype(x.dtype).astype(jnp.float32)
    h = gate * up[0] if up else gate
    grads = chain_rule(_product(dy, w_down.T), [gate] if up else [], h, l1_grad)
    return [a.astype(x.dtype) for a in (h, *grads)]


def _dense_dx(hidden, first_weights):
    dx = sum(_product(grad, w) for grad, w in zip(hidden[1:], first_weights, strict=True))
    return dx.astype(first_weights[0].dtype)


def _product(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
