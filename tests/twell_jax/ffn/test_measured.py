"""What was measured here decides which algorithm serves, and damage is set aside."""

import json
import os
import re

import jax
import jax.numpy as jnp
import pytest

from tests.devices import H100, abstract_gpu
from twell_jax import explain
from twell_jax.ffn import measured
from twell_jax.ffn.measured import Block

CARD = "NVIDIA H100 80GB HBM3"
BLOCK = Block(2048, 1408, True, "bfloat16")
TIMES = {8: {"dense": 1.0, "few_tokens": 2.0}, 512: {"dense": 3.0, "dense_block": 2.0, "unions": 1}}
BOTH = {512: {"dense": 9.0, "sparse": 4.0}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TWELL_JAX_CACHE", str(tmp_path))


def served(tokens, *, d=2048, h=1408, gated=True, dtype=jnp.bfloat16, card=CARD, **options):
    x, w = (jax.ShapeDtypeStruct((n, d), dtype) for n in (tokens, h))
    with jax.sharding.use_abstract_mesh(abstract_gpu(card)):
        says = explain(x, w if gated else None, w, w, **options)
    return re.search(r"^  (\w+), by \w+(?: \((.*)\))?$", says, re.MULTILINE).groups(default="")


def test_the_fastest_algorithm_of_the_nearest_number_serves():
    path = str(measured.keep(CARD, BLOCK, TIMES, BOTH))
    assert served(8) == ("dense", path) == served(1) == served(60)
    assert served(512) == ("unions", path) == served(100) == served(16384)


def test_what_was_not_measured_or_is_asked_for_goes_by_the_rules():
    measured.keep(CARD, BLOCK, TIMES, BOTH)
    others = ({"d": 1024}, {"h": 1536}, {"gated": False}, {"dtype": jnp.float16})
    for other in (*others, {"card": "NVIDIA H200"}, {"implementation": "mosaic"}):
        algorithm, record = served(8, **other)
        assert algorithm == "few_tokens" and "measured" not in record
    assert served(8, live=7)[0] == "few_tokens"
    algorithm, record = served(8, implementation="xla")
    assert algorithm == "dense" and "measured" not in record
    assert served(512, activation="silu")[0] == "dense"  # no kernel can


def test_an_algorithm_that_cannot_serve_is_passed_over():
    measured.keep(CARD, BLOCK, {64: {"dense": 2.0, "few_tokens": 1.0}}, {})
    assert served(64)[0] == "few_tokens"
    algorithm, record = served(300)
    assert algorithm == "dense_block" and "benchmarks/results" in record


def test_blocks_are_kept_side_by_side_and_measured_anew():
    other = Block(64, 128, False, "float16")
    measured.keep(CARD, BLOCK, TIMES, BOTH)
    path = measured.keep(CARD, other, {1: {"dense": 5.0}}, {})
    measured.keep(CARD, BLOCK, {1: {"dense": 7.0}}, BOTH)
    assert measured.of(CARD, BLOCK) == measured.Measured(path, {1: {"dense": 7.0}}, BOTH)
    assert measured.of(CARD, other) == measured.Measured(path, {1: {"dense": 5.0}}, {})
    assert measured.of("NVIDIA H200", BLOCK) is None
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def changed(content, **changes):
    return json.dumps(content | changes)


def timed(content, milliseconds, passes="forward"):
    return changed(content, blocks=[content["blocks"][0] | {passes: milliseconds}])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: "{",
        lambda content: "[" * 100_000,
        lambda content: "[]",
        lambda content: changed(content, format=0),
        lambda content: changed(content, versions={"jax": "0.1"}),
        lambda content: changed(content, blocks=[{"width": 3}]),
        lambda content: timed(content, {}),
        lambda content: timed(content, {"8": {"dense": -1}}),
        lambda content: timed(content, {"8": {"dense": 10**400}}),
        lambda content: timed(content, {str(10**400): {"dense": 1}}),
        lambda content: timed(content, {"8": {"abacus": 1}}),
        lambda content: timed(content, {"8": {}}),
        lambda content: timed(content, {"8": {"unions": 1}}, "both"),
        lambda content: changed(content, blocks=[content["blocks"][0] | {"more": 1}]),
    ],
    ids=["cut", "deep", "list", "format", "versions", "keys", "no times", "negative", "too long",
         "too many tokens", "another algorithm", "no algorithm", "no gradients", "another key"],
)  # fmt: skip
def test_a_file_that_is_damaged_or_of_other_versions_is_set_aside(spoil):
    path = measured.keep(CARD, BLOCK, TIMES, BOTH)
    path.write_text(spoil(json.loads(path.read_text())))
    with pytest.warns(UserWarning, match=r"set aside as .*\.aside\. Measure again: python -m"):
        assert served(8)[0] == "few_tokens"
    assert not path.exists() and path.with_suffix(".aside").exists()


def test_a_pipe_in_its_place_is_set_aside_and_not_waited_for():
    path = measured.keep(CARD, BLOCK, TIMES, BOTH)
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(UserWarning, match=r"set aside as .*\.aside"):
        assert served(8)[0] == "few_tokens"
    assert served(8)[0] == "few_tokens"  # without another warning
    measured.keep(CARD, BLOCK, TIMES, BOTH)
    assert served(8)[0] == "dense"


def test_without_a_file_the_rules_decide():
    with jax.sharding.use_abstract_mesh(H100):
        assert served(8)[0] == "few_tokens"
