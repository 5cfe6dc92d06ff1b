"""Drawn operands of a block, the block by `sparse_ffn`, and in float64 by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import seeds
from tests.twell_jax import drawn
from twell_jax import Rectifier, sparse_ffn

THRESHOLD = 2.0  # of "fatrelu"


def silu(z):
    return z / (1 + np.exp(-z))


def silu_slope(z):
    s = 1 / (1 + np.exp(-z))
    return s * (1 + z * (1 - s))


ACTIVATIONS = {  # and their slopes
    "relu": (lambda z: np.maximum(z, 0), lambda z: z > 0),
    "drelu": (lambda z: np.maximum(z, 0), lambda z: z > 0),
    "relu2": (lambda z: np.maximum(z, 0) ** 2, lambda z: 2 * np.maximum(z, 0)),
    "fatrelu": (lambda z: np.where(z > THRESHOLD, z, 0), lambda z: z > THRESHOLD),
    "silu": (silu, silu_slope),
}


def make(lead, d, h, dtype, *, gated=True, bias=False, integers=False):
    shapes = {"x": (*lead, d), "w_gate": (h, d), "w_up": (h, d), "w_down": (h, d)}
    if bias:
        shapes |= {"b_gate": (h,), "b_up": (h,), "b_down": (d,)}
    rng = seeds.rng()
    values = {}
    for name, shape in shapes.items():
        if gated or "gate" not in name:
            values[name] = rng.integers(-1, 2, shape) if integers else rng.normal(size=shape)
    return {name: value.astype(jnp.dtype(dtype)) for name, value in values.items()}


def eager(inputs, *, activation="relu", **options):
    if activation == "fatrelu":
        activation = Rectifier(threshold=THRESHOLD)
    return sparse_ffn(**drawn.arguments(inputs), activation=activation, **options)


call = jax.jit(eager, static_argnames=("activation", "implementation"))


def loss(inputs, dy, dl1, activation="relu"):
    y, stats = call(inputs, activation=activation)
    return jnp.sum(y * dy) + dl1 * stats.l1


gradient = jax.jit(jax.grad(loss), static_argnames="activation")


def reference(inputs, activation):
    """y, l1, nnz, max_nnz, fired in float64, and what a gradient needs."""
    a = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
    up = a["x"] @ a["w_up"].T + a.get("b_up", 0)
    gate = a["x"] @ a["w_gate"].T + a.get("b_gate", 0) if "w_gate" in a else up
    active = ACTIVATIONS[activation][0](gate)
    factor = np.maximum(up, 0) if activation == "drelu" else up
    h = active * factor if "w_gate" in a else active
    nnz = np.count_nonzero(active, axis=-1)
    return {
        "y": h @ a["w_down"] + a.get("b_down", 0),
        "l1": np.abs(h).sum(-1).mean(),
        "nnz": nnz.mean(),
        "max_nnz": nnz.max(),
        "fired": (active != 0).reshape(-1, h.shape[-1]).any(0),
        "parts": (factor, gate, active, h),
    }


def reference_gradient(inputs, activation, dy, dl1):
    """Gradient of sum(dy * y) + dl1 * l1, by hand, for x [tokens, D]."""
    a = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
    factor, gate, active, h = reference(inputs, activation)["parts"]
    slope = ACTIVATIONS[activation][1](gate)
    dh = dy @ a["w_down"].T + dl1 * np.sign(h) / len(a["x"])
    grads = {"w_down": h.T @ dy, "b_down": dy.sum(0)}
    if "w_gate" in a:
        dgate = dh * factor * slope
        dup = dh * active * (factor > 0 if activation == "drelu" else 1)
        grads |= {"w_gate": dgate.T @ a["x"], "b_gate": dgate.sum(0)}
        grads["x"] = dgate @ a["w_gate"] + dup @ a["w_up"]
    else:
        dup = dh * slope
        grads["x"] = dup @ a["w_up"]
    grads |= {"w_up": dup.T @ a["x"], "b_up": dup.sum(0)}
    return {name: grads[name] for name in a}
