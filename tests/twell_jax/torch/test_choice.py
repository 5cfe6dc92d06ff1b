"""Who computes a block of torch's tensors, if the caller leaves the choice."""

import functools

import pytest

from tests.errors import ROUNDING, relative_error
from tests.packages import needed
from tests.twell_jax.torch.drawn import operands

torch = needed("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from twell_jax.ffn.explained import on_device  # noqa: E402
from twell_jax.torch import choice, operator, sparse_ffn  # noqa: E402

pytestmark = pytest.mark.peers

BLOCK = {
    "device": "cuda", "dtype": "bfloat16", "tokens": 8192, "width": 2048, "neurons": 5632,
    "gated": True, "y_alone": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "mosaic"),
        ({"dtype": "float16"}, "mosaic"),
        ({"tokens": 2048, "width": 4096, "neurons": 14336}, "mosaic"),
        ({"tokens": 8191}, "torch"),
        ({"tokens": 4096, "y_alone": True}, "mosaic"),
        ({"tokens": 4095, "y_alone": True}, "torch"),
        ({"tokens": 1023, "width": 16384, "neurons": 53248}, "torch"),
        ({"device": "cpu"}, "torch"),
        ({"dtype": "float32"}, "torch"),
        ({"gated": False}, "torch"),
        ({"width": 2056}, "torch"),  # no multiple of 64
        ({"card": "NVIDIA A100-SXM4-80GB"}, "torch"),
    ],
)
def test_kernels_compute_by_default_where_they_win(changes, expected):
    block = BLOCK | changes
    card = block.pop("card", "NVIDIA H200")
    choice._algorithm.cache_clear()
    with on_device(card):
        assert choice.implementation(**block) == expected
    choice._algorithm.cache_clear()


def test_the_choice_reaches_the_operator(reference_kernels, monkeypatch):
    tensors = operands()
    _, stats = sparse_ffn(*tensors, return_stats=True)
    assert stats.union == -1  # by torch, which does not measure it
    monkeypatch.setattr(choice, "implementation", lambda *_: "mosaic")
    compiled = torch.compile(sparse_ffn, fullgraph=True, backend="aot_eager")
    for block in (sparse_ffn, compiled):
        found = block(*tensors, return_stats=True)[1].nnz.item()
        assert found == pytest.approx(stats.nnz.item(), rel=0.01)
    tensors[0].requires_grad_()
    assert sparse_ffn(*tensors, return_stats=True)[1].union > 0


def step(block, x, weights):
    """Whether kernels computed a step of training, which changes the weights."""
    y, stats = block(x, *weights, return_stats=True)
    gradients = torch.autograd.grad(y.float().square().mean(), weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= 1e-3 * gradient
    return bool(stats.union >= 0)


@pytest.fixture
def by_kernels_at_first(reference_kernels, monkeypatch):
    monkeypatch.setattr(choice, "implementation", lambda *_: "mosaic")
    monkeypatch.setattr(choice, "_DENSE_STEPS", 2)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_does_not_pay_in_training_goes_dense_and_is_tried_again(
    by_kernels_at_first, checkpointed
):
    x, *weights = operands()
    weights = [a.requires_grad_() for a in weights]
    block = sparse_ffn
    if checkpointed:
        block = functools.partial(checkpoint, sparse_ffn, use_reentrant=False)
    assert [step(block, x, weights) for _ in range(3)] == [True] * 3
    with torch.no_grad():
        x[:, 0] = 6.0  # with which most neurons are active
    found = [step(block, x, weights) for _ in range(7)]
    assert found == [True, False, False, True, False, False, True]
    with torch.no_grad():
        x[:, 0] = -6.0
    assert [step(block, x, weights) for _ in range(4)] == [False, False, True, True]


def test_calls_with_the_same_weights_are_computed_alike(by_kernels_at_first):
    x, *weights = operands()
    x[:, 0] = 6.0
    weights = [a.requires_grad_() for a in weights]
    for by_kernels in (True, False):
        for _ in range(3):  # as micro-batches, of which each has its backward
            y, stats = sparse_ffn(x, *weights, return_stats=True)
            y.sum().backward()
            assert (stats.union >= 0) == by_kernels
        with torch.no_grad():
            weights[1] *= 1.01


def test_reentrant_checkpointing_computes_again_what_it_computed(by_kernels_at_first, monkeypatch):
    x, *weights = (a.requires_grad_() for a in operands())
    x.data[:, 0] = 6.0
    calls, computed = [], operator._by_kernels
    monkeypatch.setattr(
        operator, "_by_kernels", lambda *a, **options: calls.append(1) or computed(*a, **options)
    )
    block = functools.partial(sparse_ffn, w_gate=weights[0], w_up=weights[1], w_down=weights[2])
    of_steps = []
    for _ in range(4):
        calls.clear()
        checkpoint(block, x, use_reentrant=True).sum().backward()
        of_steps.append(len(calls))
        with torch.no_grad():
            weights[1] *= 1.01
    assert of_steps == [2, 0, 0, 2]


@pytest.mark.gpu
def test_many_tokens_take_kernels_on_a_gpu():
    x, *weights = (a.cuda() for a in operands(8192, 2048, 5632))
    compiled = torch.compile(sparse_ffn, fullgraph=True)
    for block in (sparse_ffn, compiled):
        for tokens, by_kernels in ((8192, True), (1024, False)):
            with torch.no_grad():
                y, stats = block(x[:tokens], *weights, return_stats=True)
            assert (stats.union >= 0) == by_kernels
            expected = sparse_ffn(x[:tokens], *weights, implementation="torch")
            assert relative_error(y.double().cpu(), expected.double().cpu()) < 4 * ROUNDING
