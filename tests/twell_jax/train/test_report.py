"""The report of a run: what it says of records, and with or without a model that it began with."""

import re

import pytest

from tests.twell_jax.configs import VALID
from twell_jax import config as config_lib
from twell_jax.analysis.estimate import ERRORS, Estimate
from twell_jax.train import report
from twell_jax.train.report import Found

STEP = {
    "step": 4, "ce": 2.0, "nnz": [2.0, 4.0], "max_nnz": [7, 9], "dead": [0.0, 0.5],
    "mean_union": [0.25, 0.75], "tokens_per_second": 1000.0,
}  # fmt: skip
START = STEP | {"step": 1, "nnz": [12.0, 24.0], "tokens_per_second": 0.0}
LAST = {"step": 4, "held_out_ce": 1.5, "unigram_ce": 3.0, "seconds": 120.0}
SOURCE = {"step": 0, "source_ce": 1.25, "source_bits_per_byte": 0.75, "source_activation": "silu"}
GAIN = Estimate(
    {"forward": [1.5, 1.75], "both": [1.25, 1.5], "decode": [None, None]},
    {"scoring": 1.4, "training step": 1.2},
    {"decoding one sequence": "none of the records tells"},
)
SCORING = f"scoring on an H100 or H200, estimated, +- {100 * ERRORS['model']:.0f} %"


def written(first=START, steps=(START, STEP, STEP), settings=(), **changes):
    model = VALID["model"] | {"layers": 2, "d_ff": 48}
    config = config_lib.from_dict(VALID | {"model": model} | dict(settings))
    found = {name: changes.pop(name) for name in ("gain", "scores") if name in changes}
    return report.markdown(
        config, Found(steps, [LAST | changes], first, plots=["report.png"], **found)
    )


def rows(text, heading):
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.split("\n") if line[:1] == "|"]
    return [[cell.strip() for cell in line] for line in lines]


def results(text):
    """The cells of the first table by the name of the row."""
    models, _, *lines = rows(text, "Result")
    return {"models": models[-2:]} | {name: cells for name, *cells in lines}


def test_it_says_how_good_sparse_and_fast_a_run_is():
    text = written(bits_per_byte=0.5, joules=4500.0)
    found = {name: value for name, (value,) in list(results(text).items())[1:]}
    assert found == {
        "held-out cross-entropy, nats/token": "1.500",
        "bits/byte": "0.500",
        "unigram baseline, nats/token": "3.000",
        "active neurons of a token": "3.0",
        "zeros among the hidden activations": f"{1 - 3 / 48:.1%}",
        "neurons that 256 tokens use (U)": "50.0%",
        "dead neurons": "25.0%",
        "tokens/s in training": "1,000",
        "minutes in all": "2.0",
        "kilojoules in all": "4.5",
    }
    assert rows(text, "Layers")[2:] == [
        ["0", "2.0", "7", "25.0%", "0.0%"], ["1", "4.0", "9", "75.0%", "50.0%"],
    ]  # fmt: skip
    assert "![report.png](report.png)" in text and "d_ff: 48" in text and "jax " in text


def test_dense_and_sparse_stand_side_by_side():
    sparse = {
        "sparse_gradients": [True, True],
        "joules_per_token": 0.5,
        "tokens_per_second": 1500.0,
    }
    dense = {"sparse_gradients": [False, False], "joules_per_token": 0.75}
    steps = START | dense, STEP | dense, STEP | sparse | {"step": 5}
    text = written(SOURCE, steps, gain=GAIN, scores=({"a, acc": 0.5}, {"a, acc": 0.25}))
    found = results(text)
    assert found["models"] == ["dense", "this run"]
    assert found["held-out cross-entropy, nats/token"] == ["1.250", "1.500"]
    assert found["bits/byte"] == ["0.750", "-"]
    assert found["a, acc"] == ["0.500", "0.250"]
    assert found["active neurons of a token"] == ["48.0", "3.0"]
    assert found["zeros among the hidden activations"] == ["0.0%", f"{1 - 3 / 48:.1%}"]
    assert found["neurons that 256 tokens use (U)"] == ["100.0%", "50.0%"]
    assert found["tokens/s in training"] == ["1,000", "1,500"]
    assert found["joules/token in training"] == ["0.75", "0.5"]
    assert found[SCORING] == ["1.00x", "1.40x"]
    assert "in 2 of 2 layers: 1.50 times the 1,000 of the dense start, which" in text
    assert "no estimate of decoding one sequence: none of the records tells." in text
    assert "twell_jax.evaluate" not in text
    header, _, *layers = rows(text, "Layers")
    assert header[5:] == [
        f"forward, estimated, +- {100 * ERRORS['forward']:.0f} %",
        f"forward and backward, estimated, +- {100 * ERRORS['both']:.0f} %",
    ]
    assert [line[5:] for line in layers] == [["1.50x", "1.25x"], ["1.75x", "1.50x"]]


def test_of_a_rectified_source_the_first_step_tells_what_its_neurons_did():
    found = results(written(SOURCE | {"source_activation": "relu"}, gain=GAIN))
    assert found["models"] == ["before", "this run"]
    assert found["active neurons of a token"] == ["18.0", "3.0"]
    assert found["dead neurons"] == ["-", "25.0%"]
    assert found[SCORING] == ["-", "1.40x"]
    for first, steps in (
        (SOURCE | {"source_activation": "relu2"}, [START, STEP]),
        (SOURCE | {"source_activation": "relu"}, [STEP]),
        ({"step": 0, "source_ce": 1.25}, [START, STEP]),  # of an earlier version
    ):
        assert results(written(first, steps))["active neurons of a token"] == ["-", "3.0"]


def test_what_is_not_known_comes_with_the_command_that_tells_it():
    text = written(SOURCE, settings={"run_dir": "runs/a", "init_from": "org/b"})
    assert "It began as `org/b`." in text
    assert "`python -m twell_jax.analyze runs/a` estimates the speed-up" in text
    for name in ("runs/a", "org/b"):
        assert f"`python -m twell_jax.evaluate {name}`" in text


def test_a_sample_cannot_end_its_block():
    text = written(prompt="a ```` b", sample="c\n```\n# d\x1b[2J")
    block = re.search(r"\n(`{5,})\n(.*?)\n\1\n", text, re.DOTALL)
    assert block[2] == "a ```` bc\n```\n# d\ufffd[2J"
    assert "this run, after 8 characters of held-out text:" in text


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_samples_of_both_models_stand_one_below_the_other(activation):
    source = {"source_activation": activation, "source_prompt": "ab", "source_sample": "cd"}
    text = written(SOURCE | source, prompt="ab", sample="ef")
    samples = text.partition("## Samples")[2].partition("## Settings")[0]
    name = "dense" if activation == "silu" else "before"
    assert re.findall(r"(\w+), after|```\n(\w+)", samples) == [
        (name, ""), ("", "abcd"), ("run", ""), ("", "abef"),
    ]  # fmt: skip
