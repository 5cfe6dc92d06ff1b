"""The files of a model that someone else wrote: shards, names that become paths, odd files."""

import json
import os
import resource

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.commands import call
from tests.twell_jax.models.pretrained.small import assert_same_parameters, make
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import (
    PretrainedError,
    files,
    from_pretrained,
    hub,
    quantisation,
    save_pretrained,
)

NORM = "model.norm.weight"


@pytest.fixture
def sharded(tmp_path):
    """A model and the directory of its shards, of which the first has a wrong copy of a tensor."""
    model = make()
    save_pretrained(tmp_path / "sharded", model, ByteTokenizer(), max_shard_bytes=9000)
    directory = tmp_path / "sharded"
    place = index_of(directory)["weight_map"][NORM]
    other = min(set(files.names(directory)) - {place})
    tensors = load_file(directory / other)
    save_file({**tensors, NORM: np.full(16, 7, np.float32)}, directory / other)
    return model, directory, place, other


def index_of(directory):
    return json.loads((directory / files.INDEX).read_text())


def put(directory, name, place):
    index = index_of(directory)
    index["weight_map"][name] = place
    (directory / files.INDEX).write_text(json.dumps(index))


def test_tensors_may_lie_at_any_byte_of_a_file(tmp_path):
    """Headers of old files have any length, so that what follows them is not aligned."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header = json.dumps({"a": entry}).encode()
    header += b" " * ((1 - len(header)) % 4)
    path = tmp_path / files.FILE
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    assert (8 + len(header)) % 4 == 1
    (found,) = files.mapped(path).values()
    assert (found.dtype, found.shape) == ("F32", (2, 3))
    np.testing.assert_array_equal(found[1:, ::2], values[1:, ::2])


def test_of_two_shards_with_a_tensor_the_index_decides(sharded):
    model, directory, place, other = sharded
    assert_same_parameters(from_pretrained(directory), model)
    put(directory, NORM, other)
    assert from_pretrained(directory).norm.scale[...].tolist() == [7] * 16
    third = min(set(files.names(directory)) - {place, other})
    put(directory, NORM, third)
    with pytest.raises(PretrainedError, match=rf"{NORM} is in .*, but the weight_map .*{third}$"):
        from_pretrained(directory)
    index = index_of(directory)
    del index["weight_map"][NORM]
    index["weight_map"]["another"] = place
    (directory / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(PretrainedError, match=rf"{NORM} is in {other} and in {place}.* neither$"):
        from_pretrained(directory)


def test_a_quantised_copy_has_the_tensor_that_the_index_means(sharded, tmp_path):
    model, directory, _, _ = sharded
    quantisation.quantise_files(directory, tmp_path / "out", ["gate", "up"], is_tied=True)
    model.quantise(["gate", "up"])
    assert_same_parameters(from_pretrained(tmp_path / "out"), model)
    assert sum(map(len, files.tensors(tmp_path / "out").values())) == len(
        index_of(tmp_path / "out")["weight_map"]
    )


def test_shards_may_lie_in_a_folder_of_the_model(sharded, tmp_path):
    model, directory, *_ = sharded
    index = index_of(directory)
    (directory / "weights").mkdir()
    for name in set(index["weight_map"].values()):
        (directory / name).rename(directory / "weights" / name)
    index["weight_map"] = {key: f"weights/{name}" for key, name in index["weight_map"].items()}
    (directory / files.INDEX).write_text(json.dumps(index))
    assert_same_parameters(from_pretrained(directory), model)
    quantisation.quantise_files(directory, tmp_path / "copy", ["up"], is_tied=False)
    model.quantise(["up"])
    assert_same_parameters(from_pretrained(tmp_path / "copy"), model)


def test_a_tied_head_is_quantised_as_the_embedding_whatever_head_there_was(sharded, tmp_path):
    model, directory, _, _ = sharded
    place, last = index_of(directory)["weight_map"]["model.embed_tokens.weight"], "model-9"
    last = f"{last}.safetensors"
    assert place < last
    save_file({"lm_head.weight": np.ones((257, 16), np.float32)}, directory / last)
    put(directory, "lm_head.weight", last)
    quantisation.quantise_files(directory, tmp_path / "out", ["head"], is_tied=True)
    model.quantise(["head"])
    assert_same_parameters(from_pretrained(tmp_path / "out"), model)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", ".."])
def test_a_revision_stays_in_the_cache(monkeypatch, name):
    monkeypatch.setattr(hub, "_download", lambda *_, **__: pytest.fail("looked up"))
    for arguments in ([f"org/small@{name}"], ["org/small", name]):
        with pytest.raises(PretrainedError, match=f"org/small: '{name}' is no branch, tag or com"):
            hub.find(*arguments)


def test_a_copy_waits_for_no_pipe(saved, tmp_path):
    _, directory = saved
    os.mkfifo(directory / "notes.txt")
    with pytest.raises(OSError, match="not a regular file"):
        quantisation.quantise_files(directory, tmp_path / "out", ["up"], is_tied=True)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_what_is_in_8_bits_already_is_not_quantised(saved, tmp_path, dtype):
    """Some were only cast, and their config.json does not say it."""
    _, directory = saved
    path, name = directory / files.FILE, "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(path)
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    save_file(tensors, path)
    path.write_bytes(path.read_bytes().replace(b'"F8_E4M3"', f'"{dtype}"'.encode()))
    with pytest.raises(PretrainedError, match=f"{name} is {dtype}; models to quantise have F32, B"):
        quantisation.quantise_files(directory, tmp_path / "out", ["up"], is_tied=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["export", "quantise"])
def test_a_file_that_the_disk_does_not_take_is_named(saved, tmp_path, command):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        process = call("-m", f"twell_jax.{command}", saved[1], tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert process.returncode == 1 and process.stderr.count("\n") == 1
    assert "out/model.safetensors: cannot be written (" in process.stderr


def test_names_of_tensors_are_spelt_out(saved):
    _, directory = saved
    tensors = load_file(directory / files.FILE)
    save_file({**tensors, "\x1b[2J" + "x" * 9999: np.zeros(1)}, directory / files.FILE)
    with pytest.raises(PretrainedError, match=r"not of this model: \\x1b\[2Jxxx") as error:
        from_pretrained(directory)
    assert str(error.value).isprintable() and len(str(error.value)) < 5000
