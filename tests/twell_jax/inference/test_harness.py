"""The adaptor to lm-evaluation-harness (extra "eval"), on a local task without a network."""

import dataclasses
import json
import os
import shutil
from functools import partialmethod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from tests.packages import needed
from twell_jax.config import ConfigError
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.inference import load
from twell_jax.models.pretrained import save_pretrained

lm_eval = needed("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from tests import seeds  # noqa: E402
from tests.twell_jax import drawn  # noqa: E402
from twell_jax import evaluate  # noqa: E402
from twell_jax.inference import harness  # noqa: E402
from twell_jax.inference.harness import HarnessModel  # noqa: E402

ALL_TASKS = TaskManager.__init__
CONTEXT = 72
# The same in all tests and TASKS, which then share compiled programs.
BATCH, MAX_NEW = 2, 16
MODEL = {
    "vocab_size": 257, "context": CONTEXT, "d_model": 32, "layers": 2, "heads": 2, "d_ff": 48,
    "dtype": "float32", "init_scale": 0.3,
}  # fmt: skip
TASKS = {
    "choice": """
task: choice
output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "perplexity": """
task: perplexity
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "write": """
task: write
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
DATA = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a model: all tests read it from there and so share compiled programs."""
    model = drawn.transformer(**MODEL)
    # Its most likely bytes are ASCII: others may be parts of a character, which are not yet text.
    embedding = np.array(model.embed.embedding)
    embedding[128:] = 0
    model.embed.embedding.set_value(jnp.asarray(embedding))
    directory = tmp_path_factory.mktemp("harness") / "model"
    save_pretrained(directory, model, ByteTokenizer())
    return directory


@pytest.fixture(scope="module")
def lm(saved):
    return load(str(saved))


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A directory of task definitions over the same few questions."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    draw = seeds.rng()
    lines = []
    for i in range(7):
        words = ["".join(map(chr, draw.integers(97, 123, n))) for n in draw.integers(1, 9, 5 + i)]
        lines.append({"question": " ".join(words), "choices": words[:3], "label": i % 3})
    lines.append({"question": "long " * 50, "choices": ["a", "bc", "d"], "label": 2})
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    directory = tmp_path / "tasks"
    directory.mkdir()
    for name, text in TASKS.items():
        (directory / f"{name}.yaml").write_text(text + DATA % data)
    return directory


def instances(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


forward = nnx.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)[0][0]))


def log_probabilities(lm, ids):
    """Of all tokens after each of `ids`; nothing depends on the zeros that follow these."""
    tokens = np.zeros((1, CONTEXT), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(forward(lm.model, tokens), np.float64)[: len(ids)]


def test_loglikelihood(lm):
    pairs = [("ab c", " de"), ("", "xyz"), ("spaces ", "q"), (" ", "q"), ("long " * 40, "end")]
    found = HarnessModel(lm, batch=BATCH).loglikelihood(
        instances("loglikelihood", *pairs), disable_tqdm=True
    )
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        ids = list((context + continuation).encode())
        ids = ids if context.strip() else [256, *ids]
        count = len(continuation) + context.endswith(" ")  # the space counts with what follows
        ids = ids[-(CONTEXT + 1) :]
        logp = log_probabilities(lm, ids[:-1])[-count:]
        np.testing.assert_allclose(total, logp[np.arange(count), ids[-count:]].sum(), rtol=1e-4)
        assert greedy == (logp.argmax(-1) == ids[-count:]).all()


def test_an_empty_continuation_of_one_token_is_certain(lm):
    model = HarnessModel(lm, batch=BATCH)
    requests = instances("loglikelihood", ("a", ""))
    assert model.loglikelihood(requests, disable_tqdm=True) == [(0.0, True)]


def test_a_greedy_continuation_is_recognised(lm):
    prompt, ids = [*b"abc"], []
    for _ in range(4):
        ids.append(int(log_probabilities(lm, prompt + ids)[-1].argmax()))
    model = HarnessModel(lm, batch=BATCH)
    assert model._loglikelihood_tokens([(None, prompt, ids)])[0][1]
    assert not model._loglikelihood_tokens([(None, prompt, [*ids[:2], (ids[2] + 1) % 256])])[0][1]


def test_a_long_text_is_scored_in_windows(lm):
    texts = ["short", "much longer " * 20]
    model = HarnessModel(lm, batch=BATCH)
    totals = model.loglikelihood_rolling(instances("loglikelihood_rolling", *zip(texts)))
    short = log_probabilities(lm, [256, *b"shor"])[np.arange(5), list(b"short")].sum()
    np.testing.assert_allclose(totals[0], short, rtol=1e-4)
    # Windows of CONTEXT tokens each; the last one reaches back.
    ids, expected = [256, *texts[1].encode()], 0.0
    for start in range(0, len(ids) - 1, CONTEXT):
        end = min(start + CONTEXT, len(ids) - 1)
        logp = log_probabilities(lm, ids[end - CONTEXT : end])
        expected += logp[np.arange(start - end, 0), ids[start + 1 : end + 1]].sum()
    np.testing.assert_allclose(totals[1], expected, rtol=1e-4)


@pytest.mark.parametrize("puts_it", [False, True])
def test_a_text_begins_after_the_bos_token_and_only_once(saved, tmp_path, puts_it):
    """The files name one, which a template puts before texts or leaves to whom it may concern."""
    directory = shutil.copytree(saved, tmp_path / "model")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "!"}))
    if puts_it:
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        backend.post_processor = tokenizers.processors.TemplateProcessing("! $A", None, [("!", 33)])
        backend.save(str(directory / "tokenizer.json"))
    lm = load(str(directory))
    model = HarnessModel(lm, batch=BATCH)
    expected = log_probabilities(lm, [33, *b"shor"])[np.arange(5), list(b"short")].sum()
    texts = instances("loglikelihood_rolling", ("short",), ("",))
    np.testing.assert_allclose(model.loglikelihood_rolling(texts), [expected, 0], rtol=1e-4)
    assert model.loglikelihood_rolling(texts[1:]) == [0]
    alone = instances("loglikelihood", ("", "short"))
    ((total, _),) = model.loglikelihood(alone, disable_tqdm=True)
    np.testing.assert_allclose(total, expected, rtol=1e-4)
    assert lm.encode("") == [33] and lm.encode("a") == [*[33] * puts_it, 97]
    with pytest.raises(ConfigError, match=r"puts id 257 before a text, but .* is 0 to 256"):
        dataclasses.replace(lm, bos_id=257)


def test_generation_ends_before_a_stop_text(lm):
    long = " ".join(map(str, range(70)))
    contexts = ["one", "another, longer", long[-(CONTEXT - MAX_NEW) :], long]
    options = {"until": [], "max_gen_toks": MAX_NEW}

    def run(**changes):
        requests = instances("generate_until", *((c, options | changes) for c in contexts))
        return HarnessModel(lm, batch=BATCH).generate_until(requests)

    free = run()
    assert free == run(do_sample=False, num_beams=1) == run(until=[""])  # the most likely tokens
    assert free[2] == free[3]  # of a context that is too long its end counts
    stop = max(free, key=len)[-1]
    assert run(until=[stop]) == [text.split(stop)[0] for text in free]
    spanning = max(free, key=len)[4:7]  # three tokens
    assert run(until=["absent", spanning]) == [text.split(spanning)[0] for text in free]
    assert run(do_sample=True, temperature=5.0) != free
    repeated = [("one", options | {"do_sample": True, "temperature": 5.0})] * (2 * BATCH)
    drawn = HarnessModel(lm, batch=BATCH).generate_until(instances("generate_until", *repeated))
    assert len(set(drawn)) == len(drawn)  # every batch has draws of its own
    with pytest.raises(ValueError, match="cannot serve num_beams"):
        run(num_beams=3)
    with pytest.raises(ValueError, match=f"less than the context of {CONTEXT}"):
        run(max_gen_toks=CONTEXT)


@pytest.mark.slow
def test_the_command_runs_tasks(saved, tasks, tmp_path, capsys, own_tasks_alone):
    out = tmp_path / "results.json"
    arguments = [str(saved), "--tasks", ",".join(TASKS), "--task-path", str(tasks)]
    evaluate.main([*arguments, "--batch", str(BATCH), "--out", str(out)])
    results = json.loads(out.read_text())
    assert set(results) == set(TASKS)
    assert "|choice" in capsys.readouterr().out
    assert 0 <= results["choice"]["acc,none"] <= 1


@pytest.fixture
def own_tasks_alone(monkeypatch):
    """The harness's own definitions, thousands of files, are not read."""
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(ALL_TASKS, include_defaults=False))


def refused(capsys, *arguments):
    """The last line on stderr and the exit status, which must not be 0."""
    with pytest.raises(SystemExit) as end:
        evaluate.main(list(map(str, arguments)))
    if isinstance(end.value.code, str):
        return end.value.code, 1
    return capsys.readouterr().err.splitlines()[-1], end.value.code


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--limit", "-1"], "argument --limit: must be at least 1, got -1"),
        (["--limit", "0"], "argument --limit: must be at least 1, got 0"),
        (["--batch", "0"], "argument --batch: must be at least 1, got 0"),
        (["--shots", "-1"], "argument --shots: must be at least 0, got -1"),
        (["--shots", "two"], "argument --shots: must be an integer, got 'two'"),
        (["--task-path", "/no/such"], "--task-path: there is no directory /no/such"),
        (["--out", "/"], "--out: / is a directory"),
        (["--out", "~"], f"--out: {os.path.expanduser('~')} is a directory"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, capsys, arguments, says):
    line, status = refused(capsys, tmp_path, *arguments)
    assert line.endswith(f"error: {says}") and status == 2


def test_questions_are_not_downloaded_for_a_model_that_is_not_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "twell_jax.inference.harness.Tasks", lambda *_: pytest.fail("downloaded questions")
    )
    line, status = refused(capsys, tmp_path / "none")
    assert "there is no such directory" in line and status == 1


def test_tasks_are_checked_before_the_model_is_read(
    tasks, tmp_path, capsys, own_tasks_alone, monkeypatch
):
    monkeypatch.setattr(evaluate.language_model, "load", lambda *_: pytest.fail("read the model"))
    local = [tmp_path, "--task-path", tasks, "--tasks"]
    line, status = refused(capsys, *local, "choice,perplexities")
    assert line == (
        "error: --tasks: the harness has no task 'perplexities'; did you mean perplexity?"
    )
    assert status == 1
    assert "has no task ''" in refused(capsys, *local, "")[0]

    (tmp_path / "questions.jsonl").unlink()  # as if the network were down
    line, _ = refused(capsys, *local, "choice,write")
    assert line.startswith("error: --tasks: choice, write cannot be loaded (FileNotFoundError: ")
    assert "\n" not in line

    (tasks / "broken.yaml").write_text("task: broken\noutput_type: [")
    line, _ = refused(capsys, *local, "broken")
    assert line.startswith("error: --task") and "\n" not in line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("max_gen_toks: 72", f"max_gen_toks must be less than the context of {CONTEXT}, got 72"),
        ("num_beams: 2", "generation_kwargs: cannot serve num_beams"),
    ],
)
def test_texts_that_cannot_be_written_are_named_before_anything_is_scored(
    saved, tasks, capsys, own_tasks_alone, monkeypatch, options, says
):
    monkeypatch.setattr(harness, "log_likelihoods", lambda *_, **__: pytest.fail("scored"))
    path = tasks / "write.yaml"
    path.write_text(path.read_text().replace("max_gen_toks: 16", options))
    line, status = refused(capsys, saved, "--task-path", tasks, "--tasks", "choice,write")
    assert line == f"error: write: {says}" and status == 1


def test_metrics_may_be_numbers_of_numpy():
    metrics = {"alias": "t", "acc,none": 0.5, "f1,none": np.float32(0.25), "n,none": np.int64(3)}
    results = {"results": {"t": metrics | {"f1_stderr,none": np.float32(1), "x,none": "N/A"}}}
    assert harness.figures(results) == {"t, acc": 0.5, "t, f1": 0.25, "t, n": 3}
    written = json.loads(harness.as_json(results))["t"]
    assert (written["f1,none"], written["n,none"], written["x,none"]) == (0.25, 3, "N/A")


BOS, LISTED = {"bos_token": "!"}, {"added_tokens_decoder": {}}
TOKEN = {"content": "!", "lstrip": False, "normalized": False, "rstrip": False}
NAMED = {  # what files name the first token: tokenizer_config.json, special_tokens_map.json
    "none": ({}, None),
    "a text": (BOS, None),
    "an object": ({"bos_token": TOKEN | {"__type": "AddedToken"}, "add_bos_token": True}, None),
    "an object, the older file": ({}, {"bos_token": TOKEN}),
    "both": ({"bos_token": "?"}, BOS),
    "both, one with null": (BOS, {"bos_token": None}),
    "both, one with all added tokens": (LISTED | BOS, {"bos_token": "?"}),
    "the older file, beside all added tokens": (LISTED, BOS),
}


@pytest.mark.peers
@pytest.mark.parametrize("name", NAMED)
def test_a_text_begins_after_the_token_of_the_harness_own_backend(saved, tmp_path, name):
    newer, older = NAMED[name]
    directory = shutil.copytree(saved, tmp_path / "model")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | newer))
    if older is not None:
        (directory / "special_tokens_map.json").write_text(json.dumps(older))
    theirs = needed("lm_eval.models.huggingface").HFLM(
        str(directory), batch_size=1, device="cpu", dtype="float32", max_length=CONTEXT
    )
    ours = HarnessModel(load(str(directory)), batch=BATCH)
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.tok_encode("a") == theirs.tok_encode("a") == [97]
    request = instances("loglikelihood", ("", "short"))
    ((expected, _),) = theirs.loglikelihood(request, disable_tqdm=True)
    ((found, _),) = ours.loglikelihood(request, disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.peers
@pytest.mark.slow
def test_agreement_with_the_harness_own_hugging_face_backend(saved, lm, tasks):
    backend = needed("lm_eval.models.huggingface")
    theirs = backend.HFLM(
        str(saved), batch_size=3, device="cpu", dtype="float32", max_length=CONTEXT
    )
    ours, theirs = (
        lm_eval.simple_evaluate(
            model,
            tasks=list(TASKS),
            task_manager=TaskManager(include_path=str(tasks)),
            bootstrap_iters=0,
        )
        for model in (HarnessModel(lm, batch=3), theirs)
    )
    for name in TASKS:
        assert len(ours["samples"][name]) == 8
        for mine, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            a, b = mine["filtered_resps"], other["filtered_resps"]
            if name == "write":
                assert a == b
            else:
                np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=1e-4)
        for metric, value in ours["results"][name].items():
            if isinstance(value, float):
                assert value == pytest.approx(theirs["results"][name][metric], rel=1e-4)
