"""The published kernels (arXiv 2603.23198) as blocks of torch, from a checkout of their repository.

Nothing of them is here. Their loaders build an extension for each form at its first call, which
takes minutes and `nvcc`.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

_INFERENCE = "custom_models/twell_modules/twell.py"
_TRAINING = "custom_models/hybrid_modules/sparse_ops_loader.py"


def forward(checkout: Path) -> Callable[..., torch.Tensor]:
    """`block(x, w_gate, w_up, w_down)` by `TwELLGatedMLP`, for inference.

    Raises:
      FileNotFoundError: it is no checkout of that repository.
    """
    twell = _module(checkout / _INFERENCE)
    made: dict[int, Callable] = {}

    def block(x, *weights):
        place = weights[0].data_ptr()
        if place not in made:
            made[place] = twell.TwELLGatedMLP(len(made), *weights)
        return made[place](x)

    return block


def differentiable(checkout: Path) -> Callable[..., torch.Tensor]:
    """`block(x, w_gate, w_up, w_down)` by `sparse_ops.ff_forward_gated`, with its gradients.

    Raises:
      FileNotFoundError: it is no checkout of that repository.
    """
    _module(checkout / _TRAINING).load_sparse_ops()

    def block(x, *weights):
        return torch.ops.sparse_ops.ff_forward_gated(x[None], *weights)[0][0]

    return block


@functools.cache
def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: --published takes a checkout of the published kernels")
    spec = importlib.util.spec_from_file_location(f"published_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
