"""Kernels that torch launches, on a GPU, against torch in float64."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.errors import ROUNDING, relative_error
from tests.packages import needed
from tests.twell_jax.torch.drawn import operands, reference

torch = needed("torch")

from twell_jax.torch import launches, sparse_ffn  # noqa: E402

pytestmark = pytest.mark.peers

BLOCK = (2048, 5632)


def on_the_gpu(tokens, gated=True):
    return [a if a is None else a.cuda() for a in operands(tokens, *BLOCK, gated=gated)]


def assert_exact(y, tensors):
    expected, _ = reference(*(a if a is None else a.double() for a in tensors))
    assert relative_error(y.double().cpu(), expected.cpu()) < 4 * ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 64, 1024, 5000, 16384])
def test_a_gpu_computes_the_block(tokens, gated):
    tensors = on_the_gpu(tokens, gated)
    for _ in range(2):  # of which the second finds NaN in all memory
        torch.full((2**28,), torch.nan, device="cuda")
        assert_exact(sparse_ffn(*tensors, implementation="mosaic"), tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [2048, 5000, 16384])
@pytest.mark.parametrize("dense", [False, True])  # tokens, with which JAX computes the backward
def test_a_gpu_computes_both_passes_of_several_layers(monkeypatch, tokens, gated, dense):
    tensors, launched, run = on_the_gpu(tokens, gated), [], launches.Program.run
    if not dense:
        tensors[0][:, 0] = -6.0
    dy = torch.randn_like(tensors[0])
    monkeypatch.setattr(
        launches.Program, "run", lambda self, *given: launched.append(self) or run(self, *given)
    )
    layers = [[a if a is None else a.clone().requires_grad_() for a in tensors] for _ in range(3)]
    expected = reference_gradients(tensors, dy)
    for _ in range(2):  # of which the second finds NaN in all memory, and all programs compiled
        torch.full((2**29,), torch.nan, device="cuda")
        launched.clear()
        ys = [sparse_ffn(*layer, implementation="mosaic") for layer in layers]
        for y, layer in zip(ys, layers, strict=True):  # the first layer's backward comes first
            given = [a for a in layer if a is not None]
            for found, a in zip([y, *torch.autograd.grad(y, given, dy)], expected, strict=True):
                found, a = (tensor.detach().double().cpu() for tensor in (found, a))
                assert relative_error(found, a) < 4 * ROUNDING
        assert len({id(program) for program in launched}) == (1 if dense else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("with_stats", [False, True])  # JAX launches the forward
def test_each_gpu_computes_its_own(with_stats):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors, found = on_the_gpu(8192), []
    dy = torch.randn_like(tensors[0])
    expected = reference_gradients(tensors, dy)
    for device in ("cuda:1", "cuda:0", "cuda:1"):  # the current device is the other one, too
        layer = [a.to(device).requires_grad_() for a in tensors]
        y = sparse_ffn(*layer, implementation="mosaic", return_stats=with_stats)
        y = y[0] if with_stats else y
        found.append([y, *torch.autograd.grad(y, layer, dy.to(device))])
    for results in found:
        for ours, theirs in zip(results, expected, strict=True):
            ours, theirs = (a.detach().double().cpu() for a in (ours, theirs))
            assert relative_error(ours, theirs) < 4 * ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [0, 40])  # torch has 32, of which one then has to wait
def test_a_copy_to_the_host_keeps_its_memory(streams):
    """Though what it is a copy of is put elsewhere before it is made."""
    layers = [[a.requires_grad_() for a in on_the_gpu(4096)] for _ in range(3)]
    for x, *_ in layers[1:]:
        x.data[:, 0] = -6.0  # no dense token, so another way than the first layer's
    expected = [torch.autograd.grad(by_kernels(layer).sum(), layer) for layer in layers]
    for _ in range(streams):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10**8)
    with torch.autograd.graph.save_on_cpu():
        ys = [by_kernels(layer) for layer in layers]
    for y, layer, gradients in zip(ys, layers, expected, strict=True):
        found = torch.autograd.grad(y.sum(), layer)
        for pair in zip(found, gradients, strict=True):
            assert relative_error(*(a.double().cpu() for a in pair)) < 2 * ROUNDING


def by_kernels(layer):
    return sparse_ffn(*layer, implementation="mosaic")


def reference_gradients(tensors, dy):
    given = [a if a is None else a.double().requires_grad_() for a in tensors]
    y, _ = reference(*given)
    return [y, *torch.autograd.grad(y, [a for a in given if a is not None], dy.double())]


@pytest.mark.gpu
def test_a_thread_that_has_done_nothing_else_can_launch():
    x, *weights = on_the_gpu(8)
    expected = sparse_ffn(x, *weights, implementation="mosaic")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(sparse_ffn, x, *weights, implementation="mosaic")
    assert torch.equal(call.result(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 2048])
def test_a_cuda_graph_holds_the_block(tokens):
    x, *weights = on_the_gpu(tokens)
    sparse_ffn(x, *weights, implementation="mosaic")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse_ffn(x, *weights, implementation="mosaic")
    for sign in (-1, 1, -1):
        x.mul_(sign)
        y.fill_(torch.nan)
        graph.replay()
        assert_exact(y, [x, *weights])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "calls", "message"),
    [(2048, 0, "call the block once with these shapes before"), (100, 1, "JAX launches this call")],
)
def test_a_cuda_graph_is_refused_what_it_cannot_hold(tokens, calls, message):
    tensors = [a.cuda() for a in operands(tokens, 2048, 4096)]  # as no other test has
    for _ in range(calls):
        sparse_ffn(*tensors, implementation="mosaic")
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        sparse_ffn(*tensors, implementation="mosaic")
