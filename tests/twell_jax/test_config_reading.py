"""How files and overrides are combined, and what is said of values that no one can mean."""

import io
import logging
import os
import subprocess
import sys

import pytest
import yaml

from tests.commands import ROOT
from tests.twell_jax.configs import CONFIGS, DECIDED
from twell_jax import config
from twell_jax.config import ConfigError, loading
from twell_jax.train import utf8

SHIPPED = CONFIGS / "0p5b.yaml"  # its source is a Hugging Face dataset


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.source=files", "data.paths=[a.txt]"],
        ["data.paths=[a.txt]", "data.source=files"],
        ["data.source=hf", "data.source=files", "data.paths=[a.txt]", "data.name=null"],
    ],
)
def test_another_source_drops_what_the_file_set_for_its_own(overrides):
    data = config.load(SHIPPED, overrides).data
    assert (data.source, data.paths, data.name) == ("files", ("a.txt",), None)
    assert data.tokenizer == "HuggingFaceTB/cosmo2-tokenizer"  # every source has one


def test_a_file_may_replace_the_source_of_its_base(tmp_path):
    (tmp_path / "base.yaml").write_text(SHIPPED.read_text())
    (tmp_path / "mine.yaml").write_text("base: base.yaml\ndata: {source: files, paths: [a.txt]}")
    assert config.load(tmp_path / "mine.yaml").data.name is None
    assert config.load(tmp_path / "mine.yaml", ["data.source=stdlib"]).data.paths == ()


def test_the_same_source_keeps_its_settings():
    data = config.load(SHIPPED, ["data.source=hf"]).data
    assert data == config.load(SHIPPED).data


def test_what_the_command_line_itself_contradicts_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"leave it out, or write data.name=null$"):
        config.load(SHIPPED, ["data.name=x/y", "data.source=stdlib"])
    with pytest.raises(ConfigError, match=r"leave it out, or write data.paths=\[\]$"):
        config.load(SHIPPED, ["data.source=stdlib", "data.paths=[a.txt]"])


def test_null_is_no_warm_up(path):
    assert config.load(path, ["l1_warmup=[2, 5]", "l1_warmup=null"]).l1_warmup == (0, 0)


def test_a_tilde_is_the_home_directory(path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    settings = config.load(
        path,
        [
            "run_dir=~/runs/a",
            "init_from=~/runs/b",
            "data.source=files",
            "data.paths=[~/corpus/*.txt, /data/~x.txt]",
            "data.tokenizer=~/bpe",
            "data.text_field=~text",
            "data.cache_dir=~/cache",
        ],
    )
    data = settings.data
    assert (settings.run_dir, settings.init_from) == ("/home/me/runs/a", "/home/me/runs/b")
    assert data.paths == ("/home/me/corpus/*.txt", "/data/~x.txt")
    assert (data.tokenizer, data.cache_dir) == ("/home/me/bpe", "/home/me/cache")
    assert data.text_field == "~text"


def test_an_ascii_locale_is_left_for_utf8(monkeypatch):
    begun = []
    monkeypatch.setattr(os, "execve", lambda *arguments: begun.append(arguments))
    utf8.ensure()
    assert not begun
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    monkeypatch.setenv("PYTHONUTF8", "0")
    utf8.ensure()
    ((program, command, environment),) = begun
    assert (program, command) == (sys.executable, [sys.executable, *sys.orig_argv[1:]])
    assert environment["PYTHONUTF8"] == "1"
    monkeypatch.setenv("PYTHONUTF8", "1")  # in vain, so not again
    utf8.ensure()
    assert len(begun) == 1


@pytest.mark.parametrize(("encoding", "shown"), [("latin-1", "é\\ufffd"), ("utf-8", "é\ufffd")])
def test_what_the_output_cannot_show_is_spelt_out(monkeypatch, encoding, shown):
    output = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", output)
    utf8.ensure()
    print("é\ufffd", end="", flush=True)
    assert output.buffer.getvalue().decode(encoding) == shown


@pytest.mark.slow
def test_paths_need_not_be_ascii_in_an_ascii_locale(tmp_path, path):
    (tmp_path / "é").mkdir()
    path.rename(tmp_path / "é" / "漢.yaml")
    (tmp_path / "é" / "b.yaml").write_text("base: 漢.yaml\nrun_dir: é", encoding="utf-8")
    arguments = ["é/b.yaml", "--print-config", "data.cache_dir=ü #1"]
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "twell_jax.train", *arguments]
    tree = yaml.safe_load(subprocess.check_output(command, env=variables, cwd=tmp_path))
    assert (tree["run_dir"], tree["data"]["cache_dir"]) == ("é", "ü #1")


def test_help_shows_lists_as_they_are_written():
    text = config.describe()
    assert "l1_warmup: list[int, int] = [0, 0]\n" in text
    assert "tuple" not in text


DEEP = "[" * 20_000  # more than Python recurses, also where torch has raised that limit


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (DEEP, "nested too deeply"),
        ("2026-13-45", "month must be in 1..12"),
        ("1" * 5000, "4300 digits"),
        ("!!bool x", "not valid YAML"),
        ("!!timestamp x", "not valid YAML"),
        ("&a [*a]", "must be|should be"),
        ("[[" + "x" * 5000 + "]]", "should be"),
    ],
)
def test_what_the_yaml_library_stumbles_over_is_one_short_line(path, value, says):
    for key in ("steps", "model"):
        with pytest.raises(ConfigError, match=says) as error:
            config.load(path, [f"{key}={value}"])
        assert str(error.value).startswith(f"{key}: ")
        assert "\n" not in str(error.value) and len(str(error.value)) < 400
    with pytest.raises(ConfigError):
        path.write_text(f"run_dir: {value}")
        config.load(path)


@pytest.mark.parametrize("value", ['["a\\0b"]', '["\\ud800"]'])
def test_no_path_has_a_null_character_or_half_of_a_pair(path, value):
    with pytest.raises(ConfigError, match=r"^data.paths: .*null characters"):
        config.load(path, ["data.source=files", f"data.paths={value}"])
    for character in ("\0", "\ud800"):
        with pytest.raises(ConfigError, match=r"^run_dir: .*null characters"):
            config.load(path, [f"run_dir=a{character}b"])


@pytest.mark.parametrize(
    "text",
    [
        "/x/q #1",
        "/x/q: 1",
        " x ",
        "'x'",
        "[1]",
        "3",
        "true",
        "2026-01-01",
        "{a: 1}",
        "*a",
        "é",
        "!x",
    ],
)
def test_keys_that_hold_text_take_it_as_it_is(path, text):
    overrides = [f"run_dir={text}", f"data.text_field={text}", f"init_from={text}"]
    settings = config.load(path, overrides)
    assert settings.run_dir == settings.data.text_field == settings.init_from == text
    with pytest.raises(ConfigError, match=r"^init_from.x: init_from is a single value"):
        config.load(path, ["init_from=a", "init_from.x=b"])


@pytest.mark.parametrize("null", ["", "~", "null"])
def test_keys_that_hold_text_may_be_null(path, null):
    assert config.load(path, ["init_from=a", f"init_from={null}"]).init_from is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("steps: 3\nseed: 1\nsteps: 4", "'steps' stands twice, in line 3"),
        ('steps: 3\n"steps": 3', "'steps' stands twice, in line 2"),
        ("model: {layers: 1, heads: 2, layers: 2}", "'layers' stands twice, in line 1"),
        (
            "data: &a {name: x}\nmodel: {<<: *a, heads: 1, heads: 2}",
            "'heads' stands twice, in line 2",
        ),
    ],
)
def test_a_key_that_stands_twice_is_refused(path, content, says):
    path.write_text(content)
    with pytest.raises(
        ConfigError, match=rf"valid\.yaml: not valid YAML \({says}; leave one out\)$"
    ):
        config.load(path)


def test_mappings_may_take_keys_from_others(path):
    path.write_text("mesh: &a {fsdp: 1, data: 1}\noptimizer: {<<: *a, fsdp: 2}\nmodel: {<<: *a}")
    tree = config.read(path)
    assert tree["optimizer"] == {"fsdp": 2, "data": 1} and tree["model"] == tree["mesh"]


def test_a_file_of_too_many_keys_is_refused_before_it_is_read(path):
    path.write_text("".join(f"key{i}: 1\n" for i in range(400_000)))
    with pytest.raises(ConfigError, match=r"valid\.yaml: cannot be read \(larger than 0.5 MiB\)"):
        config.load(path)


def test_files_that_are_each_others_base_by_other_names(path):
    (path.parent / "a").mkdir()
    path.write_text("base: a/../valid.yaml")
    with pytest.raises(ConfigError, match="has a base that has a base, more than 20 times"):
        config.load(path)


def test_aliases_that_multiply_are_not_spelt_out(path):
    lines = ["a0: &a0 x"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 20)]
    path.write_text("\n".join([*lines, "run_dir: *a19"]))
    with pytest.raises(ConfigError) as error:
        config.load(path)
    assert len(str(error.value)) < 1000


def test_an_error_stays_one_line_whatever_a_key_holds(path):
    with pytest.raises(ConfigError) as error:
        config.load(path, ["ste\nps=3"])
    assert str(error.value).startswith("ste ps: unknown key")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("steps=3000000000", "steps: .*2147483647"),
        ("optimizer.warmup_steps=3000000000", "optimizer.warmup_steps: .*2147483647"),
        (f"model.d_ff={10**400}", "model.d_ff: must be less than 2\\^63"),
        ("l1_stages=20000", "l1_stages: .*10000"),
        ("dead_window_tokens=1000000000000", "dead_window_tokens: .*2\\^31 steps"),
    ],
)
def test_counts_that_no_device_can_hold_are_refused(path, override, says):
    with pytest.raises(ConfigError, match=f"^{says}"):
        config.load(path, [override])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["optimizer.warmup_steps=100"], "optimizer.warmup_steps: 100 of 100 steps"),
        (["l1_coefficient=1", "l1_warmup=[0, 100]"], "l1_warmup: ends at step 100 of 100"),
        (["sparsity_target=8", "l1_warmup=[0, 100]"],
         "sparsity_target: the L1 coefficient is not moved towards it before step 100 of 100"),
        (["union_target=0.8", "micro_batch=8", "model.d_ff=256", "l1_warmup=[0, 100]"],
         "union_target: the L1 coefficient is not moved towards it before step 100 of 100"),
        (["union_target=0.05", "micro_batch=8", "model.d_ff=2816"],
         "union_target: 0.05 is hardly more than a layer has as soon as one neuron is active, "
         "0.0455 with model.d_ff=2816, so the L1 coefficient would grow until hardly any is; "
         "write 0.069 or more"),
        (["skip_dead_every=5", "model.ffn_implementation=xla"],
         "skip_dead_every: gains nothing with model.ffn_implementation=xla"),
        (["optimizer.lr=3"], "optimizer.lr: 3 is far from what is usual, 1e-08 to 1"),
        (["data.tokenizer=bpe"],
         "model.vocab_size: 257 is hardly more than the 257 of data.tokenizer=byte"),
        (["optimizer.eps=1"], "optimizer.eps: 1 is far"),
        (["optimizer.clip_norm=1e-9"], "optimizer.clip_norm: 1e-09 is far"),
        (["model.init_scale=20"], "model.init_scale: 20 is far"),
        (["model.activation=silu", "l1_coefficient=1"], "l1_coefficient: 1 makes activations of"),
    ],
)  # fmt: skip
def test_what_can_hardly_be_meant_is_a_warning(path, caplog, overrides, says):
    config.load(path, overrides)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(says)


def test_the_last_name_of_a_key_is_enough_where_no_other_has_it(path):
    short = config.load(path, ["lr=1e-3", "d_ff=96", "source=files", "paths=a.txt", "steps=7"])
    whole = ["optimizer.lr=1e-3", "model.d_ff=96", "data.source=files", "data.paths=[a.txt]"]
    assert short == config.load(path, [*whole, "steps=7"])
    path.write_text(path.read_text() + "lr: 1.0e-3\n")
    with pytest.raises(ConfigError, match=r"^lr: unknown key; did you mean optimizer\.lr\?"):
        config.load(path)


def test_no_two_keys_with_one_last_name_are_taken_for_each_other(path, monkeypatch):
    monkeypatch.setattr(loading, "_keys", lambda: {"model.lr": float, "optimizer.lr": float})
    with pytest.raises(ConfigError, match=r"did you mean model\.lr or optimizer\.lr\?"):
        config.load(path, ["lr=1"])


@pytest.mark.parametrize("one", ["one.txt", "corpus/*.txt", "*.txt", "a: b.txt", "7"])
def test_one_path_need_not_be_a_list(path, one):
    loaded = config.load(path, ["data.source=files", f"data.paths={one}"])
    assert loaded.data.paths == (one,)
    in_file = yaml.safe_load(path.read_text()) | {"data": {"source": "files", "paths": one}}
    path.write_text(yaml.safe_dump(in_file))
    assert config.load(path).data.paths == (one,)


def test_usual_settings_are_not_doubted(path, caplog):
    config.load(path, ["data.tokenizer=bpe", "model.vocab_size=512"])
    for file in (path, *CONFIGS.glob("*.yaml")):
        config.load(file, DECIDED.get(file.stem, []))
    config.load(path, ["optimizer.warmup_steps=99", "l1_coefficient=1", "l1_warmup=[0, 99]"])
    config.load(path, ["l1_warmup=[0, 1000]"])  # of no coefficient
    config.load(path, ["skip_dead_every=5", "model.ffn_implementation=mosaic"])
    config.load(path, ["skip_dead_every=5", "sparse_gradients_every=10"])
    assert not caplog.records
