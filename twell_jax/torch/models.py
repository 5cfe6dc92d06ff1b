"""Puts `SparseMLP`s in place of the feed-forward modules of somebody else's model."""

from __future__ import annotations  # the documentation is built without torch

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from twell_jax.ffn.activations import Activation
from twell_jax.torch.module import SparseMLP

# The layers of feed-forward modules of Llama, Mistral, Qwen and those after them, and of Arcee and
# Nemotron, which have no gate.
FORMS = (("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj"))

_SERVED: dict[Activation, Callable] = {
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z) ** 2,
}
# What a module may have had in place of the activation that is asked for.
_OTHERS: dict[Any, Callable] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}
_TOKENS = 8
_SCALES = (1.0, 8.0)  # of drawn tokens: at one of them a norm or a clip is noticed
_TOLERANCE = 0.02  # relative; 16 bits round products


def replace_mlps(
    model: torch.nn.Module, *, activation: Activation | None = None
) -> dict[str, SparseMLP]:
    """Replaces the feed-forward modules of a model, in place, by `SparseMLP`s with their layers.

    A feed-forward module is one that holds `torch.nn.Linear`s without bias by the names of a row of
    `FORMS`, and no other parameters. Each is called on drawn tokens: it must compute what its
    layers alone give with a usual activation. The layers themselves stay, with their names and
    parameters; so do `state_dict` and optimizers. Adapters of layers and hooks are refused.

    Args:
      model: the model, which is changed.
      activation: of the new modules. With another one than the model has, outputs change until it
        is trained further. None keeps its own, which must be "relu" or "relu2".

    Returns:
      The new modules by their paths in the model, such as "model.layers.0.mlp".

    Raises:
      ValueError: no module has such layers; one is the model itself, has no values yet, has hooks
        or computes something else than its layers alone; or its activation is never zero, and none
        is given. The line names the module, and the model is as it was.
    """
    modules = model.named_modules(remove_duplicate=False)  # a module may have several places
    found = {name: form for name, module in modules if (form := _form_of(module))}
    if not found:
        known = "; ".join(", ".join(form) for form in FORMS)
        raise ValueError(
            "no module of the model has the layers of a feed-forward block, torch.nn.Linears "
            f"without bias and nothing else: {known}"
        )
    if "" in found:
        raise ValueError("cannot replace the model itself: it must be part of a module")
    made: dict[torch.nn.Module, SparseMLP] = {}
    replaced = {}
    for name, form in found.items():
        module = model.get_submodule(name)
        *gates, up, down = (module.get_submodule(layer) for layer in form)
        _check(name, module, (*gates, up, down))
        gate = gates[0] if gates else None
        own = _activation_of(module, gate, up, down)
        if own is None:
            raise ValueError(
                f"{name} ({type(module).__name__}) computes something else than its layers "
                f"{', '.join(form)} with a usual activation"
            )
        if activation is None and own not in _SERVED:
            raise ValueError(
                f"{name} computes {own}, which is never zero: activation='relu' replaces it, and "
                "the model must then be trained further"
            )
        if module not in made:
            made[module] = SparseMLP.of(gate, up, down, activation or own)
        replaced[name] = made[module]
    for name, block in replaced.items():
        model.set_submodule(name, block.train(model.get_submodule(name).training))
    return replaced


def _form_of(module: torch.nn.Module) -> tuple[str, ...] | None:
    """The row of `FORMS` whose layers the module has, and nothing else that has parameters."""
    children = dict(module.named_children())
    layers = {name for name, m in children.items() if type(m) is torch.nn.Linear and m.bias is None}
    names = {name.partition(".")[0] for name, _ in module.named_parameters()}
    matching = (form for form in FORMS if set(form) == names == layers)
    return None if isinstance(module, SparseMLP) else next(matching, None)


def _check(name: str, module: torch.nn.Module, layers: Sequence[torch.nn.Linear]) -> None:
    """Raises ValueError if layers have no values yet, or the module has hooks, which would go."""
    if any(layer.weight.is_meta for layer in layers):
        raise ValueError(f"{name} has weights without values, on the device meta: load them")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ValueError(f"{name} has hooks: remove them, and give them to what replaces it")


@torch.no_grad()
def _activation_of(
    module: torch.nn.Module,
    gate: torch.nn.Linear | None,
    up: torch.nn.Linear,
    down: torch.nn.Linear,
) -> Activation | None:
    """The activation with which the layers alone compute what the module does; None if none is."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(_TOKENS, up.in_features, generator=generator).to(up.weight)
    tokens = torch.cat([scale * drawn for scale in _SCALES])
    if any(isinstance(child, torch.nn.Dropout) and child.p for child in module.children()):
        return None
    expected = module(tokens)
    if not isinstance(expected, torch.Tensor):
        return None
    expected = expected.float()
    errors = {}
    for name, function in (_SERVED | _OTHERS).items():
        h = function(up(tokens)) if gate is None else function(gate(tokens)) * up(tokens)
        errors[name] = ((down(h).float() - expected).norm() / expected.norm()).item()
    closest = min(errors, key=errors.__getitem__)
    return closest if errors[closest] < _TOLERANCE else None
