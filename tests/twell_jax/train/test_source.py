"""What a run keeps of the model that it began with, and of its chat template."""

import json
import os
import shutil

import pytest

from tests import hub as local_hub
from tests.packages import needed
from tests.twell_jax import drawn, untrained
from tests.twell_jax.models.pretrained.small import change_config
from twell_jax.config import ConfigError
from twell_jax.data import chats, tokenizers
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import card, hub, save_pretrained
from twell_jax.models.pretrained import tokenizer as pretrained_tokenizer
from twell_jax.train import exported, source
from twell_jax.train.run_directory import RunPaths

MODEL = drawn.SMALL | {"vocab_size": 257, "context": 32}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "2+2?<|endoftext|>"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Somebody's model for chats."""
    path = tmp_path_factory.mktemp("source") / "chatty"
    save_pretrained(path, drawn.transformer(**MODEL), ByteTokenizer())
    change_config(path, max_position_embeddings=4096)
    change_tokenizer(path, chat_template=TEMPLATE)
    (path / "generation_config.json").write_text('{"eos_token_id": 256, "top_k": 5}')
    (path / "README.md").write_text("---\nlicense: mit\ntags: [a]\n---\n# Chatty\n")
    return path


def change_tokenizer(directory, **changes):
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def begun(directory, name=None, **data):
    """The configuration and the paths of a run that has kept what it needs of its source."""
    data = {"tokenizer": name or "byte", **data}
    config, paths = untrained.begin(directory, MODEL, init_from=name, data=data)
    source.keep(config, ByteTokenizer(), paths.source)
    return config, paths


def test_a_run_keeps_the_files_of_its_source_and_its_export_has_them(published, tmp_path):
    model = shutil.copytree(published, tmp_path / "chatty")
    _, first = begun(tmp_path / "first", str(model))
    shutil.rmtree(model)
    config, second = begun(tmp_path / "second", str(first.directory), tokenizer="byte")
    shutil.rmtree(first.directory)  # what began with a run needs that no longer, either
    untrained.save(config, second)
    out = tmp_path / "out"
    exported.export_run(str(second.directory), out)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (published / name).read_bytes()
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 4096
    assert "\nlicense: mit\n" in (out / "README.md").read_text()
    assert not list(second.directory.glob("*.tmp"))


def test_a_name_on_the_hub_is_the_base_of_the_card(published, tmp_path):
    needed("huggingface_hub")
    with local_hub.serve() as (content, address):
        content.publish("org/chatty", published, "v1")
        with local_hub.environment(HF_ENDPOINT=address, HF_HOME=tmp_path / "home"):
            _, paths = begun(tmp_path / "run", "org/chatty@v1")
    known = {"base_model": "org/chatty", "license": "mit"}
    assert card.origin(hub.Source(paths.source)) == known
    kept = paths.source / "tokenizer_config.json"
    assert kept.read_bytes() == (published / kept.name).read_bytes()


def test_a_run_that_needs_nothing_keeps_nothing(tmp_path):
    config, paths = begun(tmp_path / "run")
    assert not paths.source.exists()
    paths.source.mkdir()
    (paths.source / "tokenizer.json").write_text("of an earlier start")
    source.keep(config, ByteTokenizer(), paths.source)
    assert not paths.source.exists() and not list(paths.directory.glob("*.tmp"))


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_the_template_of_a_run_from_scratch_is_exported(tmp_path, kind):
    needed("jinja2")
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    tokenizer = ByteTokenizer() if kind == "byte" else tokenizers.train_bpe(["abc"], 257)
    data = {"format": "messages", "chat_template": str(path), "source": "files", "paths": ["x"],
            "tokenizer": kind}  # fmt: skip
    config, paths = untrained.begin(tmp_path / "run", MODEL, data=data)
    tokenizers.save(tokenizer, paths.tokenizer)
    source.keep(config, tokenizer, paths.source)
    path.unlink()
    untrained.save(config, paths)
    exported.export_run(str(paths.directory), tmp_path / "out")
    assert (tmp_path / "out/chat_template.jinja").read_text() == TEMPLATE
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    # The template writes special tokens, so that transformers must read them as such.
    assert settings["split_special_tokens"] is False
    assert settings["eos_token"] == "<|endoftext|>" and "bos_token" not in settings
    loaded = pretrained_tokenizer.load(tmp_path / "out")
    text = chats.conversation(chats.Template(TEMPLATE, "", "<|endoftext|>"), CHAT).text
    ids = tokenizer.encode([text], special_tokens=True)[0].tolist()
    assert loaded.encode([text], special_tokens=True)[0].tolist() == ids


def test_a_template_that_the_run_names_comes_before_that_of_its_source(published, tmp_path):
    needed("jinja2")
    path = tmp_path / "other.jinja"
    path.write_text(TEMPLATE + "!")
    data = {"format": "messages", "source": "files", "paths": ["x"]}
    _, paths = begun(tmp_path / "named", str(published), chat_template=str(path), **data)
    assert (paths.source / "chat_template.jinja").read_text() == TEMPLATE + "!"
    _, paths = begun(tmp_path / "own", str(published), **data)
    assert not (paths.source / "chat_template.jinja").exists()  # it is in tokenizer_config.json
    assert (paths.source / "tokenizer_config.json").exists()


def test_a_file_that_cannot_be_copied_is_one_line(published, tmp_path):
    model = shutil.copytree(published, tmp_path / "chatty")
    (tmp_path / "secret").write_text("a key")
    (model / "tokenizer.model").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"^init_from: .*tokenizer.model: is a link that leads o"):
        begun(tmp_path / "run", str(model))
    assert not RunPaths(tmp_path / "run").source.exists()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_rights_that_the_umask_says(published, tmp_path, umask):
    before = os.umask(umask)
    try:
        _, paths = begun(tmp_path / "run", str(published))
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in paths.source.iterdir()}
    assert modes == {0o666 & ~umask}


@pytest.mark.peers
def test_transformers_writes_the_chats_that_the_run_was_trained_on(tmp_path):
    transformers = needed("transformers")
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    data = {"format": "messages", "chat_template": str(path), "source": "files", "paths": ["x"]}
    config, paths = begun(tmp_path / "run", **data)
    untrained.save(config, paths)
    exported.export_run(str(paths.directory), tmp_path / "out")
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = chats.conversation(chats.template(config.data), CHAT).text
    ids = ByteTokenizer().encode([text], special_tokens=True)[0].tolist()
    assert peer.apply_chat_template(CHAT, return_dict=False) == ids
    assert ids.count(256) == 3
