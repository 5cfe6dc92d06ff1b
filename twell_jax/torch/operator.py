"""`sparse_ffn` on torch tensors, as operators of torch that `torch.compile` does not look into."""

from __future__ import annotations  # the documentation is built without torch

from collections.abc import Sequence
from typing import Any, Literal

import torch

from twell_jax.ffn import arguments
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.algorithms import LayerGradients
from twell_jax.ffn.stats import UNION_TOKENS
from twell_jax.torch import bridge, choice, dense, launches, memory
from twell_jax.torch import stats as stats_of
from twell_jax.torch.stats import FFNStats

# There is a program for each number of tokens, and kernels take few as a multiple of eight: more
# than the first number are filled up to a multiple of the second.
STEPS = ((1024, 1024), (64, 1), (8, 8))


def sparse_ffn(
    x: torch.Tensor,
    w_gate: torch.Tensor | None,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    activation: Activation = "relu",
    gradients: LayerGradients = "sparse",
    implementation: Literal["torch", "mosaic"] | None = None,
    return_stats: bool = False,
) -> Any:
    """The block of `twell_jax.sparse_ffn` on torch tensors, differentiable.

    Under autocast all operands are cast to its dtype. Weights may be views of their transpose: for
    `w_down` that is `down_proj.weight.t()` of most models.

    Args:
      x: `[..., D]` tokens.
      w_gate: `[H, D]`, or None for the non-gated block.
      w_up, w_down: `[H, D]`.
      activation, gradients: as of `twell_jax.sparse_ffn`; with "dense" ones kernels keep nothing,
        and the backward computes the block again.
      implementation: "torch" (dense, on any device) or "mosaic" (kernels, on Hopper GPUs, in
        bfloat16 or float16). None: kernels where they were measured to win; in training not in the
        31 steps after one in which most neurons were active.
      return_stats: return the statistics, too, which takes time.

    Returns:
      y: `[..., D]` in the dtype of x; or y and the `FFNStats`, whose fields are tensors. Of these
      `l1` is differentiable.

    Raises:
      ValueError: shapes, dtypes or devices do not agree, or an argument is out of its range.
      CannotServe: kernels were asked for and cannot serve; the message says why.
    """
    if not torch.compiler.is_compiling():
        _check(x, w_gate, w_up, w_down, activation, gradients, implementation)
    rows, *weights = _autocast(x, w_gate, w_up, w_down)
    rows = rows.reshape(-1, x.shape[-1])
    recent = None
    if implementation is None:
        dtype, (tokens, width) = str(rows.dtype).removeprefix("torch."), rows.shape
        y_alone = not (return_stats or _is_trained(rows, *weights))
        facts = tokens, width, len(w_down), w_gate is not None, y_alone
        implementation = choice.implementation(x.device.type, dtype, *facts)
        # Also without gradients: reentrant checkpointing calls so first.
        if implementation == "mosaic" and w_up.requires_grad and not torch.compiler.is_compiling():
            recent = choice.recent(w_up)
            implementation = recent.implementation(w_up)
    if implementation == "mosaic":
        named = bridge.text_of(activation), bridge.text_of(gradients or "dense")
        y, stats = _by_kernels(*named, rows, *weights, with_stats=return_stats, recent=recent)
    else:
        y, stats = dense.ffn(activation, rows, *weights, with_stats=return_stats)
    y = y.reshape(x.shape)
    return (y, stats) if return_stats else y


def _by_kernels(
    activation: str,
    gradients: str,
    rows: torch.Tensor,
    *weights: torch.Tensor | None,
    with_stats: bool,
    recent: choice.Recent | None,
) -> tuple[torch.Tensor, FFNStats | None]:
    count = len(rows)
    missing = -count % next((step for most, step in STEPS if count > most), 1)
    if missing:  # by tokens of zeros, for which nothing is active
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    operands, transposed = zip(*map(_laid_out, (rows, *weights)), strict=True)
    named = activation, gradients, transposed
    if _is_trained(*operands):
        y, *of_stats = _Differentiable.apply(recent, with_stats, *named, *operands)
    elif with_stats:
        y, packed, *_, l1, _ = _forward(True, *named, *operands)
        of_stats = [l1, packed]
    else:
        (y,) = _infer(*named, *operands)
    if missing:
        y = y[:count]
    if not with_stats:
        return y, None
    l1, packed = of_stats
    stats = stats_of.unpacked(l1, packed, d_ff=operands[-1].shape[transposed[-1]])
    if missing:
        share, tiles = len(rows) / count, len(rows) / (-(-count // UNION_TOKENS) * UNION_TOKENS)
        stats = stats._replace(
            l1=stats.l1 * share,
            nnz=stats.nnz * share,
            union=stats.union * tiles,
            listed=stats.listed * tiles,
        )
    return y, stats


def _is_trained(*operands: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in operands)


def _laid_out(a: torch.Tensor | None) -> tuple[torch.Tensor | None, bool]:
    """The operand or its transpose, contiguous, and whether it is the transpose."""
    if a is None or a.is_contiguous():
        return a, False
    upright = a.t()
    return (upright, True) if upright.is_contiguous() else (a.contiguous(), False)


def _check(
    x: torch.Tensor,
    w_gate: torch.Tensor | None,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    activation: Any,
    gradients: Any,
    implementation: Any,
) -> None:
    """Raises ValueError as `sparse_ffn` does."""
    if implementation not in (None, "torch", "mosaic"):
        raise ValueError(
            f"implementation must be 'torch', 'mosaic' or None, got {implementation!r}"
        )
    arguments.check_activation(activation, w_gate is not None)
    arguments.check_gradients(gradients)
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    for name, a in {"x": x, **weights}.items():
        if not isinstance(a, torch.Tensor) and not (a is None and name == "w_gate"):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(a).__name__}")
    dtype, device, shape = x.dtype, x.device, w_down.shape
    if not x.ndim:
        raise ValueError("x must be [..., D], got []")
    cast = _autocasts(x)
    for name, a in weights.items():
        if a is None:
            continue
        if a.device != device or (a.dtype != dtype and not cast):
            raise ValueError(
                f"{name} must be {dtype} on {device} as x is, got {a.dtype} on {a.device}"
            )
        if a.shape != shape or len(shape) != 2 or shape[1] != x.shape[-1]:
            raise ValueError(
                f"{name} must be [H, D], neuron-major, with D={x.shape[-1]} as x has it and "
                f"H={shape[0]} as w_down has it, got {list(a.shape)}"
            )


def _autocasts(x: torch.Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # which knows no "meta"


def _autocast(x: torch.Tensor, *weights: torch.Tensor | None) -> list[Any]:
    """The operands in the dtype of autocast, if it is on."""
    if not _autocasts(x):
        return [x, *weights]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [a if a is None else a.to(dtype) for a in (x, *weights)]


class _Differentiable(torch.autograd.Function):
    """The operators below with their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        recent: choice.Recent | None,
        with_stats: bool,
        activation: str,
        gradients: str,
        transposed: tuple[bool, ...],
        *operands: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """y, and with statistics l1 and what has the others."""
        ctx.recent, ctx.named = recent, (activation, gradients, transposed)
        y, *kept, numbers = _forward(with_stats, *ctx.named, *operands)
        of_stats = [kept.pop(), kept[0]] if with_stats else []
        ctx.save_for_backward(*operands, *kept, numbers)
        ctx.mark_non_differentiable(*of_stats[1:])
        ctx.set_materialize_grads(False)
        return y, *of_stats

    @staticmethod
    def backward(
        ctx: Any, of_y: torch.Tensor | None, of_l1: torch.Tensor | None = None, _: Any = None
    ) -> Any:
        if torch.is_grad_enabled():  # by create_graph
            raise ValueError("kernels have no second derivatives; implementation='torch' has them")
        (x, w_gate, w_up, w_down, *kept) = ctx.saved_tensors
        operands = x, w_gate, w_up, w_down
        if of_y is None:
            _, _, (x_is_transposed, *_) = ctx.named
            of_y = torch.zeros_like(x.t() if x_is_transposed else x)
        of_y = of_y.contiguous()
        found = iter(_backward(*ctx.named, *operands, kept, of_y, of_l1))
        if ctx.recent is not None:
            activation, gradients, transposed = ctx.named
            programs = bridge.programs(activation, gradients, transposed, operands)
            chosen = programs.choice(kept[-1].cpu().numpy())
            ctx.recent.gained = chosen is None or chosen.gains
        others = None, None, *(None for _ in ctx.named)
        return *others, *(None if a is None else next(found) for a in operands)


_LIBRARY = torch.library.Library("twell_jax", "DEF")
_OPERANDS = (
    "str activation, str gradients, bool[] transposed, "
    "Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down"
)


def _operator(name: str, arguments: str, compute: Any, fake: Any) -> Any:
    """An operator of torch. `torch.library.custom_op` would double what the host takes for it."""
    # CUDA graphs, which torch.compile may write, hold no more than some programs of inference.
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe
    _LIBRARY.define(f"{name}({arguments}) -> Tensor[]", tags=tags)
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"twell_jax::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.twell_jax, name).default


def _compute_infer(activation, gradients, transposed, *operands):
    programs = bridge.programs(activation, gradients, transposed, operands)
    device = operands[0].device
    if device.type == "cuda" and (launched := programs.launched(device)) is not None:
        return launched(_places(operands))
    return memory.run(programs.infer, [*operands])


def _places(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [a.data_ptr() for a in tensors if a is not None]


def _fake_infer(activation, gradients, transposed, *operands):
    programs = bridge.programs(activation, gradients, transposed, operands)
    return bridge.empty_like(programs.results[:1], operands[0])


def _compute_forward(with_stats, activation, gradients, transposed, *operands):
    """What `Programs.forward` returns, of which l1 only with statistics, and numbers for the host
    that the way of the backward follows from."""
    programs = bridge.programs(activation, gradients, transposed, operands)
    device, numbers = operands[0].device, list[torch.Tensor]()

    def copy(results: list[torch.Tensor], beside: bool = True) -> None:
        _, packed, *_ = results
        numbers.append(memory.for_the_host(packed[programs.deciding], beside=beside))

    if device.type == "cuda" and not with_stats and not launches.capturing():
        launched = programs.launched_forward(device)
        if launched is not None:
            return [*launched(_places(operands), copy), *numbers]
    found = memory.run(programs.forward, [*operands])
    copy(found, beside=False)  # it is JAX's memory
    return [*(found if with_stats else found[:-1]), *numbers]


def _fake_forward(with_stats, activation, gradients, transposed, *operands):
    programs = bridge.programs(activation, gradients, transposed, operands)
    found = bridge.empty_like(programs.results, operands[0])
    numbers = torch.empty(programs.deciding.stop - programs.deciding.start, dtype=torch.int32)
    return [*(found if with_stats else found[:-1]), numbers]


def _compute_backward(
    activation, gradients, transposed, x, w_gate, w_up, w_down, kept, of_y, of_l1
):
    """The gradients for x and the weights, those of None left out."""
    operands = x, w_gate, w_up, w_down
    programs = bridge.programs(activation, gradients, transposed, operands)
    packed, *large, numbers = kept
    way, _ = memory.on_the_host(numbers, packed[programs.deciding], programs.choice)
    of_sum = None if of_l1 is None else of_l1 / len(of_y)
    if x.is_cuda:
        launched = programs.launched_backward(way, x.device, of_sum is not None)
        if launched is not None:
            begin, others = packed.data_ptr(), (*large, of_y, of_sum)
            parts = [begin + packed.itemsize * place for place, _ in programs.parts]
            found = launched([*_places(operands), *parts, *_places(others)])
            memory.let_jax_wait(x.device)
            return found
    parts = [memory.part(packed, *place) for place in programs.parts]
    return memory.run(programs.backward(way), [*operands], parts, large, of_y, of_sum)


def _fake_backward(activation, gradients, transposed, x, w_gate, w_up, w_down, *_others):
    return [torch.empty_like(a) for a in (x, w_gate, w_up, w_down) if a is not None]


_infer = _operator("infer", _OPERANDS, _compute_infer, _fake_infer)
_forward = _operator("forward", f"bool with_stats, {_OPERANDS}", _compute_forward, _fake_forward)
_backward = _operator(
    "backward",
    f"{_OPERANDS}, Tensor[] kept, Tensor of_y, Tensor? of_l1",
    _compute_backward,
    _fake_backward,
)
