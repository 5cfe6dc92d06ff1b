"""Who serves, without a GPU: the table at its boundaries, the calls of users, and what is said."""

import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from benchmarks.record import RESULTS
from pallas_kernels.kernels import REFERENCE
from tests.back_ends import changed
from tests.devices import H100, abstract_gpu
from tests.twell_jax.ffn.shapes import shapes
from twell_jax import Biases, CannotServe, explain, sparse_ffn
from twell_jax.ffn import dispatch, quantise
from twell_jax.ffn.dispatch import RULES

H = 1408
DEFAULT = RULES[: 1 + [rule.algorithm for rule in RULES].index("dense")]  # if nobody names anything


def served(tokens, *, d=2048, gpu=H100, gated=True, quantised=False, **options):
    """The algorithm for a block of H neurons, and the record that supports the choice."""
    x, *weights = shapes(tokens, d, H, gated=gated)
    if quantised:
        weights[0] = jax.eval_shape(quantise, weights[0])
    with jax.sharding.use_abstract_mesh(gpu):
        last = explain(x, *weights, **options).splitlines()[-1]
    algorithm, _, record = last.strip(" )").partition(", by ")
    return algorithm, record.partition("benchmarks/results/")[2] or None


def algorithm(tokens, **options):
    return served(tokens, **options)[0]


def tokens_of(rule):
    """The least and the most tokens that a rule serves, as far as they are finite."""
    return [tokens for tokens in rule.tokens if tokens < math.inf]


@pytest.mark.parametrize(
    ("tokens", "gated", "without_a_gate"),
    [
        (1, "few_tokens", "few_tokens"),
        (64, "few_tokens", "few_tokens"),
        (65, "dense", "dense"),
        (255, "dense", "dense"),
        (256, "dense_block", "dense_block"),
        (1023, "dense_block", "dense_block"),
        (1024, "unions", "dense"),
        (16384, "unions", "dense"),
    ],
)
def test_what_the_default_takes_on_both_sides_of_every_limit(tokens, gated, without_a_gate):
    assert [algorithm(tokens, gated=g) for g in (True, False)] == [gated, without_a_gate]
    other = abstract_gpu("NVIDIA A100-SXM4-80GB")
    assert {algorithm(tokens, gated=g, gpu=other) for g in (True, False)} == {"dense"}


@pytest.mark.parametrize(
    ("d", "tokens", "gated", "without_a_gate"),
    [
        (1024, 65, "dense_block", "dense"),
        (1024, 256, "dense_block", "dense_block"),
        (1024, 2047, "dense_block", "dense"),
        (1024, 2048, "unions", "dense"),
        (1088, 65, "dense", "dense"),
        (1088, 1024, "unions", "dense"),
        (2112, 256, "dense", "dense"),
        (2112, 1023, "dense", "dense"),
        (8192, 64, "few_tokens", "few_tokens"),
        (8192, 1024, "unions", "dense"),
    ],
)
def test_what_the_default_takes_at_other_widths(d, tokens, gated, without_a_gate):
    assert [algorithm(tokens, d=d, gated=g) for g in (True, False)] == [gated, without_a_gate]


def test_every_rule_serves_a_call(request):
    tokens = {tokens for rule in RULES for tokens in tokens_of(rule)}
    wishes = ({}, {"implementation": "mosaic"}, {"packing": "twell"}, {"packing": "unions"})

    def reached():
        calls = itertools.product(tokens, (128, 2048), wishes, (True, False))
        return {served(m, d=d, gated=gated, **wish) for m, d, wish, gated in calls}

    of_hopper = reached()
    request.getfixturevalue("reference_kernels")  # of which there is no record
    assert of_hopper | reached() == {(rule.algorithm, rule.record) for rule in RULES}


@pytest.mark.parametrize("rule", DEFAULT, ids=lambda rule: f"{rule.algorithm} {rule.tokens}")
def test_the_record_of_a_rule_is_there_and_supports_it(rule):
    rows = json.loads((Path(RESULTS) / rule.record).read_text())["rows"]
    if rule.algorithm == "dense":
        assert rows
        return
    assert np.median([row["speedup"] for row in rows if is_of(rule, row)]) > 1


def test_the_widths_and_cards_of_records_are_theirs():
    records = [json.loads((Path(RESULTS) / rule.record).read_text()) for rule in DEFAULT]
    widths = {(row["d"], row["h"]) for record in records for row in record["rows"]}
    assert widths == dispatch.RECORDED_WIDTHS
    cards = {record["device"].split()[1] for record in records}
    assert cards == set(dispatch.RECORDED_CARDS)


def is_of(rule, row):
    """Whether a row says something of calls that a rule serves."""
    return (
        row["direction"] == "forward"
        and rule.tokens[0] <= row["m"] <= rule.tokens[1]
        and row["implementation"] == "mosaic"
        and row.get("packing") == (rule.algorithm if rule.algorithm == "unions" else None)
        and not row["heavy_rows"]
        and rule.gated in (None, row["gated"])
        and rule.widths[0] <= row["d"] <= rule.widths[1]
    )


@pytest.mark.parametrize(
    ("tokens", "named", "expected"),
    [
        (1, {"implementation": "mosaic"}, "few_tokens"),
        (64, {"implementation": "mosaic"}, "few_tokens"),
        (65, {"implementation": "mosaic"}, "dense_block"),
        (1023, {"implementation": "mosaic"}, "dense_block"),
        (1024, {"implementation": "mosaic"}, "unions"),
        (64, {"packing": "twell"}, "few_tokens"),
        (65, {"packing": "twell"}, "twell"),
        (16384, {"packing": "twell"}, "twell"),
        (64, {"packing": "unions"}, "few_tokens"),
        (65, {"packing": "unions"}, "unions"),
        (64, {"gradients": "sparse"}, "few_tokens"),
        (65, {"gradients": "sparse"}, "unions"),
        (1024, {"gradients": "sparse"}, "unions"),
        (16384, {"gradients": "dense"}, "unions"),
        (16384, {"implementation": "xla"}, "dense"),
        (65, {"gradients": "dense"}, "dense"),
        (256, {"gradients": "dense"}, "dense_block"),
        (8, {"quantised": True}, "few_tokens"),
        (512, {"quantised": True}, "dense"),
        (512, {"quantised": True, "packing": "twell"}, "twell"),
        (16384, {"quantised": True}, "unions"),
        (8, {"live": 100}, "few_tokens"),
        (1023, {"live": 100}, "dense"),
        (1023, {"live": 100, "implementation": "mosaic"}, "unions"),
        (1024, {"live": 100}, "unions"),
    ],
)
def test_calls_of_users(tokens, named, expected):
    assert algorithm(tokens, **named) == expected
    if named.get("gradients") == "sparse":
        assert algorithm(tokens, **named | {"gradients": 0.5}) == expected


# The kernel that each algorithm calls and no other does.
OWN_KERNELS = {
    "few_tokens_ffn": "few_tokens",
    "dense_block": "dense_block",
    "gate_pack": "twell",
    "gate_union": "unions",
}


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        (64, {}, "few_tokens"),
        (65, {"implementation": "mosaic"}, "dense_block"),
        (256, {}, "dense_block"),
        (1024, {}, "unions"),
        (65, {"packing": "twell"}, "twell"),
        (1024, {"implementation": "xla"}, "dense"),
        (8, {"quantised": True}, "few_tokens"),
        (512, {"quantised": True}, "dense"),
        (1024, {"quantised": True}, "unions"),
    ],
)
def test_the_algorithm_that_explain_names_is_the_one_that_serves(serve, tokens, options, expected):
    called = set()

    def recording(name):
        def call(*args, **kwargs):
            called.add(OWN_KERNELS[name])
            return getattr(REFERENCE, name)(*args, **kwargs)

        return call

    # By the name of those that were measured, so that the default takes them.
    serve(changed(REFERENCE, name="Hopper", **{name: recording(name) for name in OWN_KERNELS}))
    x, *weights = shapes(tokens)
    options = dict(options)
    if options.pop("quantised", False):
        weights[0] = jax.eval_shape(quantise, weights[0])
    last = explain(x, *weights, **options).splitlines()[-1]
    jax.eval_shape(lambda x, *weights: sparse_ffn(x, *weights, **options), x, *weights)
    assert last.strip().partition(", by ")[0] == expected
    assert called == {expected} - {"dense"}


def test_rules_measured_on_one_back_end_do_not_hold_for_another(reference_kernels):
    assert algorithm(16384) == "dense"
    assert algorithm(16384, implementation="mosaic") == "unions"


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (
            {"implementation": "xla", "packing": "unions"},
            "'xla' .* packing='unions', .* leave one ",
        ),
        ({"implementation": "xla", "gradients": "sparse"}, "'xla' .*='sparse', .* leave one out"),
        ({"implementation": "xla", "gradients": 0.5}, "'xla' .*=0.5, .* leave one out"),
        ({"packing": "twell", "gradients": "sparse"}, "write packing='unions'"),
    ],
)
def test_what_contradicts_itself_is_named_with_a_way_out(named, says):
    with pytest.raises(CannotServe, match=says):
        algorithm(2048, **named)


@pytest.mark.parametrize(
    "named", [{"implementation": "mosaic"}, {"packing": "twell"}, {"gradients": "sparse"}]
)
def test_what_cannot_be_had_says_what_was_named_and_why(named):
    ((name, value),) = named.items()
    says = f"^{name}='{value}' cannot serve: it needs an Ampere, Ada, Hopper or RTX Blackwell GPU, "
    says += "got NVIDIA B200; leave it out$"
    with pytest.raises(CannotServe, match=says):
        algorithm(2048, gpu=abstract_gpu("NVIDIA B200"), **named)


def test_explain_says_which_rule_serves_and_why_not_those_before():
    with jax.sharding.use_abstract_mesh(H100):
        text = explain(*shapes(4096, h=5632))
        with_live = explain(*shapes(1023), live=7)
        wide = explain(*shapes(1023, d=4096))
    first, *passed_over, last = text.splitlines()
    assert first == "4096 tokens on a device, 5632 neurons, gated:"
    assert passed_over and all("4096 tokens" in line for line in passed_over)
    assert last.strip().startswith("unions, by mosaic") and last.endswith(".json)")
    no_live = "not dense_block: its kernels compute all neurons; those of unions take live"
    assert no_live in with_live
    assert "not dense_block: D is 4096, and it was measured to gain from 1 to 2048\n" in wide
    with pytest.raises(CannotServe, match="needs an Ampere, Ada, Hopper or RTX Blackwell GPU"):
        explain(*shapes(4096), implementation="mosaic")
    with pytest.raises(ValueError, match="w_up must be"):
        explain(shapes(4)[0], None, shapes(4)[0], shapes(4)[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "silu"}, "must be zero for most neurons, got silu"),
        (
            {"biases": Biases(down=jax.ShapeDtypeStruct((2048,), jnp.bfloat16))},
            "no biases; leave it out",
        ),
        ({"dtype": jnp.float32}, "bfloat16 or float16"),
        ({"d": 96}, "D a multiple of 64"),
        ({"h": 200}, "H a multiple of 128"),
    ],
)
def test_says_why_the_kernels_cannot_serve(change, reason):
    operands = shapes(4, **{k: change.pop(k) for k in ("d", "h", "dtype") if k in change})
    with jax.sharding.use_abstract_mesh(H100):
        with pytest.raises(CannotServe, match=reason):
            explain(*operands, implementation="mosaic", **change)
        assert "dense, by xla" in explain(*operands, **change)  # the default serves


def test_says_that_tokens_or_neurons_do_not_divide(reference_kernels):
    for axes, shape, m, h, reason in (
        (("data", "fsdp"), (4, 2), 801, 256, "801 tokens do not divide over 8 devices"),
        (("data", "tensor"), (2, 4), 100, 768, "768 neurons are no multiple of 128 on each of 4"),
    ):
        with (
            jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA H100", shape, axes)),
            pytest.raises(CannotServe, match=reason),
        ):
            explain(*shapes(m, h=h), implementation="mosaic")


def test_axes_may_be_explicit_but_not_beside_manual_ones(reference_kernels):
    def asked(*types):
        with jax.sharding.use_abstract_mesh(AbstractMesh((2, 4), ("data", "tensor"), types)):
            return explain(*shapes(4096, h=512), implementation="mosaic")

    assert "unions, by mosaic" in asked(AxisType.Explicit, AxisType.Explicit)
    with pytest.raises(CannotServe, match="inside shard_map the kernels cannot be split"):
        asked(AxisType.Manual, AxisType.Explicit)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a Hopper GPU can serve it")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])  # the latter suits no kernel
def test_says_that_there_is_no_gpu(dtype):
    with pytest.raises(
        CannotServe, match=r"'mosaic' cannot serve: it needs an Ampere, .*, got cpu"
    ):
        explain(*shapes(4, dtype=dtype), implementation="mosaic")


def test_the_environment_names_an_implementation(monkeypatch):
    operands = [jnp.ones(a.shape, a.dtype) for a in shapes(4, h=200)]
    monkeypatch.setenv("TWELL_JAX_IMPLEMENTATION", "mosaic")
    with pytest.raises(CannotServe, match=r"TWELL_JAX_IMPLEMENTATION='mosaic' cannot serve"):
        sparse_ffn(*operands)
    sparse_ffn(*operands, implementation="xla")  # what the caller names is not overridden
    monkeypatch.setenv("TWELL_JAX_IMPLEMENTATION", "fast")
    with pytest.raises(ValueError, match=r"TWELL_JAX_IMPLEMENTATION must be .*'fast'"):
        sparse_ffn(*operands)


def test_the_first_back_end_that_can_serve_does(serve):
    cannot = changed(REFERENCE, name="cannot", unsupported=lambda w: "it is broken")
    w = jnp.ones((256, 128), jnp.bfloat16)
    serve(cannot, REFERENCE)
    assert dispatch.back_end(w) == (REFERENCE, None)
    serve(cannot, cannot)
    later = changed(REFERENCE, name="later", unsupported=lambda w: "it needs another GPU")
    serve(cannot, later)
    assert dispatch.back_end(w) == (None, "it needs another GPU")
