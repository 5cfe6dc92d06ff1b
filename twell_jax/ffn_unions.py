"""The feed-forward block on tile unions, and its gradients, in Pallas kernels.

For gradients the forward keeps the factors of h on the unions, in `capacity` of the memory that
they take densely. Where that is too little, XLA computes the block densely, forward and backward.
Else the backward touches only what is not zero:

    dh = dy w_down^T    dg = dh u    du = dh g        on the unions, as the forward
    dx = dg w_gate + du w_up                          on the unions
    dw_gate = dg^T x    dw_up = du^T x    dw_down = h^T dy    on the lists of each neuron's tokens

Tokens that leave the unions are few there, too few for kernels of their own.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tile_union
from pallas_kernels.dense_rows import dense_rows
from pallas_kernels.gate_union import gate_union
from pallas_kernels.hidden_grads import chain_rule, hidden_grads
from pallas_kernels.neuron_lists import NeuronLists, neuron_lists
from pallas_kernels.tile_union import CHUNK, GROUP, Plan
from pallas_kernels.union_down import union_down
from pallas_kernels.union_plan import union_plan
from pallas_kernels.union_up import union_up
from pallas_kernels.weight_grads import weight_grads
from twell_jax import ffn_xla

_MAX_HEAVY = 256  # tokens outside the unions, where gradients are sparse
_NEURONS = 256  # that the dense computation has in memory at a time


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """What the forward keeps for the gradients, besides its operands.

    Attributes:
      fits: bool `[1]`, whether the rest is complete.
      factors: the factors of h by `union_up`.
      plan, lists: where they are.
      heavy: int32 `[256]`, the tokens outside the unions, ascending, then M.
      heavy_factors: theirs, `[256, H]`: the gates and, in the gated form, the up projection.
    """

    fits: jax.Array
    factors: jax.Array
    plan: Plan
    lists: NeuronLists
    heavy: jax.Array
    heavy_factors: list[jax.Array]


def forward(x, w_gate, w_up, w_down):
    """The block for `x: [M, D]`.

    Returns:
      y `[M, D]`, nnz `[M]`, the sum of |h|, and which neurons fired.
    """
    gate, masks, _, plan, nnz, heavy = _unions(x, _first(w_gate, w_up)[0])
    h, l1 = union_up(x, gate, None if w_gate is None else w_up, plan)
    # y may have padding rows, which are cut last: XLA would hand a slice to the in-place kernel as
    # a part of the larger buffer, and take the result from another one.
    y_ref = jax.new_ref(union_down(h, (w_down,), plan, x.shape[0]))
    heavy_l1, heavy_fired = dense_rows(*heavy, w_gate, w_up, w_down, y_ref)
    fired = tile_union.fired(masks) | heavy_fired
    return y_ref[...][: x.shape[0]], nnz, l1 + heavy_l1, fired


def forward_for_gradients(x, w_gate, w_up, w_down, *, capacity: float):
    """As `forward`, and `Kept`; h is rounded from rounded factors."""
    m = x.shape[0]
    gate, masks, counts, plan, nnz, (count, rows, _) = _unions(x, _first(w_gate, w_up)[0])
    keep = max(1, int(capacity * plan.items.size))
    factors, l1 = union_up(x, gate, None if w_gate is None else w_up, plan, keep=keep)
    slots = max(1, int(capacity * counts.size / GROUP)) * GROUP
    lists, lists_fit = neuron_lists(counts, m, slots)
    rows = rows[:_MAX_HEAVY]
    rows = jnp.sort(jnp.where(jnp.arange(rows.size) < count, rows, m))
    heavy_factors = [_product(_rows(x, rows), w.T) for w in _first(w_gate, w_up)]
    heavy_factors[0] = jnp.maximum(heavy_factors[0], 0)
    is_finite = jnp.all(counts[:, :m] <= 127)
    fits = lists_fit & (plan.item_count <= keep) & (count <= _MAX_HEAVY) & is_finite
    heavy_factors = [a.astype(x.dtype) for a in heavy_factors]

    def sparse(*_):
        h = math.prod(jnp.split(factors, factors.shape[1] // CHUNK, axis=1))
        heavy_h = math.prod(heavy_factors)
        y = union_down(h, (w_down,), plan, m)
        y = y.at[rows].set(_product(heavy_h, w_down).astype(y.dtype), mode="drop")
        heavy_l1 = jnp.sum(jnp.abs(heavy_h), dtype=jnp.float32)
        fired = tile_union.fired(masks) | jnp.any(heavy_factors[0] != 0, axis=0)
        return y[:m], l1 + heavy_l1, fired

    y, l1, fired = lax.cond(fits[0], sparse, _dense_forward, x, w_gate, w_up, w_down)
    return y, nnz, l1, fired, Kept(fits, factors, plan, lists, rows, heavy_factors)


def backward(kept: Kept, x, w_gate, w_up, w_down, dy, l1_grad):
    """Gradients for x and the weights, from those for y and for the sum of |h|."""

    def sparse(*operands):
        return _sparse_backward(kept, *operands)

    return lax.cond(kept.fits[0], sparse, _dense_backward, x, w_gate, w_up, w_down, dy, l1_grad)


def _unions(x, w_first):
    gate, masks, counts = gate_union(x, w_first)
    gate_ref = jax.new_ref(gate)
    plan, nnz, heavy = union_plan(x, gate_ref, masks, counts)
    return gate_ref[...], masks, counts, plan, nnz, heavy


def _sparse_backward(kept, x, w_gate, w_up, w_down, dy, l1_grad):
    m, h = x.shape[0], w_down.shape[0]
    first_weights = _first(w_gate, w_up)
    factors_ref = jax.new_ref(kept.factors)
    entries = hidden_grads(dy, w_down, factors_ref, l1_grad[None], kept.plan, kept.lists)
    dx = union_down(factors_ref[...], first_weights, kept.plan, m)

    gate, *up = [a.astype(jnp.float32) for a in kept.heavy_factors]
    dh_heavy = _product(_rows(dy, kept.heavy), w_down.T)
    arrays = [a.astype(x.dtype) for a in chain_rule(dh_heavy, gate, up, l1_grad)]
    dx_heavy = sum(_product(a, w) for a, w in zip(arrays[1:], first_weights, strict=True))
    dx = dx.at[kept.heavy].set(dx_heavy.astype(x.dtype), mode="drop")
    slots = kept.lists.slots(jnp.minimum(kept.heavy, m - 1))
    slots = jnp.where(kept.heavy < m, slots, kept.lists.tokens.size)
    value, *grads = [
        entry.at[slots].set(a.reshape(-1, h // GROUP, GROUP).swapaxes(0, 1), mode="drop")
        for entry, a in zip(entries, arrays, strict=True)
    ]
    dw_first = weight_grads(tuple(grads), x, kept.lists)
    dw_gate, dw_up = (None, *dw_first) if w_gate is None else dw_first
    return dx[:m], dw_gate, dw_up, *weight_grads((value,), dy, kept.lists)


def _dense_forward(x, *weights):
    def add(y, some):
        out, stats = ffn_xla.ffn(x, *some)
        return y + out, (stats.l1, stats.fired)

    y, (l1, fired) = lax.scan(add, jnp.zeros(x.shape, jnp.float32), _cut(weights))
    return y.astype(x.dtype), jnp.sum(l1) * x.shape[0], fired.reshape(-1)


def _dense_backward(x, w_gate, w_up, w_down, dy, l1_grad):
    def outputs(*operands):
        y, stats = ffn_xla.ffn(*operands)
        return y, stats.l1  # a mean over tokens

    def add(dx, some):
        _, vjp = jax.vjp(outputs, x, *some)
        of_x, *of_weights = vjp((dy, l1_grad * x.shape[0]))
        return dx + of_x, tuple(of_weights)

    weights = w_gate, w_up, w_down
    dx, grads = lax.scan(add, jnp.zeros(x.shape, jnp.float32), _cut(weights))
    return dx.astype(x.dtype), *jax.tree.map(lambda g, w: g.reshape(w.shape), grads, weights)


def _cut(weights):
    """Each `[H, D]` as `[n, H / n, D]`, to compute with some neurons at a time."""
    return jax.tree.map(lambda w: w.reshape(-1, math.gcd(len(w), _NEURONS), w.shape[1]), weights)


def _first(w_gate, w_up):
    """The weights that x is multiplied by."""
    return (w_up,) if w_gate is None else (w_gate, w_up)


def _rows(a, rows):
    return a.at[rows].get(mode="fill", fill_value=0)


def _product(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
