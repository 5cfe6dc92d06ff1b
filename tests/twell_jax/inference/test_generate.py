"""python -m twell_jax.generate and export as a person runs them; evaluate without the harness."""

import json
import re
import shutil
import sys

import jax
import numpy as np
import pytest
import tokenizers as hf
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.twell_jax import drawn, untrained
from twell_jax import config as config_lib
from twell_jax import evaluate, export, generate, inference
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.inference import Sampling, language_model
from twell_jax.models.pretrained import save_pretrained
from twell_jax.train import memory
from twell_jax.train.run_directory import load_run

MODEL = drawn.SMALL | {"vocab_size": 257, "context": 32}
OPTIONS = ["--max-tokens", "8", "--top-k", "20"]  # tests that have them share compiled programs


@pytest.fixture
def run_dir(tmp_path):
    return untrained.begin(tmp_path / "run", MODEL)


@pytest.fixture
def saved(run_dir):
    """A run with a checkpoint: its configuration, its directory, and the state."""
    return *run_dir, untrained.save(*run_dir)


def test_a_run_with_sparse_gradients_in_8_bits_writes_text_on_any_machine(saved):
    config, paths, _ = saved
    model = config.model.model_copy(update={"ffn_gradients": "sparse", "matmul_dtype": "float8"})
    paths.config.write_text(config_lib.to_yaml(config.model_copy(update={"model": model})))
    lm = language_model.load(str(paths.directory))
    assert (lm.model.config.ffn_gradients, lm.model.config.matmul_dtype) == (None, None)
    prompts = [[1] * 60, [2] * 3]  # more than 64 tokens, from which on gradients can be sparse
    sampling = Sampling(temperature=0.8, top_k=20)
    steps = inference.generate(lm.model, prompts, max_tokens=8, sampling=sampling)
    assert len(list(steps)) == 8


@pytest.mark.slow
def test_a_run_is_loaded_and_continued_from_the_command_line(saved, capsys):
    config, paths, state = saved
    loaded_config, tokenizer, model = load_run(str(paths.directory))
    assert loaded_config == config and tokenizer == ByteTokenizer()
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)

    def run(command, *arguments):
        command.main(arguments)
        return capsys.readouterr()

    def continued(directory, *prompts):
        prompts = [argument for prompt in prompts for argument in ("--prompt", prompt)]
        return run(generate, str(directory), *prompts, *OPTIONS)

    first = continued(paths.directory, "def ")
    assert first.out.startswith("def ") and len(first.out) > 5
    assert re.fullmatch(
        r"prefill: 4 tokens, [\d,]+ tokens/s; "
        r"decode: \d+ tokens, [\d,]+ tokens/s, \d+\.\d{3} ms a step\n"
        r"decodes one sequence by XLA: .*\n",
        first.err,
    )
    several = continued(paths.directory, "def ", "class")
    assert several.out.startswith("def ") and "\n---\nclass" in several.out
    prompts = ["--prompt", "a", "--prompt", "b", "--temperature", "0"]
    nothing = run(generate, str(paths.directory), *prompts, "--max-tokens", "0")
    assert nothing.out == "a\n---\nb\n" and not nothing.err
    assert continued(paths.directory, "").out  # continues the end of a text

    exported = paths.directory / "exported"
    run(export, str(paths.directory), str(exported))
    assert continued(exported, "def ").out == first.out


@pytest.mark.parametrize("source", ["run", "directory", "8 bits"])
def test_programs_are_compiled_once_from_shapes(saved, source, caplog, request):
    name = str(saved[1].directory)
    if source != "run":
        lm = language_model.load(name)
        lm.model.quantise(["gate", "up"] if source == "8 bits" else [])
        save_pretrained(name := f"{name}/exported", lm.model, lm.tokenizer)
    before = jax.config.jax_log_compiles
    request.addfinalizer(lambda: jax.config.update("jax_log_compiles", before))
    jax.config.update("jax_log_compiles", True)
    options = "--max-tokens", "6", "--top-k", str(30 + len(source))  # programs of its own
    generate.main([name, "--prompt", "def ", *options])
    compiled = re.findall(r"Finished XLA compilation of jit\((prefill|extend)\)", caplog.text)
    assert sorted(compiled) == ["extend", "prefill"]


def test_special_tokens_of_a_prompt_are_read_on_purpose(saved, capsys):
    run, exported = saved[1].directory, saved[1].directory / "exported"
    export.main([str(run), str(exported)])
    backend = hf.Tokenizer.from_file(str(exported / "tokenizer.json"))
    backend.post_processor = hf.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    backend.save(str(exported / "tokenizer.json"))

    def read(directory, *options):  # tokens of the prompt
        generate.main([str(directory), "--prompt", "<|endoftext|>ab", *options, *OPTIONS])
        return int(re.match(r"prefill: (\d+) tokens", capsys.readouterr().err)[1])

    assert (read(run), read(exported)) == (15, 16)  # the latter begins with <|endoftext|>
    assert (read(run, "--special-tokens"), read(exported, "--special-tokens")) == (3, 3)


def test_all_ends_of_text_of_the_files_stop_a_text(saved):
    run, exported = saved[1].directory, saved[1].directory / "exported"
    export.main([str(run), str(exported)])
    assert language_model.load(str(exported)).stop_ids == (256,)
    (exported / "generation_config.json").write_text('{"eos_token_id": [256, 10]}')
    assert language_model.load(str(exported)).stop_ids == (256, 10)
    assert language_model.load(str(run)).stop_ids == (256,)
    shutil.copytree(exported, run / "source")  # as of a run that began with it
    assert language_model.load(str(run)).stop_ids == (256, 10)


def test_float16_is_exported_as_float32_exactly(saved, tmp_path):
    half, out = tmp_path / "half", tmp_path / "out"
    export.main([str(saved[1].directory), str(half)])
    path = half / "model.safetensors"
    tensors = {name: a.astype(np.float16) for name, a in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    settings = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(settings | {"dtype": "float16"}))
    export.main([str(half), str(out), "--dtype", "float32"])
    written = load_file(out / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, a in written.items():
        np.testing.assert_array_equal(a, tensors[name].astype(np.float32))


def test_a_tilde_is_the_home_directory(saved, monkeypatch):
    home = saved[1].directory.parent
    monkeypatch.setenv("HOME", str(home))
    export.main(["~/run", "~/exported"])
    assert (home / "exported/config.json").exists()
    for name in ("~/run", "~/exported"):
        assert language_model.load(name).model.config.d_model == 32


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_export_writes_the_asked_dtype(saved, tmp_path, dtype):
    out = tmp_path / "exported"
    arguments = ["--dtype", dtype, "--max-shard-gb", "1e300"]  # more bytes than floats count
    export.main([str(saved[1].directory), str(out), *arguments])
    stored = {tensor.dtype.name for tensor in load_file(out / "model.safetensors").values()}
    assert stored == {dtype}


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("run", "has no checkpoint yet"),
        ("nowhere", "nowhere': there is no such directory; a model on the Hugging Face hub is "),
        (".", "is not the directory of a run and holds no config.json"),
    ],
)
def test_what_is_no_model_is_one_clear_line(run_dir, directory, message):
    _, paths = run_dir
    directory = str(paths.directory.parent / directory)
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        generate.main([directory, "--prompt", "x"])


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    save_pretrained(tmp_path, drawn.transformer(**MODEL), ByteTokenizer())
    backend = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<pad>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "model.safetensors").unlink()  # it is refused before these are read
    says = r"^error: the tokenizer has 258 ids, the model only 257; .*\Z"
    with pytest.raises(SystemExit, match=says):
        generate.main([str(tmp_path), "--prompt", "x"])


def test_a_template_with_a_token_that_the_model_lacks_is_refused(tmp_path):
    save_pretrained(tmp_path, drawn.transformer(**MODEL), ByteTokenizer())
    path = tmp_path / "tokenizer.json"
    backend = hf.Tokenizer.from_file(str(path))
    backend.post_processor = hf.processors.TemplateProcessing("<s> $A", None, [("<s>", 128000)])
    backend.save(str(path))
    (tmp_path / "model.safetensors").unlink()  # it is refused before these are read
    says = f"^error: {path}: post_processor puts id 128000 before a text, but .* 0 to 256; .*"
    with pytest.raises(SystemExit, match=says):
        generate.main([str(tmp_path), "--prompt", "x"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-tokens", "-1"], "argument --max-tokens: must be at least 0, got -1"),
        (["--seed", "-1"], "argument --seed: must be at least 0, got -1"),
        (["--top-k", "0"], "argument --top-k: must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_one_line_before_a_model_is_read(capsys, arguments, says):
    with pytest.raises(SystemExit, match="2"):
        generate.main(["nowhere", "--prompt", "x", *arguments])
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {says}")


def test_more_tokens_than_memory_holds_are_refused(saved, monkeypatch):
    monkeypatch.setattr(memory, "of_device", lambda: 2**33)
    # keys and values of 2 layers x 32 features in float32: 512 bytes a token
    with pytest.raises(SystemExit, match=r"^error: .* 100000064 tokens: at least 48 "):
        generate.main([str(saved[1].directory), "--prompt", "x", "--max-tokens", "100000000"])


def test_tokens_beyond_the_context_are_announced(saved, capsys):
    directory = str(saved[1].directory)
    generate.main([directory, "--prompt", "x" * 24, *OPTIONS])
    assert "context" not in capsys.readouterr().err
    generate.main([directory, "--prompt", "x" * 25, *OPTIONS])
    assert capsys.readouterr().err.startswith(
        "warning: 25 tokens of the prompt and --max-tokens 8 exceed the 32 of the model's context"
    )
    generate.main([directory, "--prompt", "x", "--prompt", "x" * 25, *OPTIONS])
    assert "warning: 25 tokens of the prompt" in capsys.readouterr().err  # of the longest one


def test_without_the_harness_evaluate_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "twell_jax.inference.harness", raising=False)
    monkeypatch.delattr(inference, "harness", raising=False)
    with pytest.raises(SystemExit, match=r"^error: .* pip install -e '\.\[eval\]' "):
        evaluate.main(["runs/any"])


def test_a_prompt_that_is_no_text_is_named(saved, capsys):
    with pytest.raises(SystemExit):
        generate.main([str(saved[1].directory), "--prompt", "fine", "--prompt", "\udcffabc"])
    assert "argument --prompt: is not UTF-8 text" in capsys.readouterr().err
