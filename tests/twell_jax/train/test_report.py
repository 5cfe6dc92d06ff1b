"""The report of a run: what it says of records, and with or without a model that it began with."""

import re

from tests.twell_jax.configs import VALID
from twell_jax import config as config_lib
from twell_jax.train import report

STEP = {
    "step": 4, "ce": 2.0, "nnz": [2.0, 4.0], "max_nnz": [7, 9], "dead": [0.0, 0.5],
    "mean_union": [0.25, 0.75], "tokens_per_second": 1000.0,
}  # fmt: skip
LAST = {"step": 4, "held_out_ce": 1.5, "unigram_ce": 3.0, "seconds": 120.0}


def written(*, first=None, **evaluation):
    model = VALID["model"] | {"layers": 2, "d_ff": 48}
    config = config_lib.from_dict(VALID | {"model": model})
    steps = [STEP | {"tokens_per_second": 0.0}, STEP, STEP]
    return report.markdown(config, steps, [LAST | evaluation], first or STEP, ["a.png"])


def rows(text, heading):
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.split("\n") if line[:1] == "|"]
    return [[cell.strip() for cell in line] for line in lines]


def test_it_says_how_good_sparse_and_fast_a_run_is():
    text = written(bits_per_byte=0.5)
    found = {line[0]: line[-1] for line in rows(text, "Result")}
    assert found["held-out cross-entropy, nats/token"] == "1.500"
    assert found["bits/byte"] == "0.500"
    assert found["active neurons of a token"] == "3.0"
    assert found["zeros among the hidden activations"] == f"{1 - 3 / 48:.1%}"
    assert found["neurons that 256 tokens use (U)"] == "50.0%"
    assert found["dead neurons"] == "25.0%"
    assert found["tokens/s in training"] == "1,000" and found["minutes in all"] == "2.0"
    assert "joules/token in training" not in found
    assert rows(text, "Layers")[2:] == [
        ["0", "2.0", "7", "25.0%", "0.0%"], ["1", "4.0", "9", "75.0%", "50.0%"],
    ]  # fmt: skip
    assert "![a.png](a.png)" in text and "d_ff: 48" in text and "jax " in text


def test_what_the_run_began_with_stands_beside_it():
    header, _, *lines = rows(written(first={"step": 0, "source_ce": 1.25}), "Result")
    assert header[-2:] == ["before", "this run"]
    assert lines[0] == ["held-out cross-entropy, nats/token", "1.250", "1.500"]
    assert all(line[1] == "-" for line in lines[1:])


def test_a_sample_cannot_end_its_block():
    text = written(prompt="a ```` b", sample="c\n```\n# d")
    block = re.search(r"\n(`{5,})\n(.*?)\n\1\n", text, re.DOTALL)
    assert block[2] == "a ```` bc\n```\n# d"
    assert "The first 8 characters are held-out text." in text
