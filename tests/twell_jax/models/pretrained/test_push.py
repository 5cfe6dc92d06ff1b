"""`--push`: a model is put on a hub that this machine serves, or one line says why not."""

import json
import shlex
import sys

import pytest

from tests import hub as local_hub
from tests.commands import call, succeeded
from tests.packages import needed
from tests.twell_jax.models.pretrained.small import assert_same_parameters, make
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import PretrainedError, from_pretrained, push, save_pretrained

huggingface_hub = needed("huggingface_hub")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("push") / "model"
    save_pretrained(path, make(), ByteTokenizer())
    return path


@pytest.fixture
def logged_in(server, tmp_path):
    """The hub, empty, as the one that HF_ENDPOINT names, and a token that it takes."""
    content, address = server
    content.clear()
    settings = {"HF_ENDPOINT": address, "HF_HOME": tmp_path / "home", "HF_TOKEN": content.token}
    with local_hub.environment(**settings):
        yield content


def fails(*arguments):
    process = call("-m", "twell_jax.export", *arguments)
    assert process.returncode == 1 and process.stderr.count("\n") == 1, process.stderr
    return process.stderr


def test_a_pushed_model_is_loaded_by_its_name(logged_in, directory, tmp_path):
    ran = succeeded("-m", "twell_jax.export", directory, tmp_path / "out", "--push", "org/small")
    model, pushed = ran.stdout.splitlines()
    assert model == f"model: {tmp_path / 'out'}"
    assert pushed.startswith("pushed: http://127.0.0.1") and pushed.endswith("/org/small")
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert logged_in.published("org/small") == written | {".gitattributes": b""}
    assert b'from_pretrained("org/small")' in written["README.md"]
    assert not logged_in.private
    assert_same_parameters(from_pretrained("org/small"), from_pretrained(directory))


def test_a_second_push_leaves_no_file_of_the_first_that_would_be_read(
    logged_in, directory, tmp_path
):
    mine = {"notes.md": b"mine", "eval/model.txt": b"mine", ".gitattributes": b""}
    read = ("model.safetensors", "model-00009-of-00009.safetensors", "chat_template.jinja")
    logged_in.commit("org/small", mine | dict.fromkeys(read, b"old"))
    out = tmp_path / "out"
    save_pretrained(out, from_pretrained(directory), ByteTokenizer(), max_shard_bytes=10_000)
    push.push(out, "org/small")
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    assert len([name for name in written if name.endswith(".safetensors")]) > 1
    assert logged_in.published("org/small") == written | mine


def test_a_private_model_never_becomes_public(logged_in, directory, tmp_path):
    push.push(directory, "org/mine", private=True)
    assert logged_in.private == {"org/mine"}
    push.push(directory, "org/mine", private=True)
    logged_in.commit("org/open", {})
    line = fails(directory, tmp_path / "out", "--push", "org/open", "--private")
    assert line.endswith(": org/open is public; choose another name, or leave out --private\n")
    assert logged_in.published("org/open") == {}


@pytest.mark.parametrize("name", ["small", "org/small@v1", "org/a/b", "./x", "o--g/x", "org/x.git"])
def test_a_name_of_another_form_is_refused_before_any_work(name, tmp_path):
    line = fails("no-such-run", tmp_path / "out", "--push", name)
    assert name in line and "no-such-run" not in line


def test_what_makes_a_push_impossible_is_said_before_any_work(tmp_path, monkeypatch):
    def says():
        with pytest.raises(PretrainedError) as error:
            push.require_possible("org/small")
        return str(error.value)

    with local_hub.environment(HF_HOME=tmp_path):
        assert says().endswith("without a token of the Hugging Face hub; log in by: hf auth login")
        with local_hub.environment(HF_HOME=tmp_path, HF_TOKEN="x", HF_HUB_OFFLINE="1"):
            assert says().endswith("as HF_HUB_OFFLINE=1 forbids it; unset it")
        with local_hub.environment(HF_HOME=tmp_path, HF_TOKEN="x"):
            push.require_possible("org/small")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert says().endswith("which is missing: in your clone, pip install -e '.[hf]'")
    alone = call("-m", "twell_jax.export", "run", tmp_path / "out", "--private")
    assert alone.returncode == 2 and "--private: needs --push ORG/NAME" in alone.stderr


@pytest.mark.parametrize(
    ("part", "status", "says"),
    [
        ("create", 401, "the Hugging Face hub does not take your token; log in by: hf auth login"),
        ("create", 403, "your token may not write there; log in with one that may, by: hf auth"),
        ("create", 404, "there is no such user or organisation, or your token does not see it"),
        ("commit", 403, "your token may not write there"),
        (
            "preupload",
            400,
            "the Hugging Face hub cannot be reached or took no part of it (HTTP",
        ),
    ],
)
def test_what_the_hub_refuses_is_a_line_that_says_how_to_push_again(
    logged_in, directory, tmp_path, part, status, says
):
    logged_in.refusals[part] = status
    out = tmp_path / "the out"
    line = fails(directory, out, "--push", "org/small")
    assert line.startswith(f"error: {out}: is written, but not pushed to org/small: {says}")
    again = f"hf upload org/small '{out}' . --delete 'model*.safetensors*'"
    assert line.endswith(f"; when that is mended: {again}\n")
    assert_same_parameters(from_pretrained(out), from_pretrained(directory))


def test_without_a_network_the_written_model_stays(directory, tmp_path):
    settings = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": tmp_path, "HF_TOKEN": "x"}
    with local_hub.environment(**settings):
        line = fails(directory, tmp_path / "out", "--push", "org/small", "--private")
    assert "(ConnectError: " in line and line.endswith("*' --private\n")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"


def test_the_command_that_a_failed_push_names_pushes(logged_in, directory, tmp_path):
    logged_in.refusals["create"] = 403
    line = fails(directory, tmp_path / "the out", "--push", "org/small", "--private")
    logged_in.refusals.clear()
    logged_in.commit("org/small", {"model-00001-of-00002.safetensors": b"old", "notes.md": b"mine"})
    logged_in.private.add("org/small")
    _, _, again = line.partition("; when that is mended, and if org/small is not a public model: ")
    program, *arguments = shlex.split(again)
    assert program == "hf"
    from huggingface_hub.cli import hf

    try:
        hf.app(arguments, standalone_mode=False)
    except SystemExit as end:
        assert not end.code
    written = {path.name: path.read_bytes() for path in (tmp_path / "the out").iterdir()}
    assert logged_in.published("org/small") == written | {"notes.md": b"mine"}
