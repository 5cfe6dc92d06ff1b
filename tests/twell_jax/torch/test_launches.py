"""Programs of kernels that torch launches: what is read of lowered ones, and where arrays lie."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

from tests import seeds
from tests.packages import needed

torch = needed("torch")

from twell_jax.ffn.explained import on_device  # noqa: E402
from twell_jax.ffn.residuals import Way  # noqa: E402
from twell_jax.torch import bridge, launches, lowered  # noqa: E402

pytestmark = pytest.mark.peers

BLOCK, CPU = (2048, 5632), torch.device("cpu")


def lowered_block(tokens, gated=True, dtype=torch.bfloat16, *, as_in_models=False, way=None):
    """The block for a Hopper GPU as JAX lowers it: in inference, or the backward of a way.

    With weights as in models, w_down is given as its transpose.
    """
    d, h = BLOCK
    shapes = [(tokens, d), (h, d) if gated else None, (h, d), (d, h) if as_in_models else (h, d)]
    tensors = [s and torch.empty(s, dtype=dtype, device="meta") for s in shapes]
    operands = [s and jax.ShapeDtypeStruct(s, jnp.dtype(str(dtype)[6:])) for s in shapes]
    with on_device("NVIDIA H200"):
        transposed = (False, False, False, as_in_models)
        programs = bridge.programs("relu", "sparse", transposed, tensors)
        if way is None:
            traced = programs.infer.trace(operands)
        else:
            y, _, *large, of_sum = programs.results
            parts = [jax.ShapeDtypeStruct(shape, jnp.int32) for _, shape in programs.parts]
            traced = programs.backward(way).trace(operands, parts, large, y, of_sum)
        return traced.lower(lowering_platforms=("cuda",)).compiler_ir()


def assert_all_that_is_read_was_written(listing):
    arrays, known = listing.arrays, set(range(listing.operands))
    known |= {n for n, a in enumerate(arrays) if a.is_zero}
    for kernel in listing.kernels:
        in_place = set(kernel.operands).intersection(kernel.results)  # may be empty memory
        assert known.issuperset(set(kernel.operands) - in_place)
        known.update(kernel.results)
    assert known.issuperset(listing.results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("as_in_models", [True, False])
@pytest.mark.parametrize("tokens", [1, 8, 64, 1024, 16384])
def test_the_block_in_inference_is_kernels_alone(tokens, as_in_models, gated, dtype):
    listing = lowered.read(lowered_block(tokens, gated, dtype, as_in_models=as_in_models))
    assert listing.operands == 3 + gated
    assert_all_that_is_read_was_written(listing)
    (y,) = (listing.arrays[n] for n in listing.results)
    assert (y.shape, y.dtype) == ((tokens, BLOCK[0]), jnp.dtype(str(dtype)[6:]))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("as_in_models", [True, False])
def test_the_usual_backward_is_kernels_alone(as_in_models, gated):
    module = lowered_block(8192, gated, as_in_models=as_in_models, way=Way.SPARSE)
    listing = lowered.read(module)
    assert_all_that_is_read_was_written(listing)
    (d, h), arrays = BLOCK, [listing.arrays[n] for n in listing.results]
    weights = [(h, d)] * (1 + gated) + [(d, h) if as_in_models else (h, d)]
    assert [a.shape for a in arrays] == [(8192, d), *weights]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("as_in_models", [True, False])
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_the_forward_without_statistics_is_kernels_alone(monkeypatch, tokens, as_in_models, gated):
    monkeypatch.setattr(launches.mgpu.core, "_ABI_V2", False, raising=False)
    monkeypatch.setattr(launches, "_launch", lambda module, device: order.append)
    listings, program, order = [], launches.program, []
    monkeypatch.setattr(
        launches,
        "program",
        lambda listing, *rest: listings.append(listing) or program(listing, *rest),
    )
    (d, h), transposed = BLOCK, (False, False, False, as_in_models)
    shapes = [(tokens, d), (h, d) if gated else None, (h, d), (d, h) if as_in_models else (h, d)]
    tensors = [s and torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes]
    with on_device("NVIDIA H200"):
        programs = bridge.programs("relu", "sparse", transposed, tensors)
        made = programs.launched_forward(CPU)
    assert_all_that_is_read_was_written(listings[0])
    like = programs.results[:-1]  # without l1
    assert [make().shape for make in made.tensors[2:]] == [a.shape for a in like]
    assert 3 <= made.soon <= 5  # of about ten: the unions are known before they are computed


@pytest.mark.parametrize("options", [{"tokens": 100}, {"tokens": 8192, "way": Way.DENSE}])
def test_a_program_with_other_operations_is_left_to_jax(options):
    with pytest.raises(lowered.NotOnlyKernels, match=r"stablehlo\."):
        lowered.read(lowered_block(**options))


def parsed(body, arguments="%a: tensor<4xf32>, %b: tensor<4xf32>", results=1):
    """A function of this body, which returns arrays of four."""
    context = jax.jit(jnp.negative).lower(0.0).compiler_ir().context  # which knows the dialects
    types = ", ".join(["tensor<4xf32>"] * results)
    text = f"func.func @main({arguments}) -> ({types}) {{\n{body}\n}}"
    with context:
        return ir.Module.parse(text)


ALIAS = (
    "output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = [], "
    "operand_index = {}, operand_tuple_indices = []>], "
)


def kernel(name, result, *inputs, in_place=None):
    """A line that calls a kernel on arrays of four."""
    types = ", ".join("tensor<4xf32>" for _ in inputs)
    alias = "" if in_place is None else ALIAS.format(in_place)
    return (
        f"{result} = stablehlo.custom_call @mosaic_gpu_v2({', '.join(inputs)}) "
        f'{{{alias}mhlo.backend_config = {{module = "{name}"}}}} : ({types}) -> tensor<4xf32>'
    )


RETURN = "return %y : tensor<4xf32>"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([kernel("add", "%y", "%a", "%b", in_place=0)], "changes an operand of the program"),
        (
            [
                kernel("add", "%c", "%a", "%b"),
                kernel("add", "%d", "%c", "%b", in_place=0),
                kernel("add", "%y", "%c", "%d"),
            ],
            "after a kernel has changed it",
        ),
        (["%y = stablehlo.add %a, %b : tensor<4xf32>"], "stablehlo.add"),
        (
            [kernel("add", "%y", "%a", "%b").replace("mosaic_gpu_v2", "else")],
            "stablehlo.custom_call @else",
        ),
        (
            [kernel("add", "%c", "%a", "%b"), kernel("add", "%y", "%c", "%c", in_place=0)],
            "that it also has as another",
        ),
        (["%y = stablehlo.constant dense<0.0> : tensor<4xf32>"], "a result is none of a kernel"),
        (
            [
                "%c = stablehlo.constant dense<2.0> : tensor<4xf32>",
                kernel("add", "%y", "%a", "%c"),
            ],
            "stablehlo.constant",
        ),
        (
            [
                "%c = stablehlo.constant dense<2.0> : tensor<f32>",
                "%d = stablehlo.pad %a, %c, low = [1], high = [-1], interior = [0] : "
                "(tensor<4xf32>, tensor<f32>) -> tensor<4xf32>",
                kernel("add", "%y", "%d", "%b"),
            ],
            "stablehlo",
        ),
    ],
)
def test_what_kernels_cannot_do_is_refused(lines, message):
    with pytest.raises(lowered.NotOnlyKernels, match=message):
        lowered.read(parsed("\n".join([*lines, RETURN])))


@pytest.mark.parametrize("with_l1", [True, False])
def test_each_operand_of_the_usual_backward_has_its_place(monkeypatch, with_l1):
    monkeypatch.setattr(launches.mgpu.core, "_ABI_V2", False, raising=False)
    found = set()

    def launch(addresses, _stream):
        if not found:  # by the first kernel, which those of all begin with
            found.update(array_at(addresses, ctypes.c_uint64, len(made.places)).tolist())

    monkeypatch.setattr(launches, "_launch", lambda module, device: launch)
    tensors = [torch.empty(8192, 2048, dtype=torch.float16, device="meta")] * 4
    with on_device("NVIDIA H200"):
        programs = bridge.programs("relu", "sparse", (False,) * 4, tensors)
        made = programs.launched_backward(Way.SPARSE, CPU, with_l1)
    _, _, *large, _ = programs.results
    given = 2**40 * np.arange(1, 4 + len(programs.parts) + len(large) + 2 + with_l1)
    x, *_, of_y, last = map(int, given)
    of_y = of_y if with_l1 else last
    gradients = made.run([*map(int, given)], 0)
    assert [a.shape for a in gradients] == 4 * [(8192, 2048)]
    assert {x, of_y} <= found and (last in found)  # kernels read them where they are
    assert {a.data_ptr() for a in gradients} <= found


def array_at(address, kind=ctypes.c_float, size=4):
    return np.ctypeslib.as_array((kind * size).from_address(address))


def add(addresses, _stream):
    x, y, z = map(array_at, map(int, array_at(addresses, ctypes.c_uint64, 3)))
    z[:] = x + y


@pytest.fixture
def on_the_host(monkeypatch):
    """Kernels named "add" add arrays in the host's memory."""
    monkeypatch.setattr(launches, "_launch", lambda module, device: {b"add": add}[module])


def addresses(*tensors):
    return [a.data_ptr() for a in tensors]


def test_each_call_has_zeros_of_its_own_and_keeps_operands(on_the_host):
    lines = [
        "%z = stablehlo.constant dense<0.0> : tensor<4xf32>",
        kernel("add", "%c", "%a", "%b"),
        kernel("add", "%d", "%c", "%z"),
        kernel("add", "%e", "%z", "%d", in_place=0),  # which are then no zeros any more
        "%dead = stablehlo.add %e, %d : tensor<4xf32>",
        kernel("add", "%y", "%z", "%e", in_place=0),
        RETURN,
    ]
    made = launches.program(lowered.read(parsed("\n".join(lines))), CPU)
    for _ in range(3):
        a, b = torch.from_numpy(seeds.rng().standard_normal((2, 4)).astype(np.float32))
        kept = a.clone(), b.clone()
        (y,) = made.run(addresses(a, b), 0)
        assert torch.equal(y, a + b)
        assert torch.equal(a, kept[0]) and torch.equal(b, kept[1])


def test_what_is_needed_soon_comes_first_and_lies_together(on_the_host):
    lines = [
        kernel("add", "%c", "%a", "%a"),
        kernel("add", "%later", "%a", "%b"),
        kernel("add", "%read", "%c", "%b"),  # before %c changes, so it cannot come later
        kernel("add", "%soon", "%c", "%b", in_place=0),
        kernel("add", "%y", "%later", "%read"),
        "return %y, %soon, %later : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>",
    ]
    listing = lowered.read(parsed("\n".join(lines), results=3))
    made = launches.program(listing, CPU, launches.Together(1, (8,), 32, 1))
    a, b = torch.from_numpy(seeds.rng().standard_normal((2, 4)).astype(np.float32))
    seen = []
    y, packed, later = made.run(
        addresses(a, b),
        0,
        lambda results: seen.append(results[1][8:12].view(torch.float32).clone()),
    )
    assert made.soon == 3
    assert torch.equal(seen[0], a + a + b) and torch.equal(
        packed[8:12].view(torch.float32), seen[0]
    )
    assert torch.equal(later, a + b) and torch.equal(y, later + (a + a + b))


@pytest.mark.parametrize("seed", range(5))
def test_arrays_share_memory_only_if_none_is_needed_any_more(on_the_host, seed):
    rng = np.random.default_rng([seeds.integer(), seed])
    names, lines = ["%a", "%b"], []
    expected = dict(zip(names, rng.standard_normal((2, 4)).astype(np.float32), strict=True))
    inputs = [torch.from_numpy(expected[name].copy()) for name in names]
    for number in range(30):
        x, y = rng.choice(names[-6:], 2)
        new = "%y" if number == 29 else f"%v{number}"
        lines.append(kernel("add", new, x, y))
        expected[new] = expected[x] + expected[y]
        names.append(new)
    listing = lowered.read(parsed("\n".join([*lines, RETURN])))
    made = launches.program(listing, CPU)
    (y,) = made.run(addresses(*inputs), 0)
    np.testing.assert_array_equal(y.numpy(), expected["%y"])
    _, common, *_ = made.tensors
    assert len(common()) <= 7 * 256  # as few as are needed at a time
