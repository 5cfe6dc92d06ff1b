"""Models by their names on a hub that this machine serves: what is downloaded, and what is said."""

import json
import sys
from pathlib import Path

import pytest

from tests import hub as local_hub
from tests.twell_jax.models.pretrained.small import assert_same_parameters, make
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.inference import language_model
from twell_jax.models.pretrained import PretrainedError, from_pretrained, hub, save_pretrained

SETTINGS = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "README.md",  # which says the licence
]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model as its author would publish it, with files that nobody here should run or need."""
    path = tmp_path_factory.mktemp("model")
    save_pretrained(path, make(), ByteTokenizer())
    for name in ("pytorch_model.bin", "modeling_llama.py", "README.md", "training_args.bin",
                 "original/consolidated.safetensors"):  # fmt: skip
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"!")
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def published(server, tmp_path, monkeypatch):
    """The hub, empty, as the one that HF_ENDPOINT names; the cache and the directory are empty."""
    content, address = server
    content.clear()
    monkeypatch.chdir(tmp_path)
    with local_hub.environment(HF_ENDPOINT=address, HF_HOME=tmp_path / "home"):
        yield content


def offline(tmp_path):
    return local_hub.environment(HF_HUB_OFFLINE="1", HF_HOME=tmp_path / "home")


def says(name, revision=None):
    with pytest.raises(PretrainedError) as error:
        hub.fetch_weights(hub.find(name, revision))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_name_on_the_hub_is_downloaded_once_and_then_read_offline(
    published, directory, tmp_path, capfd
):
    published.publish("org/small", directory)
    expected = from_pretrained(directory)
    assert_same_parameters(from_pretrained("org/small"), expected)
    assert capfd.readouterr().err.count("Fetching") >= 1  # the weights, which may take long
    assert sorted(published.downloaded) == sorted([*SETTINGS, "model.safetensors"])
    language_model.load("org/small")
    assert len(published.downloaded) == 6 and not capfd.readouterr().err
    with offline(tmp_path):
        assert_same_parameters(from_pretrained("org/small"), expected)
    with local_hub.environment(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=tmp_path / "home"):
        assert_same_parameters(from_pretrained("org/small"), expected)
    assert len(published.downloaded) == 6


def test_a_revision_is_another_model(published, directory, tmp_path):
    commit = published.publish("org/small", directory, revision="v1")
    other = tmp_path / "other"
    save_pretrained(other, make(d_ff=16), ByteTokenizer())
    published.publish("org/small", other)
    published.publish("org/small", other, revision="refs/pr/1")
    assert from_pretrained("org/small").config.d_ff == 16
    for revision in ("v1", commit):
        assert from_pretrained("org/small", revision=revision).config.d_ff == 24
        assert language_model.load(f"org/small@{revision}").model.config.d_ff == 24
    assert hub.find("org/small@refs/pr/1") == hub.find("org/small")
    with offline(tmp_path):
        assert from_pretrained("org/small@v1").config.d_ff == 24
    assert says("org/small@v1", "v2") == "org/small@v1: name one revision, got 'v1' and 'v2'"


def test_shards_are_those_that_the_index_names(published, directory, tmp_path):
    model = from_pretrained(directory)
    sharded = tmp_path / "sharded"
    save_pretrained(sharded, model, ByteTokenizer(), max_shard_bytes=10_000)
    shards = sorted(path.name for path in sharded.glob("model-*.safetensors"))
    assert len(shards) > 1
    (sharded / "consolidated.safetensors").write_bytes(b"!")
    published.publish("org/sharded", sharded)
    assert_same_parameters(from_pretrained("org/sharded"), model)
    weights = [name for name in published.downloaded if name.endswith(".safetensors")]
    assert sorted(weights) == shards


def test_settings_alone_are_downloaded_where_the_model_is_not_supported(
    published, directory, tmp_path
):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "gpt_xyz"}
    (foreign / "config.json").write_text(json.dumps(config))
    (foreign / "model.safetensors").write_bytes(b"!")
    published.publish("org/foreign", foreign)
    with pytest.raises(PretrainedError, match="model_type='gpt_xyz' is not supported"):
        from_pretrained("org/foreign")
    assert published.downloaded == ["config.json"]


def test_a_local_path_wins(published, directory, tmp_path, monkeypatch):
    published.publish("org/small", directory)
    (tmp_path / "org").mkdir()
    (tmp_path / "org/small").symlink_to(directory)
    assert hub.find("org/small") == hub.Source(Path("org/small"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.find("~/org/small").directory == tmp_path / "org/small"
    assert_same_parameters(from_pretrained("~/org/small"), from_pretrained(directory))
    save_pretrained("~/saved", from_pretrained(directory), ByteTokenizer())
    assert (tmp_path / "saved/config.json").exists()
    assert says("org/small", "v1") == "org/small: is a local path, which has no revision 'v1'"
    assert not published.downloaded


@pytest.mark.parametrize("name", ["none", "./org/small", "/org/small", "a/b/c", "org/x\ny", ""])
def test_what_is_neither_a_path_nor_a_name_is_not_looked_up(published, name):
    assert says(name).startswith(f"{name!r}: there is no such directory; a model on the Hugging ")


def test_what_the_hub_refuses_is_one_line(published, directory, tmp_path):
    published.publish("org/small", directory)
    assert says("org/smal").startswith("org/smal: there is no such directory, and no such model on")
    assert says("org/small@v3") == (
        "org/small@v3: the model on the Hugging Face hub has no such branch, tag or commit"
    )
    assert says("a--b/c").endswith("and no model on the Hugging Face hub has such a name")
    published.gated.add("org/small")
    assert says("org/small").startswith("org/small: its owner has not let you read it; ask on its ")
    (tmp_path / "pickled").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / "pickled" / name).write_bytes((directory / name).read_bytes())
    published.publish("org/pickled", tmp_path / "pickled")
    assert says("org/pickled").startswith("org/pickled: has no model.safetensors on the Hugging F")


def test_without_a_network_offline_or_without_the_package_a_line_says_so(published, tmp_path):
    with local_hub.environment(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=tmp_path / "home"):
        line = says("org/small")
    assert line.startswith("org/small: there is no such directory, and it cannot be fetched from ")
    assert "ConnectError: " in line and line.endswith("; check the network")
    with offline(tmp_path):
        assert says("org/small@v1") == (
            "org/small@v1: not in the cache, and HF_HUB_OFFLINE=1 forbids to download it; unset it"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "huggingface_hub", None)
        line = says("org/small")
    assert line.endswith("which is missing: in your clone, pip install -e '.[hf]'")
