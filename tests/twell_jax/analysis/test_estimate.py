"""What is estimated without a GPU; tests/benchmarks/test_estimate.py compares it with records."""

from dataclasses import asdict

import numpy as np
import pytest

from twell_jax.analysis.activity import Activity, summarise
from twell_jax.analysis.estimate import estimate
from twell_jax.analysis.report import tables
from twell_jax.config import ModelConfig

WIDE = {
    "vocab_size": 49152, "context": 2048, "d_model": 2048, "layers": 8, "heads": 32, "d_ff": 5632,
}  # fmt: skip
TOKENS = 512


def config(**changes):
    return ModelConfig(**WIDE | changes)


def active(of, share, union, length=TOKENS):
    """Of each layer's neurons a part is active for all tokens, the others for none."""
    nnz = round(share * of.d_ff)
    usage = np.zeros((of.layers, of.d_ff), np.int64)
    usage[:, :nnz] = length
    unions = {256: np.full(of.layers, union)} if length >= 256 else {}
    return Activity(2.0, np.full((of.layers, 1, length), nnz, np.int32), usage, unions)


def estimated(share, union, **changes):
    of = config(**changes)
    return estimate(of, active(of, share, union))


def test_more_used_neurons_gain_less_in_each_pass():
    gains = [estimated(share, 10 * share) for share in (0.001, 0.004, 0.016, 0.04)]
    for passes in ("forward", "both", "decode"):
        of_first_layer = [of.layers[passes][0] for of in gains]
        assert of_first_layer == sorted(of_first_layer, reverse=True)
        assert 1.7 < of_first_layer[0] < 6
    for work in ("scoring", "training step", "decoding one sequence"):
        of_model = [of.model[work] for of in gains]
        assert of_model == sorted(of_model, reverse=True) and 1.2 < of_model[0] < 1.8


def test_a_model_that_uses_all_neurons_gains_nothing():
    found = estimated(1.0, 1.0)
    assert found.layers["forward"] == pytest.approx([1.0] * 8, abs=0.03)
    assert found.layers["both"] == [1.0] * 8 and found.layers["decode"] == [None] * 8
    assert found.model == pytest.approx({"scoring": 1.0, "training step": 1.0}, abs=0.03)
    assert "no estimate of decoding one sequence: in a layer a token has over 5%" in str(found)


def test_gradients_of_layers_that_need_too_much_are_dense():
    """As `GradientPlan` has it, though the kernels would gain a little."""
    assert estimated(0.01, 0.70).layers["both"] == [1.0] * 8
    assert estimated(0.01, 0.65).layers["both"][0] > 1.2


def test_attention_reads_the_sequences_and_windows_not_the_whole_context():
    found = estimated(0.004, 0.1, context=TOKENS).model
    assert estimated(0.004, 0.1, context=131072).model == found
    windowed = estimated(0.004, 0.1, sliding_window=64).model
    assert {work for work in found if windowed[work] > found[work]} == {"scoring", "training step"}


def test_the_sentence_says_what_is_gained_and_how_wrong_it_may_be():
    found = estimated(0.004, 0.1)
    scoring, step, decoding = found.model.values()
    assert str(found) == (
        "On an H100 or H200, in bfloat16, over dense XLA: "
        f"scoring about {scoring:.2f}x, training step about {step:.2f}x, "
        f"decoding one sequence about {decoding:.2f}x (+- 14 %)."
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"activation": "silu"}, "silu is zero for no neuron, so kernels gain nothing; train the "),
        ({"gated": False}, "unions do not serve its blocks (only with a gate)"),
        ({"mlp_bias": True}, "unions do not serve its blocks (the kernels add no biases)"),
        ({"d_ff": 5600}, "unions do not serve its blocks (5600 neurons are no multiple of 128"),
        ({"d_model": 2080, "heads": 1}, "kernels need a d_model that is a multiple of 64"),
    ],
)
def test_what_kernels_do_not_serve_is_one_reason(changes, why):
    found = estimated(0.004, 0.1, **changes)
    assert found.model == {} and found.layers["forward"] == [None] * 8
    assert f"dense XLA: no estimate of scoring, training step, decoding one sequence: {why}" in (
        str(found)
    )


@pytest.mark.parametrize(
    ("d_model", "d_ff", "layers", "model", "why"),
    [
        (512, 5632, set(), set(), "training step, decoding one sequence: d_model is 512, in the "
         "records 2048"),
        (1024, 2816, {"forward", "both"}, {"scoring"}, "step, decoding one sequence: d_model is "),
        (2048, 8192, {"forward", "decode"}, {"decoding one sequence"}, "no estimate of scoring, "
         "training step: d_ff is 8192, in the records 2816 to 5632."),
        (4096, 14336, {"forward", "decode"}, set(), "scoring: d_model is 4096, in the records "
         "1024 to 2048; no estimate of"),
    ],
)  # fmt: skip
def test_widths_that_no_record_has_are_not_estimated(d_model, d_ff, layers, model, why):
    found = estimated(0.004, 0.1, d_model=d_model, d_ff=d_ff)
    assert {passes for passes, gains in found.layers.items() if None not in gains} == layers
    assert set(found.model) == model and why in str(found)


def test_the_table_has_what_is_estimated_of_each_layer():
    of = config(layers=1)
    activity = active(of, 0.004, 0.1)
    found = estimate(of, activity)
    *_, table = tables(summarise(activity) | {"speedup": None, "estimate": asdict(found)})
    cells = [next(iter(column.cells)) for column in table.columns]
    gains = [f"{found.layers[passes][0]:.2f}x" for passes in ("forward", "both", "decode")]
    assert cells == ["0", "10.0%", "23.0", "99.6%", *gains]


def test_short_sequences_do_not_tell_of_256_tokens():
    of = config()
    found = estimate(of, active(of, 0.004, 0.1, length=32))
    assert "sequences have 32 tokens, U is of 256 in a row" in str(found)
