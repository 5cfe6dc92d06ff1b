import pytest

from pallas_kernels import (
    dense_rows,
    fused_ffn,
    gate_pack,
    gate_union,
    hidden_grads,
    small_m,
    union_down,
    union_plan,
    union_up,
    weight_grads,
)
from twell_jax import ffn_mosaic, ffn_unions


@pytest.fixture
def twins(monkeypatch):
    """The kernels replaced by the functions that define them, to test what is around them."""
    monkeypatch.setattr(ffn_mosaic, "_no_hopper", lambda: None)
    every = gate_pack, fused_ffn, dense_rows, small_m
    of_unions = gate_union, union_plan, union_up, union_down, dense_rows, hidden_grads, weight_grads
    for user, modules in ((ffn_mosaic, every), (ffn_unions, of_unions)):
        for module in modules:
            name = {small_m: "small_m_ffn"}.get(module, module.__name__.split(".")[-1])
            monkeypatch.setattr(user, name, getattr(module, f"{name}_reference"))
    forget()
    yield
    forget()


def forget():
    ffn_mosaic._compute.cache_clear()
    ffn_mosaic._compute_with_sparse_grads.cache_clear()
