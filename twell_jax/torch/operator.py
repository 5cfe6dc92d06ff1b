"""`sparse_ffn` on torch tensors, as operators of torch that `torch.compile` does not look into."""

from __future__ import annotations  # the documentation is built without torch

from typing import Any, Literal

import torch

from twell_jax.ffn import arguments
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.algorithms import LayerGradients
from twell_jax.torch import bridge, dense
from twell_jax.torch import stats as stats_of
from twell_jax.torch.memory import to_jax, to_torch, weight_to_jax
from twell_jax.torch.stats import FFNStats

# JAX compiles a program for each number of tokens: more than so many are filled up to a multiple.
STEP_TOKENS = 1024


def sparse_ffn(
    x: torch.Tensor,
    w_gate: torch.Tensor | None,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    activation: Activation = "relu",
    gradients: LayerGradients = "sparse",
    implementation: Literal["torch", "mosaic"] = "torch",
    return_stats: bool = False,
) -> Any:
    """The block of `twell_jax.sparse_ffn` on torch tensors, differentiable.

    Under autocast all operands are cast to its dtype. Weights may be views of their transpose: for
    `w_down` that is `down_proj.weight.t()` of most models.

    Args:
      x: `[..., D]` tokens.
      w_gate: `[H, D]`, or None for the non-gated block.
      w_up, w_down: `[H, D]`.
      activation, gradients: as of `twell_jax.sparse_ffn`.
      implementation: "torch" (dense, on any device) or "mosaic" (kernels, on Hopper GPUs, in
        bfloat16 or float16).
      return_stats: return the statistics, too. Dense, that takes time; kernels have them anyway.

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
    if implementation == "mosaic":
        named = bridge.text_of(activation), bridge.text_of(gradients or "dense")
        y, stats = _by_kernels(*named, rows, *weights, with_stats=return_stats)
    else:
        y, stats = dense.ffn(activation, rows, *weights, with_stats=return_stats)
    y = y.reshape(x.shape)
    return (y, stats) if return_stats else y


def _by_kernels(
    activation: str,
    gradients: str,
    rows: torch.Tensor,
    *weights: Any,  # w_gate may be None
    with_stats: bool,
) -> tuple[torch.Tensor, FFNStats | None]:
    count = len(rows)
    missing = -count % STEP_TOKENS if count > STEP_TOKENS else 0
    if missing:  # by tokens of zeros, for which nothing is active
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    operands = rows, *weights
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in operands):
        results = _Differentiable.apply(activation, gradients, *operands)
    else:
        results = (_forward if with_stats else _infer)(activation, gradients, *operands)
    y = results[0][:count] if missing else results[0]
    if not with_stats:
        return y, None
    stats = stats_of.unpacked(results[1], results[2], len(weights[-1]))
    share = len(rows) / count
    return y, stats._replace(l1=stats.l1 * share, nnz=stats.nnz * share)


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
    if implementation not in ("torch", "mosaic"):
        raise ValueError(f"implementation must be 'torch' or 'mosaic', got {implementation!r}")
    arguments.check_activation(activation, w_gate is not None)
    arguments.check_gradients(gradients)
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    for name, a in {"x": x, **weights}.items():
        if not isinstance(a, torch.Tensor) and not (a is None and name == "w_gate"):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(a).__name__}")
    cast = torch.is_autocast_enabled(x.device.type)
    for name, a in weights.items():
        if a is None:
            continue
        if a.device != x.device or (a.dtype != x.dtype and not cast):
            raise ValueError(
                f"{name} must be {x.dtype} on {x.device} as x is, got {a.dtype} on {a.device}"
            )
        if a.ndim != 2 or a.shape != w_down.shape or a.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{name} must be [H, D], neuron-major, with D={x.shape[-1]} as x has it and "
                f"H={w_down.shape[0]} as w_down has it, got {list(a.shape)}"
            )


def _autocast(x: torch.Tensor, *weights: torch.Tensor | None) -> list[Any]:
    """The operands in the dtype of autocast, if it is on."""
    if not torch.is_autocast_enabled(x.device.type):
        return [x, *weights]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [a if a is None else a.to(dtype) for a in (x, *weights)]


class _Differentiable(torch.autograd.Function):
    """The operators below with their gradients."""

    @staticmethod
    def forward(
        ctx: Any, activation: str, gradients: str, *operands: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        y, l1, *kept = _forward(activation, gradients, *operands)
        ctx.named = activation, gradients
        ctx.save_for_backward(*operands, *kept)
        ctx.mark_non_differentiable(kept[0])
        return y, l1, kept[0]

    @staticmethod
    def backward(ctx: Any, of_y: torch.Tensor, of_l1: torch.Tensor, _: Any) -> Any:
        (x, w_gate, w_up, w_down, *kept) = ctx.saved_tensors
        operands = x, w_gate, w_up, w_down
        found = iter(_backward(*ctx.named, *operands, kept, of_y, of_l1))
        return None, None, *(None if a is None else next(found) for a in operands)


_OPERANDS = "str activation, str gradients, Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down"


def _operator(name: str, results: int | None = None) -> Any:
    """The operator of a program of `bridge.Programs`, which has so many results; None: all."""

    @torch.library.custom_op(
        f"twell_jax::{name}", mutates_args=(), schema=f"({_OPERANDS}) -> Tensor[]"
    )
    def compute(activation, gradients, *given):
        programs, operands, _ = bridge.programs(activation, gradients, given)
        return to_torch(getattr(programs, name)(_in_jax(operands)))

    @compute.register_fake
    def _(activation, gradients, *given):
        programs, *_ = bridge.programs(activation, gradients, given)
        return bridge.empty_like(programs.results[:results], given[0])

    return compute


def _in_jax(operands: bridge.Tensors) -> list[Any]:
    x, *weights = operands
    return [to_jax(x), *(None if w is None else weight_to_jax(w) for w in weights)]


_infer, _forward = _operator("infer", 1), _operator("forward")


@torch.library.custom_op(
    "twell_jax::backward",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor[] kept, Tensor of_y, Tensor of_l1) -> Tensor[]",
)
def _backward(activation, gradients, x, w_gate, w_up, w_down, kept, of_y, of_l1):
    """The gradients for x and the weights, those of None left out."""
    given = x, w_gate, w_up, w_down
    programs, operands, turned = bridge.programs(activation, gradients, given)
    others = [to_jax(a) for a in (*kept, of_y.contiguous(), of_l1)]
    results = programs.backward(_in_jax(operands), others[:-2], *others[-2:])
    present = [is_turned for a, is_turned in zip(given, turned, strict=True) if a is not None]
    pairs = zip(to_torch(results), present, strict=True)
    return [grad.t() if is_turned else grad for grad, is_turned in pairs]


@_backward.register_fake
def _(activation, gradients, x, w_gate, w_up, w_down, *_others):
    return [torch.empty_like(a) for a in (x, w_gate, w_up, w_down) if a is not None]
