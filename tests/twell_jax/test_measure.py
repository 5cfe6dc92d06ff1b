"""python -m twell_jax.measure, with kernels' definitions in place of the kernels."""

from functools import partial

import jax
import pytest

from twell_jax import measure
from twell_jax.analysis import blocks, timing
from twell_jax.analysis.blocks import Times
from twell_jax.ffn import measured
from twell_jax.ffn.measured import Block


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TWELL_JAX_CACHE", str(tmp_path))


@pytest.fixture
def few(monkeypatch):
    """Few calls, of few tokens."""
    monkeypatch.setattr(measure, "measure", partial(blocks.measure, tokens=(3, 300)))
    monkeypatch.setattr(blocks, "BACKWARD", (300,))
    monkeypatch.setattr(blocks, "LAYERS", 1)
    ms = iter([3.0, 2.0, 4.0, 5.0, 8.0, 6.0, 3.0])
    monkeypatch.setattr(
        timing, "milliseconds", lambda run, *operands, **_: called(run, *operands, ms)
    )


def called(run, x, layers, ms):
    jax.block_until_ready(run(x, layers))
    return next(ms)


@pytest.mark.parametrize("gated", [[], ["--no-gate"]])
def test_a_block_is_timed_and_kept(reference_kernels, few, capsys, gated):
    measure.main(["128", "256", *gated])
    shown = capsys.readouterr().out
    assert "Kernels help: 3 tokens 1.5x, forward and backward of 300 2.0x." in shown
    device = jax.devices()[0].device_kind
    assert f"kept: {measured.file_of(device)}" in shown
    found = measured.of(device, Block(128, 256, not gated, "bfloat16"))
    assert found.milliseconds == {
        3: {"dense": 3.0, "few_tokens": 2.0},
        300: {"dense": 4.0, "dense_block": 5.0, "unions": 8.0},
    }


def test_all_algorithms_compute_the_same(reference_kernels):
    block = Block(128, 256, True, "bfloat16")
    x, layers = blocks.draw(block, 300)
    kernels = blocks.dispatch.BACK_ENDS[0]
    dense, *others = (
        blocks._stack(kernels, name, x, layers[:1])[0]
        for name in ("dense", "dense_block", "unions")
    )
    for other in others:
        assert abs(other - dense).max() < 0.05 * abs(dense).max()


def test_without_a_gpu_it_says_so_at_once():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match=r"^error: it needs a Hopper GPU, got cpu$"):
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
