"""`twell_jax.torch.sparse_ffn`: through JAX and by torch alone, against torch in float64."""

import jax
import pytest

import twell_jax
from tests.errors import ROUNDING, relative_error
from tests.packages import needed
from tests.twell_jax.torch.drawn import gradients, operands, reference

torch = needed("torch")

from twell_jax.ffn import CannotServe, Rectifier  # noqa: E402
from twell_jax.ffn.residuals import Way  # noqa: E402
from twell_jax.torch import (  # noqa: E402
    SparseMLP,
    bridge,
    memory,
    operator,
    sparse_ffn,
    streams,
)

pytestmark = pytest.mark.peers

IMPLEMENTATIONS = ("torch", "mosaic")


def by(implementation, **options):
    """The block as a function of its operands, which returns y and l1."""

    def function(*tensors):
        options_of_call = {"implementation": implementation, "return_stats": True, **options}
        y, stats = sparse_ffn(*tensors, **options_of_call)
        return y, stats.l1

    return function


def assert_exact(ours, tensors, dy, **options):
    theirs = gradients(
        lambda *a: reference(*a, **options),
        [a if a is None else a.double() for a in tensors],
        dy.double(),
    )
    for found, expected in zip(ours, theirs, strict=True):
        # Of g, u, h and the gradients of each, and of the result.
        assert relative_error(found.double().cpu(), expected.cpu()) < 4 * ROUNDING


@pytest.mark.parametrize("gradients_of", ["sparse", "dense", 0.3])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_outputs_and_gradients(reference_kernels, implementation, gated, gradients_of):
    tensors = operands(gated=gated)
    dy = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours = gradients(by(implementation, gradients=gradients_of), tensors, dy)
    assert ours[0].dtype == ours[2].dtype == torch.bfloat16 and ours[1].dtype == torch.float32
    assert_exact(ours, tensors, dy)


WAYS = {  # of the backward: the gradients that are asked for, and which tokens have what
    Way.SPARSE: ("sparse", ""),
    Way.SPARSE_AND_FEW: (0.7, "some dense"),
    Way.SPARSE_AND_HEAVY: (1.0, "more dense"),
    Way.RECOMPUTE: (0.01, "some dense"),
    Way.DENSE: ("sparse", "all on all lists"),
    Way.DENSE_AND_HEAVY: ("sparse", "all on all lists, some dense"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_is_the_program_of_its_way(reference_kernels, monkeypatch, way):
    gradients_of, pattern = WAYS[way]
    tensors, known, on_the_host = operands(), [], memory.on_the_host
    x, w_gate, *_ = tensors
    x[:, 0] = -6.0
    if "lists" in pattern:  # a few neurons of each list are active for all tokens
        x[:, 1], w_gate[:, 1] = 1.5, 0.0
        w_gate.view(-1, 64, 128)[:, :8, 1] = 4.0
    if "dense" in pattern:
        x[:: 97 if "some" in pattern else 4, 0] = 1.0
    monkeypatch.setattr(
        memory, "on_the_host", lambda *given: known.append(on_the_host(*given)) or known[-1]
    )
    dy = torch.ones_like(x)
    assert_exact(gradients(by("mosaic", gradients=gradients_of), tensors, dy), tensors, dy)
    ((found, gains),) = known
    assert found == way and gains == (way != Way.RECOMPUTE)  # unions are small


@pytest.mark.parametrize("gradients_of", [0.01, "sparse"])
def test_a_graph_that_is_kept_has_the_same_gradients_twice(reference_kernels, gradients_of):
    x, *weights = (a.requires_grad_() for a in operands())
    y = sparse_ffn(x, *weights, gradients=gradients_of, implementation="mosaic")
    once, again = (torch.autograd.grad(y.sum(), [x, *weights], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, again))


def test_numbers_that_are_not_on_the_host_are_waited_for():
    def read(numbers):
        return int(numbers[1]) if numbers[1] >= 0 else None

    numbers = torch.tensor([4, 7], dtype=torch.int32)
    found = memory.for_the_host(numbers, beside=False)
    assert memory.on_the_host(found, torch.zeros(0), read) == 7
    assert memory.on_the_host(torch.full_like(found, -1), numbers, read) == 7


@pytest.mark.parametrize("number", [0, 5])
def test_a_way_is_known_once_all_its_numbers_are_there(reference_kernels, number):
    x, *weights = (a.requires_grad_() for a in operands())
    programs = bridge.programs("relu", "sparse", (False,) * 4, [x, *weights])
    _, packed, *_ = memory.run(programs.forward, [a.detach() for a in (x, *weights)])
    numbers = packed[programs.deciding].numpy().copy()
    assert programs.choice(numbers) == (Way.SPARSE_AND_FEW, True)
    begin, shape = programs.parts[1]  # lengths of lists
    numbers[begin - programs.deciding.start + number % shape[0]] = -1
    assert programs.choice(numbers) is None


def test_the_activation_and_leading_axes(reference_kernels):
    tensors, by_name = operands(512), sparse_ffn
    x, *weights = tensors
    y, stats = by_name(
        x.reshape(2, 256, -1), *weights, activation="relu2", implementation="mosaic",
        return_stats=True,
    )  # fmt: skip
    expected, l1 = reference(*(a.double() for a in tensors), activation="relu2")
    assert relative_error(y.reshape(512, -1).double(), expected) < 4 * ROUNDING
    assert relative_error(stats.l1.double(), l1) < 4 * ROUNDING
    activation = Rectifier(threshold=0.1, squared=True)
    ours, theirs = (
        sparse_ffn(*tensors, activation=activation, implementation=implementation)
        for implementation in IMPLEMENTATIONS
    )
    assert relative_error(ours.double(), theirs.double()) < 4 * ROUNDING


def test_statistics_are_those_of_torch(reference_kernels):
    tensors = operands()
    tensors[0].requires_grad_()  # with sparse gradients kernels pack unions
    (_, theirs), (_, ours) = (
        sparse_ffn(*tensors, implementation=implementation, return_stats=True)
        for implementation in IMPLEMENTATIONS
    )
    assert abs(ours.nnz - theirs.nnz) < 0.01 * theirs.nnz
    assert (ours.fired != theirs.fired).float().mean() < 0.01
    assert ours.fired.dtype == theirs.fired.dtype == torch.bool
    assert 0 < ours.union <= 1 and theirs.union == -1  # which torch does not measure


def test_weights_are_transposed_before_all_else(reference_kernels):
    """XLA would transpose one where it is used, between kernels that overlap."""
    x, w_gate, w_up, w_down = operands()
    given = [x, w_gate, w_up, w_down.t().contiguous()]
    programs = bridge.programs("relu", "sparse", (False, False, False, True), given)
    traced = programs.infer.trace([memory.to_jax(a) for a in given])
    first, second, *_ = (str(equation.primitive) for equation in traced.jaxpr.eqns)
    assert (first, second) == ("transpose", "optimization_barrier")


def test_few_programs_serve_all_numbers_of_tokens(reference_kernels):
    tensors = operands(1100)
    dy = torch.ones_like(tensors[0])
    assert_exact(gradients(by("mosaic"), tensors, dy), tensors, dy)
    before = bridge._programs.cache_info().misses
    (_, theirs), (_, ours) = (
        sparse_ffn(*tensors, implementation=implementation, return_stats=True)
        for implementation in IMPLEMENTATIONS
    )
    for name in ("nnz", "max_nnz"):
        expected = getattr(theirs, name).item()
        assert getattr(ours, name).item() == pytest.approx(expected, rel=0.01)
    sparse_ffn(*operands(2000), implementation="mosaic")
    assert bridge._programs.cache_info().misses == before


def test_weights_may_be_views_of_their_transpose(reference_kernels):
    tensors = operands()
    dy = torch.ones_like(tensors[0])
    expected = gradients(by("mosaic"), tensors, dy)

    def of_file(x, w_gate, w_up, down_proj):
        return by("mosaic")(x, w_gate, w_up, down_proj.t())

    *others, w_down = tensors
    *ours, of_down = gradients(of_file, [*others, w_down.t().contiguous()], dy)
    for found, same in zip([*ours, of_down.t()], expected, strict=True):
        assert torch.equal(found, same)


def test_gradients_are_those_for_the_views_that_were_given(reference_kernels):
    x, w_gate, w_up, w_down = operands()
    parameter = w_down.t().contiguous().requires_grad_()
    view = parameter.t()
    (of_view,) = torch.autograd.grad(by("mosaic")(x, w_gate, w_up, view)[0].sum(), view)
    with torch.no_grad():
        frozen = parameter.t()
    y, _ = by("mosaic")(x.requires_grad_(), w_gate, w_up, frozen)
    y.sum().backward()
    assert parameter.grad is None and of_view.abs().sum() > 0


def test_nothing_that_torch_has_is_copied_for_the_backward(reference_kernels):
    x, *weights = (a.requires_grad_() for a in operands())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda a: saved.append(a) or a, lambda a: a):
        sparse_ffn(x, *weights, implementation="mosaic")
    pointers = [a.data_ptr() for a in saved]
    assert {a.data_ptr() for a in (x, *weights)} <= set(pointers)
    shapes = [tuple(a.shape) for a in saved if a.data_ptr() not in {x.data_ptr()}]
    assert tuple(x.shape) not in shapes
    assert shapes.count(tuple(weights[0].shape)) == 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reference_kernels, reentrant):
    tensors, block = operands(), by("mosaic")
    dy = torch.ones_like(tensors[0])

    def checkpointed(*leaves):
        return torch.utils.checkpoint.checkpoint(block, *leaves, use_reentrant=reentrant)

    for found, same in zip(
        gradients(checkpointed, tensors, dy), gradients(block, tensors, dy), strict=True
    ):
        assert torch.equal(found, same)


def test_activations_may_be_offloaded(reference_kernels):
    tensors, dy = operands(), torch.ones(1024, 128, dtype=torch.bfloat16)
    expected = gradients(by("mosaic"), tensors, dy)
    with torch.autograd.graph.saved_tensors_hooks(lambda a: [a.clone()], lambda a: a[0].clone()):
        found = gradients(by("mosaic"), tensors, dy)
    for ours, same in zip(found, expected, strict=True):
        assert torch.equal(ours, same)


def test_autocast_casts_operands(reference_kernels):
    tensors = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = sparse_ffn(*tensors, implementation="mosaic")
    expected = sparse_ffn(*(a.bfloat16() for a in tensors), implementation="mosaic")
    assert torch.equal(y, expected)


@pytest.mark.slow
def test_compiled_it_is_one_graph(reference_kernels):
    tensors, dy = operands(), torch.ones(1024, 128, dtype=torch.bfloat16)

    def block(*leaves):
        y, l1 = by("mosaic")(*leaves)
        return y * 2, l1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for found, same in zip(
        gradients(compiled, tensors, dy), gradients(block, tensors, dy), strict=True
    ):
        assert relative_error(found.double(), same.double()) < ROUNDING


def test_compiled_it_takes_any_number_of_tokens():
    compiled = torch.compile(sparse_ffn, fullgraph=True, backend="aot_eager")
    for m in (64, 96, 128):
        tensors = operands(m)
        assert torch.equal(compiled(*tensors), sparse_ffn(*tensors))


def test_operators_are_as_torch_wants_them(reference_kernels):
    upright = [False] * 4
    torch.library.opcheck(operator._infer, ("relu", "sparse", upright, *operands(256)))
    without_gate = operands(256, gated=False)
    for with_stats in (False, True):
        arguments = with_stats, "relu2", "0.5", upright, *without_gate
        torch.library.opcheck(operator._forward, arguments)


def test_a_parameter_may_get_other_memory(reference_kernels):
    mlp = SparseMLP(128, 512, implementation="mosaic", dtype=torch.bfloat16)
    mlp(torch.ones(64, 128).bfloat16())
    with torch.no_grad():  # as `model.to` does
        mlp.up_proj.weight.data = 2 * mlp.up_proj.weight
    x, *given = (a.detach() for a in (torch.ones(64, 128).bfloat16(), *mlp.parameters()))
    expected, _ = reference(*(a.double() for a in (x, *given[:2], given[2].t())))
    assert relative_error(mlp(x).detach().double(), expected) < 4 * ROUNDING


def test_jax_tells_its_stream_and_has_none_on_cpus():
    assert streams.computing(jax.devices("cpu")[0]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "gated"), [(8192, True), (8192, False), (1001, True)])
def test_kernels_on_a_gpu(m, gated, dtype):
    tensors = [
        a if a is None else a.cuda() for a in operands(m, 2048, 5632, gated=gated, dtype=dtype)
    ]
    dy = torch.randn_like(tensors[0])
    ours = gradients(by("mosaic"), tensors, dy)
    assert_exact(ours, tensors, dy)


@pytest.mark.gpu
def test_memory_is_not_kept_and_may_have_other_contents():
    x, *weights = (a.cuda() for a in operands(8192, 2048, 5632))
    expected = sparse_ffn(x, *weights, implementation="mosaic")
    before = torch.cuda.memory_allocated()
    for sign in (-1, 1):
        y = sparse_ffn(sign * x, *weights, implementation="mosaic")  # at the same place each time
        assert torch.cuda.memory_allocated() <= before + y.nbytes
        assert torch.equal(y, expected) == (sign == 1)
    weights[1].mul_(2)
    assert torch.equal(sparse_ffn(x, *weights, implementation="mosaic"), 2 * expected)


@pytest.mark.gpu
def test_torch_and_jax_wait_for_each_other():
    x, *weights = (a.cuda() for a in operands(8192, 2048, 5632))
    expected = sparse_ffn(x, *weights, implementation="mosaic")
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            for _ in range(20):
                busy = x.clone()
                for _ in range(20):
                    busy = busy * 1  # x is made when JAX is asked to read it
                y = sparse_ffn(busy, *weights, implementation="mosaic")
                del busy
                torch.full_like(x, 3.0)  # may take the memory of x
                z = y + 0
                del y
                sparse_ffn(-x, *weights, implementation="mosaic")  # may take that of y
                assert torch.equal(z, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_up": torch.ones(16, 9)}, r"w_up must be \[H, D\], neuron-major, with D=8 as x has it"),
        ({"w_gate": torch.ones(17, 8)}, r"w_gate must be \[H, D\].* H=16 as w_down has it"),
        ({"w_down": torch.ones(16, 8).half()}, "w_down must be torch.float32 on cpu as x is"),
        ({"w_up": None}, "w_up must be a torch.Tensor, got NoneType"),
        ({"x": torch.tensor(1.0)}, r"^x must be \[..., D\], got \[\]"),
        ({"implementation": "xla"}, "implementation must be 'torch', 'mosaic' or None, got 'xla'"),
        ({"activation": "fatrelu"}, "activation 'fatrelu' has a threshold"),
    ],
)
def test_errors_name_the_argument(changes, message):
    w = torch.ones(16, 8)
    given = {"x": torch.ones(4, 8), "w_gate": w, "w_up": w, "w_down": w} | changes
    with pytest.raises(ValueError, match=message):
        sparse_ffn(**given)


def test_shapes_are_found_without_memory():
    x, w = torch.ones(4, 8, device="meta"), torch.ones(16, 8, device="meta")
    y, stats = sparse_ffn(x, w, w, w, return_stats=True)
    assert y.is_meta and y.shape == x.shape and stats.fired.shape == (16,)


def test_kernels_that_cannot_serve_say_why():
    with pytest.raises(CannotServe, match="Hopper"):
        sparse_ffn(*operands(1016), implementation="mosaic")


def test_second_derivatives_of_kernels_are_refused(reference_kernels):
    tensors = [a.requires_grad_() for a in operands()]
    y = sparse_ffn(*tensors, implementation="mosaic").float()
    with pytest.raises(ValueError, match="kernels have no second derivatives"):
        torch.autograd.grad(y.sum(), tensors[0], create_graph=True)


def test_l1_alone_has_gradients_for_tokens_by_columns(reference_kernels):
    x, *weights = operands()
    by_columns = x.t().contiguous().t().requires_grad_()
    for each in (x.requires_grad_(), by_columns):
        _, stats = sparse_ffn(each, *weights, implementation="mosaic", return_stats=True)
        stats.l1.backward()
    torch.testing.assert_close(by_columns.grad, x.grad)


def test_statistics_are_those_of_the_tokens_without_padding(reference_kernels):
    x, *weights = operands(m=1025)
    options = {"implementation": "mosaic", "return_stats": True}
    _, stats = sparse_ffn(x.requires_grad_(), *weights, **options)
    _, expected = twell_jax.sparse_ffn(*(jax.dlpack.from_dlpack(a.detach()) for a in (x, *weights)))
    for name in ("union", "listed", "nnz", "l1"):
        found = getattr(stats, name).item()
        assert found == pytest.approx(float(getattr(expected, name)), rel=0.02), name
