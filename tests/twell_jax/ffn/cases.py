"""What the tests of `sparse_ffn` on kernels draw and compare."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.hopper import (
    dense_rows,
    fused_ffn,
    gate_pack,
    gate_union,
    hidden_grads,
    union_down,
    union_plan,
    union_up,
    weight_grads,
)
from pallas_kernels.hopper import few_tokens as small_m
from twell_jax import sparse_ffn
from twell_jax.ffn import mosaic as ffn_mosaic
from twell_jax.ffn import unions as ffn_unions

both_forms = pytest.mark.parametrize("form", ["twell", "unions"])
xla = functools.partial(sparse_ffn, implementation="xla")

TOKENS, COLUMNS = P(("data", "fsdp")), P(None, "fsdp")


def use_twins(setattr):
    """Replaces the kernels by the functions that define them."""
    setattr(ffn_mosaic, "_no_hopper", lambda: None)
    every = gate_pack, fused_ffn, dense_rows, small_m
    of_unions = gate_union, union_plan, union_up, union_down, dense_rows, hidden_grads, weight_grads
    for user, modules in ((ffn_mosaic, every), (ffn_unions, of_unions)):
        for module in modules:
            name = {small_m: "small_m_ffn"}.get(module, module.__name__.split(".")[-1])
            setattr(user, name, getattr(module, f"{name}_reference"))


def draw(m, d, h, *, gated=True, dtype=jnp.bfloat16, threshold=2.2):
    """(x, w_gate, w_up, w_down) whose gates fire above `threshold` standard deviations.

    The last feature of x is 1; -1 there makes a token fire nearly everything, 0 half.
    """
    rng = np.random.default_rng()
    x, w_gate, w_up, w_down = (rng.standard_normal(s) for s in ((m, d), *3 * [(h, d)]))
    x[:, -1] = 1
    for w in (w_gate, w_up, w_down):
        w /= d**0.5
    (w_gate if gated else w_up)[:, -1] = -threshold
    arrays = [jnp.asarray(a, dtype) for a in (x, w_gate, w_up, w_down)]
    return arrays if gated else [arrays[0], None, *arrays[2:]]


def error(out, ref):
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return np.linalg.norm(out - ref) / (np.linalg.norm(ref) or 1)


def gradients(implementation, operands, dy, **options):
    """Those of sum(y dy) + l1 for the operands that there are; y and the stats."""

    def loss(operands):
        y, stats = sparse_ffn(*operands, implementation=implementation, **options)
        return jnp.sum(y.astype(jnp.float32) * dy) + stats.l1, (y, stats)

    return jax.grad(loss, has_aux=True)(operands)
