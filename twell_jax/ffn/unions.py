"""The block on tile unions, and its sparse gradients, by the kernels of a back end.

For the backward, the forward keeps g and h = g u on the unions, in a fraction `capacity` of the
memory that they take densely. Tokens of unions that do not fit are computed densely. If they are
too many, or the lists do not fit, the backward computes everything again, densely. Otherwise:

    dh = dy w_down^T    dz = dh u act'(z)    du = dh g    on the unions, as the forward
    dx = dz w_gate + du w_up                              on the unions
    dw_gate = dz^T x    dw_up = du^T x    dw_down = h^T dy    on the lists of tokens by neuron

If lists are so long that dense products are faster, XLA computes the gradients for the weights
instead, from what is on the unions. The tokens outside these, if there are any, are so few that XLA
computes their part.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import in_place, pattern_shares, quantised
from pallas_kernels.kernels import BlockKernels
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.neuron_lists import list_lengths, slots_for
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, GROUP_NEURONS, MAX_HEAVY
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.weights import Weights
from twell_jax.ffn import dense_gradients, union_lasso
from twell_jax.ffn.residuals import FEW, Residuals, may_be_dense
from twell_jax.ffn.stats import Output
from twell_jax.ffn.union_lasso import TokenWindows, WindowSums


def forward(
    kernels: BlockKernels,
    act: Rectifier,
    x: jax.Array,
    weights: Weights,
    residual: jax.Array | None = None,
) -> Output:
    """The block for `x: [M, D]`, added to `residual: [M, D]` if there is one."""
    output, _ = _forward(kernels, act, x, weights, residual, capacity=None)
    return output


def forward_with_residuals(
    kernels: BlockKernels,
    act: Rectifier,
    x: jax.Array,
    weights: Weights,
    residual: jax.Array | None = None,
    windows: TokenWindows | None = None,
    *,
    capacity: float,
    in_8_bits: bool = False,
) -> tuple[Output, Residuals]:
    """The block as by `forward`, and what `backward` needs.

    Args:
      kernels: the back end.
      act: the activation.
      x: `[M, D]`.
      weights: `[H, D]` each.
      residual: `[M, D]`, or None.
      windows: the windows over which the lasso is wanted; None: it is not.
      capacity: memory for the residuals, above 0 and at most 1, as a fraction of what they take
        densely.
      in_8_bits: whether the gate's product has operands of 8 bits.
    """
    if in_8_bits:
        weights = dense_gradients.with_gate_in_8_bits(weights)
    output, residuals = _forward(kernels, act, x, weights, residual, capacity=capacity)
    assert residuals is not None  # as there is a capacity
    # In a loop over layers, without a barrier, XLA runs union_up a second time to write its result
    # into the array of all layers. y passes it too, to be complete before a backward takes memory.
    y, residuals = in_place.barrier((output.y, residuals))
    output = output._replace(y=y)
    if windows is None:
        return output, residuals
    sums = _window_sums(act, residuals, x, weights, windows)
    return output._replace(lasso=sums.total()), replace(residuals, window_sums=sums)


def _window_sums(act, residuals, x, weights, windows):
    """The `WindowSums` of all h, also where not all of it was kept."""

    def of_kept(x, weights):
        heavy, count = residuals.heavy_tokens(MAX_HEAVY, len(x)), len(windows.sizes)
        window = windows.of_token.at[heavy].get(mode="fill", fill_value=count)
        kept = residuals.heavy_hidden[-1, : heavy.size]
        of_heavy = union_lasso.sums_of_tokens(kept, window, count)
        return union_lasso.sums_of_unions(residuals.hidden, residuals.plan, windows) + of_heavy

    def recompute(x, weights):
        return dense_gradients.window_sums(act, x, weights, windows)

    squares = lax.cond(residuals.fits, of_kept, recompute, x, weights)
    return WindowSums(squares, windows)


def _forward(
    kernels: BlockKernels,
    act: Rectifier,
    x: jax.Array,
    weights: Weights,
    residual: jax.Array | None = None,
    *,
    capacity: float | None,
) -> tuple[Output, Residuals | None]:
    """The output, and what a backward with this capacity needs; None if there is none."""
    m, linear, keeps = x.shape[0], weights.linear, capacity is not None
    tokens = quantised.tokens(x, weights.inner, kernels.round_tokens)
    x_gate = quantised.for_product(tokens, weights.activated)
    gate, masks, counts = kernels.gate_union(
        x_gate, weights.activated, act, weights.live, dtype=x.dtype
    )
    gate_ref = in_place.mutable(gate)
    limits = {}
    if capacity is not None:
        all_items = gate.size // (CHUNK_NEURONS * tile_union.TILE_TOKENS)
        limits = {"max_items": _part(capacity, all_items), "max_heavy": MAX_HEAVY}
    plan, nnz, heavy, needs = kernels.union_plan(tokens, gate_ref, masks, counts, **limits)
    gate = in_place.contents(gate_ref)
    x_up = x if linear is None else quantised.for_product(tokens, linear)
    dense_rows = functools.partial(
        kernels.dense_rows, weights=weights, rectifier=act, keep=MAX_HEAVY if keeps else 0
    )
    if not keeps:  # beside the unions, where XLA lets kernels run at the same time
        computed = dense_rows(heavy)
    hidden, l1 = kernels.union_up(x_up, gate, linear, plan, act, with_gate=keeps)
    y = kernels.union_down(hidden, (weights.down,), plan, m, residual)
    if keeps:
        # After union_down, so that its hidden activations reuse the gates' memory. It starts while
        # union_down still works on its last jobs.
        y, heavy = in_place.barrier((y, heavy))
        pending = (y, hidden, *jax.tree.leaves(plan))
        computed = dense_rows(replace(heavy, pending=pending))
    y_rows, heavy_l1, heavy_fired, heavy_hidden = computed
    y_ref = in_place.mutable(y)
    kernels.place_rows(heavy.count, heavy.rows, y_rows, y_ref, residual)
    y, l1 = in_place.contents(y_ref)[:m], l1 + heavy_l1
    late = functools.partial(in_place.used_after, heavy_l1)
    lists = None
    if capacity is None:
        slots = jnp.sum(slots_for(list_lengths(late(counts), m)))
    else:
        size = room(len(weights.down), m, capacity)
        y, counts = in_place.barrier((y, counts))  # not between kernels that overlap
        lists, lengths = kernels.neuron_lists(counts, m, size)
        slots = lists.wanted(lengths)
    shares = pattern_shares.of_packed(late(needs)[0], slots, m, len(weights.down))
    tiles = tile_union.tiles_of(masks)
    output = Output(y, nnz, l1, (tiles > 0) | heavy_fired, tiles, *shares)
    if lists is None or heavy_hidden is None:
        return output, None
    of_heavy = heavy.count, heavy.rows, heavy_hidden
    return output, Residuals(hidden, plan, needs, lists, lengths, *of_heavy)


def room(h: int, m: int, capacity: float) -> int:
    """The slots of all lists of h neurons and m tokens."""
    tokens = -(-m // tile_union.TILE_TOKENS) * tile_union.TILE_TOKENS
    return _part(capacity, h // GROUP_NEURONS * tokens // GROUP_NEURONS) * GROUP_NEURONS


def _part(capacity: float, n: int) -> int:
    """That fraction of n, at least 1."""
    return max(1, int(capacity * n))


def backward(
    kernels: BlockKernels,
    act: Rectifier,
    residuals: Residuals,
    x: jax.Array,
    weights: Weights,
    dy: jax.Array,
    l1_grad: jax.Array,
    lasso_grad: jax.Array | None = None,
    *,
    capacity: float,
    in_8_bits: bool = False,
    way: int | None = None,
) -> tuple[jax.Array, Weights]:
    """The gradients for x and the weights.

    Args:
      kernels: the back end.
      act: the activation.
      residuals: what the forward kept.
      x: `[M, D]`.
      weights: `[H, D]` each.
      dy: `[M, D]`, the gradient for y.
      l1_grad: float32 [], the gradient for the sum of |h|.
      lasso_grad: float32 [], the gradient for the lasso times the number of tokens, if the forward
        had windows.
      capacity, in_8_bits: those of the forward. The products of gradients have operands as given.
      way: that of the residuals, where the host knows it; None: only the device does. With it, the
        residuals stay as they are: they come from another program, and may be needed again.
    """
    slopes = None
    if residuals.window_sums is not None and lasso_grad is not None:
        slopes = residuals.window_sums.slopes(lasso_grad)
    # Branches with the same kernels trace and lower them once.
    of_unions = jax.jit(functools.partial(_from_unions, kernels, act, way is None))
    of_lists = jax.jit(functools.partial(_from_lists, kernels))
    sparse = functools.partial(_sparse_backward, of_unions, of_lists)
    dense = functools.partial(_dense_backward, of_unions)
    ways = [(sparse, 0), (sparse, FEW), (sparse, MAX_HEAVY)]  # with at most so many heavy tokens
    if may_be_dense(capacity):
        ways += [(dense, 0), (dense, MAX_HEAVY)]
    branches: list[Callable] = [  # in the order of `Way`
        functools.partial(dense_gradients.of_operands, act, in_8_bits),
        *(functools.partial(compute, act, residuals, most) for compute, most in ways),
    ]
    operands = x, weights, dy, l1_grad, slopes
    if way is not None:
        return branches[way](*operands)
    return lax.switch(residuals.way(len(x), capacity), branches, *operands)


def _sparse_backward(of_unions, of_lists, act, residuals, most, x, weights, dy, l1_grad, slopes):
    m, lists = x.shape[0], residuals.lists
    rows = residuals.heavy_tokens(most, m)
    if most:
        of_tokens = rows, residuals.heavy_hidden
        *_, h_heavy, grads_heavy = _of_heavy_tokens(
            act, *of_tokens, x, weights, dy, l1_grad, slopes
        )
        heavy = h_heavy, *grads_heavy
        dx_heavy = dense_gradients.for_x(grads_heavy, weights)
        # These matmuls of XLA come first, so that the entries on the lists reuse their workspace.
        dy, heavy, dx_heavy = in_place.barrier((dy, heavy, dx_heavy))

    dx, _, entries = of_unions(residuals, weights, dy, l1_grad, lists, slopes)
    if most:
        dx = dx.at[rows].set(dx_heavy, mode="drop")
        slots = lists.slots(jnp.minimum(rows, m - 1))
        slots = jnp.where(rows < m, slots, lists.tokens.size)
        entries = tuple(
            entry.at[slots].set(a.reshape(len(a), -1, GROUP_NEURONS).swapaxes(0, 1), mode="drop")
            for entry, a in zip(entries, heavy, strict=True)
        )
    return dx, of_lists(entries, x, dy, lists)


def _from_unions(kernels, act, overwrites, residuals, weights, dy, l1_grad, lists, slopes):
    """The gradient for x, blocks of those for z and u, and what of these and h is on the lists."""
    plan, hidden = residuals.plan, residuals.hidden
    extra = slopes and slopes.of_unions(hidden, plan)
    grads = in_place.mutable(hidden if overwrites else lax.empty(hidden.shape, hidden.dtype))
    hidden, into = (grads, None) if overwrites else (hidden, grads)
    operands = dy, weights.down, hidden, l1_grad[None], plan, lists, act, extra, into
    entries = kernels.hidden_grads(*operands)
    blocks = in_place.contents(grads)
    dx = kernels.union_down(blocks, weights.inner, plan, len(dy))
    return dx[: len(dy)], blocks, entries


def _from_lists(kernels, entries, x, dy, lists):
    """The gradients for the weights."""
    h, *grads = entries
    inner = kernels.weight_grads(tuple(grads), x, lists)
    (down,) = kernels.weight_grads((h,), dy, lists)
    return Weights.of(inner, down)


def _dense_backward(of_unions, act, residuals, most, x, weights, dy, l1_grad, slopes):
    rows = residuals.heavy_tokens(most, len(x))
    heavy = []  # the factors of what heavy tokens add, for each weight
    if most:
        of_tokens = rows, residuals.heavy_hidden
        x_heavy, dy_heavy, h_heavy, grads_heavy = _of_heavy_tokens(
            act, *of_tokens, x, weights, dy, l1_grad, slopes
        )
        dx_heavy = dense_gradients.for_x(grads_heavy, weights)
        heavy = [(h_heavy, dy_heavy), *((grad, x_heavy) for grad in grads_heavy)]

    def d_weight(n, a, b):
        total = dense_gradients.product(a, b)
        if most:
            total, (a, b) = in_place.barrier((total, heavy[n]))  # the small product comes last
            total += dense_gradients.product(a.T, b)
        return total.astype(x.dtype)

    # What blocks hold stays neurons by tokens, so that XLA has nothing to transpose. h comes first,
    # as the gradients take its place.
    *_, h = tile_union.to_dense(residuals.hidden, residuals.plan, len(x))
    down, dy, hidden = in_place.barrier((d_weight(0, h, dy), dy, residuals.hidden))
    residuals = replace(residuals, hidden=hidden)
    dx, blocks, _ = of_unions(residuals, weights, dy, l1_grad, None, slopes)
    grads = tile_union.to_dense(blocks, residuals.plan, len(x))
    inner = [d_weight(n, grad, x) for n, grad in enumerate(grads, start=1)]
    if most:
        dx = dx.at[rows].set(dx_heavy, mode="drop")
    return dx, Weights.of(inner, down)


def _of_heavy_tokens(act, rows, hidden, x, weights, dy, l1_grad, slopes):
    """x and dy of these tokens outside the unions, their h, and its gradients as in `for_inner`.

    All are zero for the padding. What the forward kept of them, `hidden`, may have more rows.
    """
    is_heavy = (rows < len(x))[:, None]
    x, dy = (a.at[rows].get(mode="fill", fill_value=0) for a in (x, dy))
    kept = jnp.where(is_heavy, hidden[:, : rows.size], 0)
    extra = slopes and slopes.of_tokens(kept[-1], rows)
    grads = dense_gradients.for_inner(
        act, kept, dense_gradients.product(dy, weights.down.T), l1_grad, extra
    )
    return x, dy, kept[-1], grads
