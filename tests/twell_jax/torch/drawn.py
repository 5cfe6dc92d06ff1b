"""Blocks with a sparse pattern on torch tensors, and float64 references of their own."""

import numpy as np

from tests import seeds
from tests.packages import needed

torch = needed("torch")


def operands(m=1024, d=128, h=512, *, gated=True, dtype=torch.bfloat16):
    """x `[m, d]`, w_gate or None, w_up and w_down `[h, d]`; some tokens use many neurons.

    They are multiples of powers of two, so that float32 sums gates without rounding: of none is the
    sign in doubt. The gradients of one that is open in the reference alone may be 4 % of all.
    """
    rng = seeds.rng()
    x = rng.standard_normal((m, d))
    x[:, 0] = -6.0  # with the first features of gates, few of which are then open
    x[::97, 0] = 1.0
    weights = rng.standard_normal((3, h, d)) / np.sqrt(d)
    weights[:2, :, 0] = 0.5
    x, weights = np.round(16 * x) / 16, np.round(1024 * weights) / 1024
    tensors = [torch.tensor(a, dtype=dtype) for a in (x, *weights)]
    if not gated:
        tensors[1] = None
    return tensors


def reference(x, w_gate, w_up, w_down, activation="relu"):
    """y and the mean over tokens of the sums of |h|, in the dtype of the operands."""
    up = x @ w_up.T
    z = up if w_gate is None else x @ w_gate.T
    active = torch.where(z > 0, z * z if activation == "relu2" else z, 0)
    h = active if w_gate is None else active * up
    return h @ w_down, h.abs().sum(dim=1).mean()


def gradients(function, tensors, dy, of_l1=0.5):
    """y, l1 and the gradients of `sum(dy y) + of_l1 l1` for those operands that there are."""
    leaves = [None if a is None else a.detach().clone().requires_grad_() for a in tensors]
    y, l1 = function(*leaves)
    ((dy * y).sum() + of_l1 * l1).backward()
    return y.detach(), l1.detach(), *(a.grad for a in leaves if a is not None)
