"""`SparseMLP`: the sparse feed-forward block as a module of torch."""

from __future__ import annotations  # the documentation is built without torch

from typing import Any, Literal, cast

import torch

from twell_jax.ffn import arguments
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.algorithms import LayerGradients
from twell_jax.torch.operator import sparse_ffn
from twell_jax.torch.stats import FFNStats


class SparseMLP(torch.nn.Module):
    """Feed-forward block with ReLU sparsity: `y = mlp(x)` for `x: [..., D]`.

    Its layers are called as those of Llama, and a file of weights fits both: `gate_proj.weight` and
    `up_proj.weight` are `[d_ff, d_model]`, `down_proj.weight` is `[d_model, d_ff]`.

    It keeps the `FFNStats` of its last call as `stats`, for `collect_l1`, if `keep_stats` says so.

    Args:
      d_model: width of the input and output, D.
      d_ff: hidden units, H.
      gated: whether there is a gate projection.
      activation, gradients, implementation: see `sparse_ffn`.
      keep_stats: whether to keep the statistics; None: while it trains. They take time: JAX then
        starts the kernels, and dense products are read again.
      device, dtype: of the parameters.

    Raises:
      ValueError: there is no block with this activation.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        gated: bool = True,
        activation: Activation = "relu",
        gradients: LayerGradients = "sparse",
        implementation: Literal["torch", "mosaic"] | None = None,
        keep_stats: bool | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        arguments.check_activation(activation, gated)

        def linear(*widths: int) -> torch.nn.Linear:
            return torch.nn.Linear(*widths, bias=False, device=device, dtype=dtype)

        self.gate_proj = linear(d_model, d_ff) if gated else None
        self.up_proj = linear(d_model, d_ff)
        self.down_proj = linear(d_ff, d_model)
        self.activation, self.gradients = activation, gradients
        self.implementation, self.keep_stats = implementation, keep_stats
        self.stats: FFNStats | None = None

    @classmethod
    def of(
        cls,
        gate: torch.nn.Linear | None,
        up: torch.nn.Linear,
        down: torch.nn.Linear,
        activation: Activation,
    ) -> SparseMLP:
        """A block that has these layers themselves."""
        with torch.device("meta"):  # its own layers are replaced
            gated = gate is not None
            made = cls(up.in_features, up.out_features, gated=gated, activation=activation)
        made.gate_proj, made.up_proj, made.down_proj = gate, up, down
        return made.train(up.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the block to `[..., D]`.

        Raises:
          ValueError: one of the layers does more than multiply with its weight.
        """
        gate = _weight("gate_proj", self.gate_proj)
        up = _weight("up_proj", self.up_proj)
        down = _weight("down_proj", self.down_proj)
        assert up is not None and down is not None
        keeps = self.training if self.keep_stats is None else self.keep_stats
        results = sparse_ffn(
            x,
            gate,
            up,
            down.t(),
            activation=self.activation,
            gradients=self.gradients,
            implementation=self.implementation,
            return_stats=keeps,
        )
        y, stats = results if keeps else (results, None)
        # Not what gradient checkpointing computes again, whose graph the statistics would keep.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self.stats = stats
        return y

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"stats": None}  # which have a graph, that cannot be copied

    def extra_repr(self) -> str:
        """What `repr` says beside the layers."""
        return f"activation={self.activation!r}, gradients={self.gradients!r}"


def lay_out(model: torch.nn.Module) -> None:
    """Lays out the weights of each block's `down_proj` by neuron, `[H, D]` in memory, in place.

    Kernels read them so, and would make a copy in each call. Shapes and values stay as they are,
    and so do the files that `save_pretrained` of transformers writes; `save_file` of safetensors
    wants contiguous tensors. For models that are not trained: torch's fused optimizers take weights
    and their own state for one layout.

    Raises:
      ValueError: the model has no `SparseMLP`, or one has weights that are trained.
    """
    blocks = _blocks(model)
    for name, block in blocks.items():
        if block.down_proj.weight.requires_grad:
            raise ValueError(
                f"{name or 'the block'} is trained, and optimizers may not know this layout: call "
                "model.requires_grad_(False) first"
            )
    for block in blocks.values():
        weight = block.down_proj.weight
        weight.data = weight.data.t().contiguous().t()


def _blocks(model: torch.nn.Module) -> dict[str, SparseMLP]:
    """The blocks of a model by their paths.

    Raises:
      ValueError: there is none.
    """
    blocks = {name: m for name, m in model.named_modules() if isinstance(m, SparseMLP)}
    if not blocks:
        raise ValueError("the model has no SparseMLP: replace_mlps(model) makes them")
    return blocks


def _weight(name: str, layer: torch.nn.Module | None) -> torch.Tensor | None:
    """That of a layer, which the block multiplies with itself; None if there is no layer."""
    if layer is None:
        return None
    is_plain = isinstance(layer, torch.nn.Linear) and layer.bias is None
    if not is_plain or layer._forward_hooks or layer._forward_pre_hooks:
        raise ValueError(
            f"{name} does more than multiply with its weight (an adapter, a hook or a bias), which "
            "the block would leave out: merge or remove that"
        )
    return cast(torch.Tensor, layer.weight)


def collect_stats(model: torch.nn.Module) -> dict[str, FFNStats]:
    """The statistics of each block's last call, by its path in the model.

    Raises:
      ValueError: the model has no `SparseMLP`, or one was not called in a way that keeps them.
    """
    found = {}
    for name, block in _blocks(model).items():
        if block.stats is None:
            raise ValueError(
                f"{name or 'the block'} has no statistics: call the model after model.train(), or "
                "set keep_stats=True"
            )
        found[name] = block.stats
    return found


def collect_l1(model: torch.nn.Module) -> torch.Tensor:
    """The L1 term of a model that was called: the mean over its blocks of `FFNStats.l1`.

    Add it to the loss with a coefficient, such as 2e-5 (arXiv 2603.23198, recipe).

    Raises:
      ValueError: as `collect_stats`; or a term has no gradient, as with gradient checkpointing that
        is reentrant.
    """
    terms = {name: stats.l1 for name, stats in collect_stats(model).items()}
    if torch.is_grad_enabled():
        for name, term in terms.items():
            is_trained = any(p.requires_grad for p in model.get_submodule(name).parameters())
            if is_trained and not term.requires_grad:
                raise ValueError(
                    f"{name or 'the block'}: its L1 term has no gradient. If its weights are "
                    "trained, gradient checkpointing hides it: use_reentrant=False keeps it"
                )
    return torch.stack(list(terms.values())).mean()
