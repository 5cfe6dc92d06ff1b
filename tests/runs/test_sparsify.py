"""A dense model is made sparse in one command, which reports on both."""

import json
import re
import shutil

import pytest
import yaml

from tests import hub as local_hub
from tests.commands import call, succeeded
from tests.packages import needed
from tests.runs.started import records
from twell_jax.train.run_directory import load_config

SHORT = ["steps=2", "model.context=32", "batch_tokens=256", "model.dtype=float32"]


@pytest.fixture
def corpus(workspace):
    return ["--data", f"{workspace}/corpus/1*.txt", f"{workspace}/corpus/2*.txt"]


def run(name, run_dir, *arguments):
    return succeeded("-m", "twell_jax.sparsify", name, *arguments, f"run_dir={run_dir}")


def settings(name, *arguments):
    shown = succeeded("-m", "twell_jax.sparsify", name, *arguments, "--print-config")
    return yaml.safe_load(shown.stdout)


def table(run_dir):
    lines = re.findall(r"^\| (.*) \|$", (run_dir / "report.md").read_text(), re.MULTILINE)
    return {name: cells for name, *cells in (line.split(" | ") for line in lines)}


@pytest.mark.slow
def test_a_dense_model_becomes_a_sparse_one_with_a_report_of_both(llama, corpus, tmp_path):
    process = run(llama, tmp_path, *corpus, *SHORT, "lasso_share=0", "sample_tokens=0")
    first, *_ = records(tmp_path)
    ce, bits = first["source_ce"], first["source_bits_per_byte"]
    assert f"held-out CE of {llama}: {ce:.3f}  {bits:.3f} bits/byte\n" in process.stdout
    found = table(tmp_path)
    dense, sparse = found["held-out cross-entropy, nats/token"]
    assert dense == f"{ce:.3f}" and 0 < float(sparse) < 9
    dense, sparse = found["active neurons of a token"]
    assert dense == "64.0" and 0 < float(sparse) < 64
    assert "![report.png](report.png)" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    config = load_config(tmp_path)
    assert config.targets == {"sparsity_target": 3.2} and config.model.activation == "relu"
    assert len(config.data.paths) == 2 and config.data.tokenizer == str(llama)
    # The first step shows what the model's neurons did, whatever log_every is.
    assert [line["step"] for line in records(tmp_path) if "ce" in line] == [1, 2]


@pytest.mark.slow
def test_a_run_is_made_sparse_on_its_own_text_and_continued(workspace, uninterrupted, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(workspace / "run", source)
    run_dir = tmp_path / "run"
    run(source, run_dir, "steps=2")
    before, config = load_config(source), load_config(run_dir)
    for key in ("batch_tokens", "micro_batch", "data"):
        assert getattr(config, key) == getattr(before, key)
    assert config.optimizer.lr == 1e-3 and config.model.dtype == "float32"
    first = records(run_dir)[0]
    assert (
        first["source_activation"] == "relu"
        and first["source_prompt"] == (records(run_dir)[-1]["prompt"])
    )
    old, new = table(run_dir)["active neurons of a token"]
    assert 0 < float(old) < 64 and 0 < float(new) < 64
    shutil.rmtree(source)
    continued = run(source, run_dir, "steps=3")
    assert f"continuing {run_dir} at step 2" in continued.stdout


@pytest.mark.slow
def test_a_model_of_the_hub_and_the_name_of_its_run(llama, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with local_hub.serve() as (hub, address):
        hub.publish("org/llama", llama, revision="v1")
        with local_hub.environment(HF_ENDPOINT=address, HF_HOME=tmp_path / "home"):
            succeeded("-m", "twell_jax.sparsify", "org/llama@v1", *corpus, *SHORT)
    assert "It began as `org/llama@v1`." in (tmp_path / "runs/llama-sparse/report.md").read_text()


def test_the_model_decides_shapes_and_the_command_what_fits_them(llama, corpus):
    found = settings(llama, "steps=300", *corpus)
    model = found["model"]
    assert (model["vocab_size"], model["d_ff"], model["layers"]) == (257, 64, 2)
    assert (model["context"], found["batch_tokens"]) == (2048, 64 * 2048)
    assert found["l1_warmup"] == [0, 30] and found["run_dir"] == "runs/llama-sparse"
    found = settings(llama, "--data", "hf:some/text", "steps=300", "lr=1e-3")
    assert (found["data"]["source"], found["data"]["name"]) == ("hf", "some/text")
    assert found["optimizer"]["lr"] == 1e-3


def test_a_dry_run_shows_what_it_would_take(llama, corpus, monkeypatch):
    seen = []
    monkeypatch.setattr("twell_jax.train.memory.print_dry_run", lambda *asked: seen.append(asked))
    run(llama, "none", *corpus, *SHORT, "--dry-run", "2")
    ((config, devices),) = seen
    assert devices == 2 and config.init_from == str(llama)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{llama}"], "error: --data: names the text to train on, which only a run has, and /"),
        (["{llama}", "--data", "/no/such.txt", "steps=2"], "error: data.paths: '/no/such.txt' mat"),
        (["/no/such", "--data", "x"], "error: init_from: '/no/such': there is no such directory; "),
        (["{llama}", "--data", "x", "stepz=2"], "error: stepz: unknown key; did you mean steps?"),
        (["{llama}", "lr", "--data", "x"], "error: 'lr': an override is written key=value"),
        pytest.param(
            *(["{llama}", "--data", "x", "--tasks", "no_such_task"], "error: --tasks: the harness"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_wrong_is_one_line(llama, tmp_path, arguments, says):
    if "--tasks" in arguments:
        needed("lm_eval")
    given = [argument.format(llama=llama) for argument in arguments]
    process = call("-m", "twell_jax.sparsify", *given, f"run_dir={tmp_path / 'run'}")
    assert process.returncode == 1
    errors = [line for line in process.stderr.splitlines() if not line.startswith("INFO")]
    assert len(errors) == 1 and errors[0].startswith(says), process.stderr
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: NAME\n"),
        (["steps=2"], "NAME: comes first"),
        (["a", "--data", "x", "hf:y"], "--data: takes files, or one hf:NAME"),
        (["a", "--task-path", "/no/such"], "--task-path: there is no directory /no/such"),
    ],
)
def test_wrong_usage_is_said_at_once(arguments, says):
    process = call("-m", "twell_jax.sparsify", *arguments)
    assert process.returncode == 2 and says in process.stderr


def test_a_directory_whose_name_has_an_equals_sign_is_no_setting(tmp_path, monkeypatch):
    (tmp_path / "lr=0.1").mkdir()
    monkeypatch.chdir(tmp_path)
    process = call("-m", "twell_jax.sparsify", "lr=0.1", "--data", "text.txt", "steps=2")
    assert process.stderr.startswith("error: init_from: lr=0.1: is not the directory of a run")


@pytest.mark.slow
def test_both_models_are_scored_on_tasks_that_are_named(llama, corpus, tmp_path, monkeypatch):
    needed("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = [
        {"question": f"is {i} odd?", "choices": ["no", "yes"], "label": i % 2} for i in range(6)
    ]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "odd.yaml").write_text(
        "task: odd\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: '{{label}}'\nmetric_list: [{metric: acc}]\n"
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {questions}}}}}\n"
        "test_split: test\n"
    )
    asked = ["--tasks", "odd", "--task-path", tasks, "--limit", "4"]
    process = run(llama, tmp_path / "run", *corpus, *SHORT, "sample_tokens=0", *asked)
    before, after = table(tmp_path / "run")["odd, acc"]
    assert 0 <= float(after) <= 1
    # The dense model is scored before it is trained on.
    shown = process.stdout.index(f"odd, acc of {llama}: {before}\n")
    assert shown < process.stdout.index("step 2")
