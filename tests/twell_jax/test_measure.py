"""python -m twell_jax.measure, with kernels' definitions in place of the kernels."""

import time
from dataclasses import replace
from functools import partial

import jax
import pytest

from pallas_kernels.kernels import REFERENCE
from tests.back_ends import changed
from tests.errors import relative_error
from tests.twell_jax import drawn
from twell_jax import measure
from twell_jax.analysis import blocks, timing, whole_models
from twell_jax.analysis.blocks import Times
from twell_jax.analysis.programs import Program, compiled
from twell_jax.analysis.whole_models import Work
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.ffn import measured
from twell_jax.ffn.measured import Block
from twell_jax.models.pretrained import save_pretrained


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TWELL_JAX_CACHE", str(tmp_path))


@pytest.fixture
def few(monkeypatch):
    """Few calls, of few tokens."""
    monkeypatch.setattr(measure, "measure", partial(blocks.measure, tokens=(3, 300)))
    monkeypatch.setattr(blocks, "BACKWARD", (300,))


def traced(programs):
    """What traces the programs, which is quicker than to compile them."""
    return {key: partial(one.jitted.eval_shape, *one.static) for key, one in programs.items()}


@pytest.mark.parametrize("compiled", [traced, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gated", [[], pytest.param(["--no-gate"], marks=pytest.mark.slow)])
def test_a_block_is_timed_and_kept(reference_kernels, few, monkeypatch, capsys, gated, compiled):
    ms = iter([6.0, 3.0, 16.0, 20.0, 12.0, 8.0])  # forward four layers take turns

    def milliseconds(run, **_):
        jax.block_until_ready(run())
        return next(ms)

    monkeypatch.setattr(timing, "milliseconds", milliseconds)
    if compiled is not None:
        monkeypatch.setattr(blocks, "compiled", compiled)
    measure.main(["128", "256", *gated])
    shown = capsys.readouterr().out
    assert "Kernels help: 3 tokens 1.5x, forward and backward of 300 2.0x." in shown
    device = jax.devices()[0].device_kind
    assert f"kept: {measured.file_of(device)}" in shown
    found = measured.of(device, Block(128, 256, not gated, "bfloat16"))
    assert found.forward == {
        3: {"dense": 3.0, "few_tokens": 2.0},
        300: {"dense": 4.0, "dense_block": 5.0},
    }
    assert found.both == {300: {"dense": 6.0, "sparse": 3.0}}


def test_all_algorithms_compute_the_same(reference_kernels):
    block = Block(128, 256, True, "bfloat16")
    x, layers = blocks.draw(block, 300, 1)
    kernels = blocks.dispatch.BACK_ENDS[0]
    dense, *others = (
        blocks._stack(kernels, name, x, layers)[0] for name in ("dense", "dense_block", "unions")
    )
    for other in others:
        assert abs(other - dense).max() < 0.05 * abs(dense).max()


def test_without_a_gpu_it_says_so_at_once():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(
        SystemExit,
        match=r"^error: it needs an Ampere, Ada, Hopper or RTX Blackwell GPU, got cpu$",
    ):
        measure.main(["2048", "5632"])


@pytest.mark.parametrize(
    ("arguments", "says"), [(["0", "1"], "must be at least 1"), (["a", "1"], "must be an integer")]
)
def test_wrong_widths_are_named(arguments, says, capsys):
    with pytest.raises(SystemExit):
        measure.main(arguments)
    assert says in capsys.readouterr().err


def test_a_block_that_gains_nothing_is_said():
    times = [Times(8, {"dense": 1.0, "few_tokens": 2.0}, {}), Times(4096, {"dense": 1.0}, {})]
    assert measure.sentence(times) == "Kernels do not help this block here."


MODEL = {
    "vocab_size": 257, "context": 16, "d_model": 128, "layers": 2, "heads": 2, "d_ff": 256,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """A directory with a model, and a text for it."""
    save_pretrained(tmp_path / "model", drawn.transformer(**MODEL), ByteTokenizer())
    (tmp_path / "a.txt").write_text("A text, which the model reads again and again.", "utf-8")
    return [str(tmp_path / "model"), "--text", str(tmp_path / "a.txt")]


@pytest.mark.slow
def test_a_model_is_timed_on_a_text(serve, model, monkeypatch, capsys):
    serve(changed(REFERENCE, name="Hopper"))  # as if it was measured
    monkeypatch.setattr(measure, "TOKENS", 64)
    seen, ms = [], iter([6.0, 2.0, 3.0, 2.0, *(4 * [1.0, 1.0])])

    def milliseconds(run, **_):
        run()
        seen.append(jax.device_get(jax.tree.leaves(run())))
        return next(ms)

    monkeypatch.setattr(timing, "milliseconds", milliseconds)
    measure.main([*model, "--all"])
    shown = capsys.readouterr().out
    assert "Kernels help: forward and backward of 4 x 16 3.0x, score 4 x 16 1.5x." in shown
    assert "256 tokens use, of the neurons of each layer: " in shown
    assert len(seen) == 12
    for dense, default in zip(seen[::2], seen[1::2], strict=True):
        for one, other in zip(dense, default, strict=True):
            assert relative_error(other.astype(float), one.astype(float)) < 0.03
            assert one.any()


@pytest.mark.parametrize("everything", [False, True])
def test_works_that_would_take_too_long_are_named(serve, model, monkeypatch, capsys, everything):
    serve(changed(REFERENCE, name="Hopper"))
    monkeypatch.setattr(measure, "SECONDS", -1)
    works = dict.fromkeys(["step", "score", "decode", "read"])
    monkeypatch.setattr(whole_models, "works", lambda *_: works)
    monkeypatch.setattr(
        whole_models, "measure", lambda works: ([Work(name, 3.0, 2.0) for name in works], [])
    )
    monkeypatch.setattr(whole_models, "needs", lambda *_: ([0.1, 0.1], [0.1, 0.1]))
    measure.main([*model, *["--all"] * everything])
    shown = capsys.readouterr().out
    assert ("s had passed: read; --all measures it" in shown) != everything
    help_ = "Kernels help: step 1.5x, score 1.5x, decode 1.5x"
    assert (f"{help_}, read 1.5x." if everything else f"{help_}.") in shown


def test_a_work_that_memory_does_not_hold_is_named(serve, model, monkeypatch, capsys):
    serve(changed(REFERENCE, name="Hopper"))
    one = Program(jax.jit(lambda: 0), (), (), True, calls=1)
    works = {"step": (one, replace(one, dense=False)), "score": (one, replace(one, dense=False))}
    monkeypatch.setattr(whole_models, "works", lambda *_: works)
    monkeypatch.setattr(whole_models, "needs", lambda *_: ([0.1, 0.1], [0.1, 0.1]))
    ms = iter([jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 3.0, 2.0])

    def milliseconds(run, **_):
        if isinstance(found := next(ms), Exception):
            raise found
        return found

    monkeypatch.setattr(timing, "milliseconds", milliseconds)
    measure.main(model)
    shown = capsys.readouterr().out
    assert "not measured, as memory does not suffice: step" in shown
    assert "Kernels help: score 1.5x." in shown


def test_dense_programs_are_compiled_first_and_alone():
    """XLA times its choices for matrix products on the GPU."""
    log = []

    class Lowered:
        def __init__(self, name):
            self.name = name

        def compile(self):
            log.append(f"begin {self.name}")
            time.sleep(0.05)
            log.append(f"end {self.name}")
            return lambda *args: (self.name, *args)

    class Jitted:
        def lower(self, name, *_):
            return Lowered(name)

    programs = {
        name: Program(Jitted(), (name,), (7,), name.startswith("dense"), 1) for name in NAMES
    }
    found = compiled(programs)
    dense = [f"{what} {name}" for name in NAMES[1::2] for what in ("begin", "end")]
    assert log[: len(dense)] == dense
    assert [programs[name].caller(found[name])() for name in NAMES] == [(name, 7) for name in NAMES]


NAMES = ["sparse 1", "dense 1", "sparse 2", "dense 2"]


def test_a_carried_argument_is_that_of_the_call_before():
    count = jax.jit(lambda n, total: (total * 1, total + n), donate_argnums=1)
    program = Program(count, (), (2,), True, 1, lambda: jax.numpy.int32(5))
    run = program.caller(compiled({0: program})[0])
    results = [run() for _ in range(3)]
    assert jax.device_get(results) == [[5], [7], [9]]  # nothing of them is deleted


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda model: ["7", "8", "--all"],
            "--no-gate and --dtype are for a block, --all for a model",
        ),
        (
            lambda model: [*model, "--no-gate"],
            "--no-gate and --dtype are for a block, --all for a model",
        ),
        (lambda model: [model[0]], "give either D and H, or a model and --text FILE"),
        (lambda model: ["7", *model], "give either D and H, or a model and --text FILE"),
        (lambda model: ["7", "8", *model], "give either D and H, or a model and --text FILE"),
        (lambda model: [*model, "--dtype", "float16"], "--no-gate and --dtype are for a block, "),
        (lambda model: [model[0], "--text", "none.txt"], "No such file or directory: 'none.txt'"),
        (lambda model: ["/none", *model[1:]], "'/none': there is no such directory"),
        (
            lambda model: model,
            "it needs an Ampere, Ada, Hopper or RTX Blackwell GPU, got cpu",
        ),
    ],
)
def test_what_cannot_be_timed_is_named(model, change, says, capsys):
    if "Hopper" in says and jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as ended:
        measure.main(change(model))
    assert says in f"{ended.value}{capsys.readouterr().err}"
