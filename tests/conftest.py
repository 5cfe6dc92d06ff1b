"""One seed, eight virtual CPU devices, quick compilation, GPU tests only on Hopper."""

import collections
import gc
import os
import time
import zlib
from pathlib import Path

import hypothesis
import jax
import pytest

from pallas_kernels.kernels import REFERENCE
from tests import seeds
from tests.back_ends import BACK_ENDS
from tests.devices import abstract_gpu
from twell_jax.ffn import dispatch

# Has an effect only on the CPU backend, and only before it starts.
jax.config.update("jax_num_cpu_devices", 8)

# The examples of hypothesis follow from the test's code; --hypothesis-seed draws others.
hypothesis.settings.register_profile("twell", deadline=None, max_examples=40, derandomize=True)
hypothesis.settings.load_profile("twell")


_MAPS, _NEXT_LOOK = Path("/proc/self/maps"), [0.0]


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="what all random numbers follow from")


def pytest_report_header(config):
    return f"seed: {config.getoption('seed')} (others: --seed N)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with seeds.drawn_for(item.nodeid, item.config.getoption("seed")):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Lets compiled programs go before they are too many for Linux.

    Each maps memory, and of 65,530 maps that a process may have, tests of the interpreter alone
    made half in ten minutes. Beyond that LLVM crashes while it compiles another program.
    """
    if time.monotonic() > _NEXT_LOOK[0] and _MAPS.exists():
        _NEXT_LOOK[0] = time.monotonic() + 5
        if _MAPS.read_bytes().count(b"\n") > 30_000:
            jax.clear_caches()
            gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share is drawn for itself, not for the test that asks first."""
    if fixturedef.scope == "function":
        return (yield)
    name = f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param', '')}]"
    with seeds.drawn_for(name, request.config.getoption("seed")):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def quick_compilation(tmp_path_factory):
    """On the CPU most time goes into compiling programs that run for milliseconds.

    Here and in child processes LLVM optimises little (XLA's own passes stay as they are), and no
    program is compiled twice, not even by two workers.
    """
    if jax.default_backend() != "cpu":
        yield
        return
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # that of all workers
    settings = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(directory / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield


@pytest.fixture
def optimised():
    """For code that computes for longer than it compiles."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_measured(tmp_path_factory):
    """What a developer's cache says of blocks does not decide here or in child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWELL_JAX_CACHE", str(tmp_path_factory.mktemp("measured")))
        yield


@pytest.fixture
def serve(monkeypatch):
    """After `serve(*back_ends)`, the first of them that can serves implementation="mosaic"."""
    return lambda *back_ends: monkeypatch.setattr(dispatch, "BACK_ENDS", back_ends)


@pytest.fixture
def reference_kernels(serve):
    """The functions that define the kernels serve implementation="mosaic", on any device."""
    serve(REFERENCE)


@pytest.fixture(params=BACK_ENDS)
def back_end(request, serve):
    """Each back end in turn serves implementation="mosaic"."""
    serve(request.param)
    return request.param


@pytest.fixture
def lower():
    """`lower(function, *operands)` is the text of the function, lowered for an H100 without one."""

    def lower(function, *operands):
        with jax.sharding.use_abstract_mesh(abstract_gpu(shape=(1,), axes=("x",))):
            traced = jax.jit(function).trace(*operands)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    return lower


def pytest_configure():
    gc.disable()  # until all test modules are imported


def pytest_collection_finish():
    gc.enable()
    gc.freeze()  # what is imported stays: collections need not look at it again and again
    gc.set_threshold(50_000)


@pytest.hookimpl(tryfirst=True)  # before `-m` asks for the marks
def pytest_collection_modifyitems(items):
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _has_hopper():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a GPU of compute capability 9.0"))
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("gpu"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_function in cases.values():
        for item in _left_out(of_function):
            item.add_marker(pytest.mark.slow)


def _left_out(cases):
    """Of a function's cases, those that its mark `sampled` leaves to `make test-all`."""
    (number,) = cases[0].get_closest_marker("sampled").args
    quick = [item for item in cases if not item.get_closest_marker("slow")]
    return sorted(quick, key=lambda item: zlib.crc32(item.nodeid.encode()))[number:]


def _has_hopper() -> bool:
    return jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"
