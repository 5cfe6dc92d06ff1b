"""The questions that the study asks of its models, made of this repository's source code."""

import re
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from benchmarks.study import __main__ as study
from benchmarks.study import downstream
from tests.packages import needed
from twell_jax import config as config_lib
from twell_jax.config import ModelConfig
from twell_jax.data import tokenizers
from twell_jax.inference.language_model import LanguageModel
from twell_jax.inference.likelihood import log_likelihoods
from twell_jax.models import Transformer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fewer(monkeypatch):
    monkeypatch.setattr(downstream, "ITEMS", 60)


@pytest.fixture(scope="module")
def tokenizer():
    """That of the study, whose name in base.yaml is relative to the repository."""
    return tokenizers.named(str(ROOT / config_lib.load(study.BASE).data.tokenizer))


@pytest.fixture(scope="module")
def sequences(tokenizer):
    """Windows of 1025 tokens of the repository's files, each of which ends with end-of-text."""
    texts = [path.read_text() for path in sorted((ROOT / "twell_jax").rglob("*.py"))]
    stream = np.concatenate([np.append(a, tokenizer.eot_id) for a in tokenizer.encode(texts)])
    return stream[: len(stream) // 1025 * 1025].reshape(-1, 1025)


@pytest.fixture(scope="module")
def texts(tokenizer, sequences):
    return downstream.documents(tokenizer, sequences)


def test_texts_are_whole_lines_of_one_document(texts):
    files = [path.read_text() for path in sorted((ROOT / "twell_jax").rglob("*.py"))]
    for text in texts:
        assert any(f"\n{text}" in file for file in files)


@pytest.mark.parametrize("task", downstream.TASKS)
def test_only_the_first_answer_is_in_the_text(task, texts, tokenizer):
    items = downstream.task_items(downstream.TASKS[task], texts, tokenizer)
    assert 30 < len(items) <= downstream.ITEMS
    assert len({(item.context, item.answers[0]) for item in items}) == len(items)
    for item in items:
        right, *wrong = item.answers
        assert len({right, *wrong}) == downstream.ANSWERS
        assert any(item.context + right in text for text in texts)
        assert not any(item.context + answer in text for text in texts for answer in wrong)
        assert len({len(ids) for ids in tokenizer.encode(item.answers)}) == 1
        # A model reads the text as it was read in training.
        apart = np.concatenate(tokenizer.encode([item.context, right]))
        np.testing.assert_array_equal(apart, tokenizer.encode([item.context + right])[0])
    assert items == downstream.task_items(downstream.TASKS[task], texts, tokenizer)


def test_wrong_names_are_in_the_context_and_no_bracket_is_a_good_guess(texts, tokenizer):
    names, brackets = (
        downstream.task_items(downstream.TASKS[task], texts, tokenizer)
        for task in ("names", "brackets")
    )
    for item in names:
        assert all(answer.strip() in item.context for answer in item.answers)
    kinds = [re.match(r"[)\]}]+", item.answers[0])[0] for item in brackets]
    assert max(map(kinds.count, kinds)) <= downstream.ITEMS // downstream.ANSWERS


@pytest.mark.parametrize("sign", [1, -1])
def test_a_model_that_knows_the_text_is_right(sign, tokenizer, sequences, texts, monkeypatch):
    everything = "\0".join(texts)

    def knows(model, rows, *, batch):
        known = [tokenizer.decode(ids) in everything for ids, _ in rows]
        return [(sign * float(is_known), is_known) for is_known in known]

    monkeypatch.setattr(downstream, "log_likelihoods", knows)
    found = downstream.scores(None, tokenizer, sequences)
    assert [task["accuracy"] for task in found.values()] == [sign == 1] * len(downstream.TASKS)


def test_answers_that_are_equally_likely_are_wrong(tokenizer, sequences, monkeypatch):
    def is_indifferent(model, rows, *, batch):
        return [(0.0, False)] * len(rows)

    monkeypatch.setattr(downstream, "log_likelihoods", is_indifferent)
    found = downstream.scores(None, tokenizer, sequences)
    assert {task["accuracy"] for task in found.values()} == {0}


def test_a_text_without_questions_has_no_accuracy(tokenizer, monkeypatch):
    monkeypatch.setattr(downstream, "log_likelihoods", lambda model, rows, batch: [])
    text = np.full((2, 1025), tokenizer.encode(["word"])[0][0])
    found = downstream.scores(None, tokenizer, text)
    assert list(found.values()) == [{"items": 0}] * len(downstream.TASKS)


@pytest.mark.slow
def test_the_harness_finds_the_same_log_probabilities(texts, tokenizer):
    needed("lm_eval")
    from lm_eval.api.instance import Instance

    from twell_jax.inference.harness import HarnessModel

    config = ModelConfig(
        vocab_size=tokenizer.size, context=512, d_model=32, layers=1, heads=2, d_ff=64,
        dtype="float32", init_scale=0.3,
    )  # fmt: skip
    model = Transformer(config, rngs=nnx.Rngs(0))
    items = [
        item
        for task in downstream.TASKS.values()
        for item in downstream.task_items(task, texts, tokenizer)[:1]
    ]
    ours = log_likelihoods(model, downstream.rows_of(items, tokenizer), batch=8)
    pairs = [(item.context, answer) for item in items for answer in item.answers]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
        for i, pair in enumerate(pairs)
    ]
    lm = LanguageModel(model, tokenizer, (), (tokenizer.eot_id,))
    theirs = HarnessModel(lm, batch=8).loglikelihood(requests, disable_tqdm=True)
    np.testing.assert_allclose([p for p, _ in ours], [p for p, _ in theirs], rtol=1e-5)
