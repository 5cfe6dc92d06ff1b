"""Activations other than ReLU, and a block with one in float64 by hand."""

import numpy as np

from twell_jax import Rectifier

THRESHOLD = 0.7  # no number of 16 bits
CASES = {  # activation, whether there is a gate
    "relu2": ("relu2", True),
    "relu2-plain": ("relu2", False),
    "fatrelu": ("fatrelu", True),
    "fatrelu-plain": ("fatrelu", False),
    "drelu": ("drelu", True),
}


def options(case):
    activation, _ = CASES[case]
    is_named = activation != "fatrelu"
    return {"activation": activation if is_named else Rectifier(threshold=THRESHOLD)}


def by_hand(case, x, w_gate, w_up, w_down, dy=None):
    """(y, g, |h| summed, gradients of sum(y dy) + l1) in float64; z is rounded to the dtype of x,
    as it must be before it meets a threshold."""
    activation, gated = CASES[case]
    dtype = x.dtype
    x, w_up, w_down = (a.astype(np.float64) for a in (x, w_up, w_down))
    w_gate = w_gate.astype(np.float64) if gated else w_up
    z, u = (x @ w_gate.T).astype(dtype).astype(np.float64), x @ w_up.T
    kept = z > THRESHOLD * (activation == "fatrelu")
    g, slope = np.where(kept, z, 0), kept.astype(float)
    if activation == "relu2":
        g, slope = g * g, 2 * g
    passes = np.where(u > 0, 1, 0) if activation == "drelu" else 1
    h = g * u * passes if gated else g
    y, l1 = h @ w_down, np.abs(h).sum(axis=1)
    if dy is None:
        return y, g, l1, None
    dh = dy @ w_down.T + np.sign(h) / len(x)
    dz = dh * slope * (u * passes if gated else 1)
    du = dh * g * passes
    dx = dz @ w_gate + (du @ w_up if gated else 0)
    d_weights = [dz.T @ x, du.T @ x] if gated else [None, dz.T @ x]
    return y, g, l1, [dx, *d_weights, h.T @ dy]
