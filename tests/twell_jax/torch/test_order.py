"""Neurons of torch's blocks in the order of their use."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest

from tests.errors import relative_error
from tests.packages import needed
from tests.twell_jax.torch.drawn import operands

torch = needed("torch")

import twell_jax  # noqa: E402
from twell_jax.torch import SparseMLP, order_by_use  # noqa: E402

pytestmark = pytest.mark.peers

D, H = 128, 512


def made(gated=True, implementation="mosaic"):
    """Two blocks, one after the other, some of whose neurons are active more often."""
    blocks = torch.nn.Sequential(
        *(
            SparseMLP(D, H, gated=gated, implementation=implementation, dtype=torch.bfloat16)
            for _ in range(2)
        )
    )
    for block in blocks:
        _, w_gate, w_up, w_down = operands(gated=gated)
        state = {"up_proj.weight": w_up, "down_proj.weight": w_down.t()}
        block.load_state_dict(state | ({"gate_proj.weight": w_gate} if gated else {}))
    return blocks.train()


def weights_of(blocks):
    return [
        {name.split(".")[0]: p.detach().clone() for name, p in block.named_parameters()}
        for block in blocks
    ]


@pytest.mark.parametrize("gated", [True, False])
def test_neurons_move_together_in_jax_order(reference_kernels, gated):
    blocks, (x, *_) = made(gated), operands()
    y, before, stats = blocks(x), weights_of(blocks), [block.stats for block in blocks]
    order_by_use(blocks)
    for old, new, of in zip(before, weights_of(blocks), stats, strict=True):
        order = np.array(twell_jax.order_by_use(jnp.asarray(of.tiles.numpy()), of.nnz.item()))
        assert (order != np.arange(H)).any()
        for name in old.keys() - {"down_proj"}:
            assert torch.equal(new[name], old[name][order])
        assert torch.equal(new["down_proj"], old["down_proj"][:, order])
    assert relative_error(blocks(x).float().detach(), y.float().detach()) < 0.02


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_training_that_goes_on_is_the_same(reference_kernels, make):
    (x, *_), start = operands(), made()
    options = {"lr": 1e-3} | ({"momentum": 0.9} if make is torch.optim.SGD else {})
    ends = []
    for reorders in (False, True):
        blocks = copy.deepcopy(start)
        optimizer = make(blocks.parameters(), **options)
        for step in range(4):
            (blocks(x).float() ** 2).mean().backward()
            if reorders and step == 1:
                order_by_use(blocks, optimizer)  # also the gradients that are there
            optimizer.step()
            optimizer.zero_grad()
        ends.append(blocks.eval()(x).float().detach())
    assert relative_error(*ends) < 0.02


def test_what_cannot_be_ordered_is_named(reference_kernels):
    blocks, (x, *_) = made(implementation="torch"), operands()
    with pytest.raises(ValueError, match="0 has no statistics: call the model"):
        order_by_use(blocks)
    blocks(x)
    with pytest.raises(ValueError, match=r"^0: torch computed it, .* to 'mosaic'"):
        order_by_use(blocks)
    blocks = made()
    blocks[1].up_proj = blocks[0].up_proj
    blocks(x)
    before = weights_of(blocks)
    with pytest.raises(ValueError, match="two blocks have the same weight"):
        order_by_use(blocks)
    for old, new in zip(before, weights_of(blocks), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
