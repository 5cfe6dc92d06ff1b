"""Traced programs are found again by other processes, and only where they are the same."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.twell_jax import drawn
from twell_jax.inference import Sampling, generate, generation, traces
from twell_jax.train import compilation_cache

ARGS = np.ones(3, np.float32), {"x": np.float32(4)}
RESULTS = 0, {"sum": 0}


@pytest.fixture
def traced(kept_programs):
    """The directory of traces, as in a command."""
    compilation_cache.enable()
    traces.enable()
    return kept_programs.parent / "traced"


def counting(counts):
    """A function, made anew as in another process, that counts how often it is traced."""

    def double(a, b):
        counts.append(1)
        return 2 * a, {"sum": a + b["x"]}

    return double


def call(counts, args=ARGS, of=("double",), **options):
    jitted = traces.jit(counting(counts), args, of, RESULTS, **options)
    y, more = jitted.call(*args)
    np.testing.assert_array_equal(y, 2 * np.asarray(args[0]))
    np.testing.assert_array_equal(more["sum"], np.asarray(args[0]) + args[1]["x"])
    assert (y.committed, jitted.binds) in ((True, True), (False, False))
    return jitted


def test_a_trace_is_found_again(traced):
    counts = []
    for _ in range(3):
        assert call(counts).binds
    assert len(counts) == 1
    assert len([*traced.iterdir()]) == 1
    assert not traced.stat().st_mode & 0o077


def test_without_a_cache_of_commands_nothing_is_kept(kept_programs):
    traces.enable()
    counts = []
    for _ in range(2):
        assert not call(counts).binds
    assert len(counts) == 2 and not kept_programs.parent.exists()


CHANGES = {
    "the function": {"of": ("twice",)},
    "a shape": {"args": (np.ones(4, np.float32), ARGS[1])},
    "a dtype": {"args": (np.ones(3, np.int32), ARGS[1])},
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_call_has_a_trace_of_its_own(traced, name):
    counts = []
    call(counts)
    call(counts, **CHANGES[name])
    assert len(counts) == 2 and len([*traced.iterdir()]) == 2


@pytest.fixture
def precision():
    before = jax.config.jax_default_matmul_precision
    yield lambda: jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_default_matmul_precision", before)


@pytest.mark.parametrize("name", ["setting", "variable", "flag", "source"])
def test_what_else_decides_counts(traced, precision, name, monkeypatch):
    counts = []
    call(counts)
    if name == "variable":
        monkeypatch.setenv("TWELL_JAX_IMPLEMENTATION", "xla")
    elif name == "flag":
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_graph_enable_concurrent_region=true")
    elif name == "source":
        monkeypatch.setattr(traces, "_software", lambda: "another version")
    else:
        precision()
    call(counts)
    assert len(counts) == 2


def test_a_damaged_file_is_replaced(traced):
    counts = []
    call(counts)
    (path,) = traced.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        path.write_bytes(damaged)
        call(counts)
        assert path.read_bytes()[:32] == whole[:32] or len(path.read_bytes()) > 32
    assert len(counts) == 4
    call(counts)
    assert len(counts) == 4


def test_arguments_are_donated(traced):
    for _ in range(2):
        a, b = jnp.ones(3), {"x": jnp.float32(4)}
        jitted = traces.jit(counting([]), (a, b), ("double",), RESULTS, donate_argnums=0)
        assert jitted.call(a, b)[0].tolist() == [2, 2, 2]
        assert a.is_deleted() and not b["x"].is_deleted()


def test_on_meshes_and_other_devices_nothing_is_kept(traced):
    given = counting([]), ARGS, ("double",), RESULTS
    with jax.set_mesh(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])):
        assert not traces.jit(*given).binds
    function, _, *more = given
    other = jax.device_put(ARGS, jax.devices()[1])
    assert not traces.jit(function, other, *more).binds
    assert not traced.exists()


def test_what_cannot_be_written_leaves_nothing(traced, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    counts = []
    for _ in range(2):
        assert call(counts).binds
    assert len(counts) == 2 and not [*traced.iterdir()]


def test_those_that_were_used_last_stay(traced, monkeypatch):
    monkeypatch.setattr(traces, "_MOST", 2)
    counts = []
    for of in ("first", "second", "first", "third", "first"):
        call(counts, of=(of,))
    assert len(counts) == 3 and len([*traced.iterdir()]) == 2


def test_what_cannot_be_exported_is_jitted(traced):
    def noisy(a):
        return jax.pure_callback(np.negative, a, a)

    jitted = traces.jit(noisy, (np.ones(3, np.float32),), ("noisy",), 0)
    assert not jitted.binds
    np.testing.assert_array_equal(jitted.call(np.ones(3, np.float32)), -np.ones(3))


IN_ONE_LAUNCH = {
    "d_model": 512, "heads": 8, "d_ff": 2176, "dtype": "bfloat16", "param_dtype": "bfloat16",
    "decode_implementation": "mosaic",
}  # fmt: skip


@pytest.mark.parametrize("settings", [{}, pytest.param(IN_ONE_LAUNCH, marks=pytest.mark.gpu)])
def test_a_second_command_generates_the_same_without_tracing(traced, monkeypatch, settings):
    model = drawn.small(vocab_size=257, context=32, **settings)
    calls, decode = [], generation.decode
    monkeypatch.setattr(generation, "decode", lambda *args: (calls.append(1), decode(*args))[1])

    def tokens():
        generation._programs.cache_clear()  # as another process begins
        how = {"max_tokens": 9, "sampling": Sampling(temperature=0.9), "seed": 3}
        return np.stack([*generate(model, [[1, 2, 3], [4]], **how)])

    expected = tokens()
    (_,) = calls
    np.testing.assert_array_equal(tokens(), expected)
    (_,) = calls
    assert len([*traced.iterdir()]) == 2
