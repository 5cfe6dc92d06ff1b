"""A run that starts from a model in Hugging Face's format, in a directory or on the hub."""

import re
import shutil
from functools import partial

import jax
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from rich.console import Console

from tests import hub as local_hub
from tests.commands import ROOT, call, succeeded
from tests.runs.started import records
from twell_jax import analyze, data
from twell_jax import config as config_lib
from twell_jax.config import ConfigError
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import from_pretrained
from twell_jax.train.init_from import filled, tokenizer_of
from twell_jax.train.run_directory import load_config, load_run

PAGE = (ROOT / "docs/huggingface.md").read_text()


class Measuring(Exception):
    """Raised where an analysis has its model and its text, and would begin to compute."""


@pytest.fixture(scope="module")
def recipe(workspace):
    """The configuration of the page, with the corpus, the batches and the times of other tests."""
    (written,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    tree = yaml.safe_load(written)
    of_tests = yaml.safe_load((workspace / "config.yaml").read_text())
    del of_tests["model"]
    tree |= of_tests
    tree["model"] |= {"context": 32, "dtype": "float32"}
    (workspace / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return workspace / "recipe.yaml"


def load(path, *overrides, training=True):
    return config_lib.load(path, overrides, partial(filled, training=training))


@pytest.mark.slow
def test_a_model_of_the_hub_is_sparsified_continued_exported_and_generated_from(
    llama, recipe, tmp_path, monkeypatch
):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    train = ["train.py", recipe, f"run_dir={run_dir}", "init_from=org/llama@v1", "log_every=1",
             "optimizer.lr=1e-4"]  # fmt: skip
    with local_hub.serve() as (hub, address):
        hub.publish("org/llama", llama, revision="v1")
        with local_hub.environment(HF_ENDPOINT=address, HF_HOME=tmp_path / "home"):
            succeeded(*train, "steps=2")
    shutil.rmtree(tmp_path / "home")
    with local_hub.environment(HF_HUB_OFFLINE="1", HF_HOME=tmp_path / "home"):
        continued = succeeded(*train, "steps=3")
    assert f"continuing {run_dir} at step 2" in continued.stdout

    config, tokenizer, _ = load_run(str(run_dir))
    tokens = data.load(config, tokenizer).held_out
    logits, _ = from_pretrained(llama)(tokens[:, :-1])  # as it was trained, with SiLU
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    (source_ce,) = (line["source_ce"] for line in records(run_dir) if "source_ce" in line)
    assert source_ce == pytest.approx(float(np.mean(losses)), rel=1e-4)
    assert f"| {source_ce:.3f} |" in (run_dir / "report.md").read_text()
    lines = [line for line in records(run_dir) if "ce" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert np.isfinite([line["ce"] for line in lines]).all()
    for line in lines:
        assert len(line["nnz"]) == 2 and all(0 < nnz < 64 for nnz in line["nnz"])
    _, tokenizer, model = load_run(str(run_dir))
    assert model.config.activation == "relu" and tokenizer.size == 257
    assert model.config.param_dtype == "float32"
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(model)),
        jax.tree.leaves(nnx.state(from_pretrained(llama))),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)  # what three small steps change

    succeeded("-m", "twell_jax.export", run_dir, out)
    exported = from_pretrained(out)
    assert exported.config.activation == "relu"
    assert exported.config.context == 4096  # not the 32 of the run
    card = (out / "README.md").read_text()
    assert "\nbase_model: org/llama\n" in card and f"| {source_ce:.3f} |" in card
    assert (out / "report.png").read_bytes() == (run_dir / "report.png").read_bytes()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (llama / name).read_bytes()
    jax.tree.map(np.testing.assert_array_equal, nnx.state(exported), nnx.state(model))
    prompt = ["--prompt", "alpha", "--max-tokens", "2", "--temperature", "0"]
    texts = [call("-m", "twell_jax.generate", directory, *prompt) for directory in (run_dir, out)]
    assert texts[0].stdout.startswith("alpha") and texts[0].stdout == texts[1].stdout

    def measure(_, tokens, **__):
        raise Measuring(tokens.shape)

    monkeypatch.setattr(analyze, "measure_activity", measure)
    with pytest.raises(Measuring, match=r"\(2, 33\)"):  # the run's own text, without the hub
        analyze.analyze(str(run_dir), 2, Console(quiet=True))


def test_the_model_decides_what_the_configuration_leaves_open(llama, recipe):
    given = [f"init_from={llama}", "model.kv_heads=null", "model.d_ff=64", "model.norm_eps=1.0e-3"]
    settings = load(recipe, *given)
    model = from_pretrained(llama).config
    assert settings.data.tokenizer == settings.init_from == str(llama)
    assert (settings.model.context, settings.model.norm_eps) == (32, 1e-3)
    assert settings.model.activation == "relu"
    differ = {"context", "norm_eps", "activation", "dtype", "param_dtype", "kv_heads", "head_size"}
    assert settings.model.model_dump(exclude=differ) == model.model_dump(exclude=differ)
    assert settings.model.head_dim == model.head_dim
    assert load(recipe, *given, "model.activation=null").model.activation == "silu"
    assert load(recipe, *given, "model=null", "batch_tokens=4096").model.context == 4096
    assert (load(recipe, *given, "model=null", "batch_tokens=4096").model.param_dtype) == "float32"


def test_a_run_decides_the_model_where_the_configuration_leaves_it_open(
    workspace, recipe, tmp_path
):
    source = tmp_path / "source"
    source.mkdir()
    before = config_lib.load(workspace / "config.yaml", ["model.d_ff=96", "param_dtype=bfloat16"])
    (source / "config.yaml").write_text(config_lib.to_yaml(before))
    settings = load(recipe, f"init_from={source}", "model.activation=silu", "model.remat=block")
    changed = {"activation": "silu", "remat": "block"}
    assert settings.model == before.model.model_copy(update=changed)
    assert settings.data.tokenizer == "byte" and tokenizer_of(settings) is None
    bpe = before.data.model_copy(update={"tokenizer": "bpe"})
    written = config_lib.to_yaml(before.model_copy(update={"data": bpe}))
    (source / "config.yaml").write_text(written)
    (source / "tokenizer.json").write_text(ByteTokenizer().to_json())
    settings = load(recipe, f"init_from={source}")
    assert settings.data.tokenizer == str(source) and tokenizer_of(settings) == ByteTokenizer()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.d_model=64", "model.d_model: 64, but init_from=.*llama has 32; leave it out, as"),
        ("model.kv_heads=1", "model.kv_heads: 1, but init_from=.*llama has 2; leave it out, as"),
        ("model.gated=false", "model.gated: False, but init_from=.*llama has True; leave it out"),
        ("data.tokenizer=byte", "data.tokenizer: 'byte', but init_from=.*llama has its own token"),
        ("model.widht=3", "model.widht: unknown key"),
        ("init_from=no/such/model", "init_from: 'no/such/model': there is no such directory; a "),
        ("init_from=.", "init_from: .: is not the directory of a run and holds no config.json"),
    ],
)
def test_contradictions_are_one_line_before_the_run_begins(llama, recipe, override, says):
    process = call("train.py", recipe, f"init_from={llama}", "run_dir=/proc/none", override)
    assert process.returncode == 1
    assert re.match(f"error: {says}", process.stderr) and process.stderr.count("\n") == 1


def test_a_model_without_a_tokenizer_needs_a_named_one(llama, recipe, tmp_path):
    shutil.copytree(llama, tmp_path / "bare")
    (tmp_path / "bare/tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"^data.tokenizer: .* name the tokenizer that the model"):
        load(recipe, f"init_from={tmp_path / 'bare'}")
    settings = load(recipe, f"init_from={tmp_path / 'bare'}", "data.tokenizer=byte")
    assert settings.data.tokenizer == "byte"


def test_to_show_a_whole_configuration_the_hub_is_not_asked(recipe, tmp_path):
    whole = ["tiny", "init_from=org/llama"]
    with local_hub.environment(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=tmp_path):
        assert load(*whole, training=False) == config_lib.load("tiny", whole[1:])
        for asked in (partial(load, *whole), partial(load, recipe, whole[1], training=False)):
            with pytest.raises(ConfigError, match=r"^init_from: org/llama: .*check the network$"):
                asked()


def test_a_started_run_is_continued_with_its_own_settings_alone(llama, recipe, tmp_path):
    model = shutil.copytree(llama, tmp_path / "llama")
    run_dir = tmp_path / "run"
    given = [f"init_from={model}", f"run_dir={run_dir}", "model.remat=block"]
    before = load(recipe, *given)
    (run_dir / "checkpoints/1").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(config_lib.to_yaml(before))
    shutil.rmtree(model)
    assert load(recipe, *given) == load_config(run_dir) == before
    assert load(recipe, *given[:2]).model.remat == "none"
    other = f"init_from={tmp_path / 'other'}"  # whose settings those of the run are not
    with pytest.raises(ConfigError, match=r"^init_from: .*other': there is no such directory"):
        load(recipe, other, given[1])
