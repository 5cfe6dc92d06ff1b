"""In which dtype models are read and written."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests.twell_jax.models.pretrained.small import (
    assert_same_parameters,
    change_config,
    change_tensors,
    make,
)
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import PretrainedError, from_pretrained, save_pretrained


def stored_dtypes(directory):
    tensors = load_file(directory / "model.safetensors").values()
    return {tensor.dtype.name for tensor in tensors}


def test_another_dtype_is_that_of_the_loaded_model(saved):
    model, directory = saved
    rounded = jax.tree.map(lambda p: np.asarray(p).astype(jnp.bfloat16), nnx.state(model))
    half = from_pretrained(directory, dtype="bfloat16")
    assert (half.config.dtype, half.config.param_dtype) == ("bfloat16", "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(half), rounded)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(half))} == {"bfloat16"}
    master = from_pretrained(directory, dtype="bfloat16", param_dtype="float32")
    assert (master.config.dtype, master.config.param_dtype) == ("bfloat16", "float32")
    assert_same_parameters(master, model)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_float16_is_read_as_bfloat16_rounded_once_or_as_float32_exactly(tmp_path, key):
    bits = np.arange(2**16).astype(np.uint16).view(np.float16)
    every = bits[np.isfinite(bits)].reshape(-1, 16)
    save_pretrained(tmp_path, make(vocab_size=len(every)), ByteTokenizer())

    def change(tensors):
        tensors.update({name: tensor.astype(np.float16) for name, tensor in tensors.items()})
        tensors["model.embed_tokens.weight"] = every

    change_tensors(tmp_path, change)
    change_config(tmp_path, torch_dtype="absent")
    change_config(tmp_path, **{key: "float16"})
    for asked, dtype, param_dtype in [
        ({}, "bfloat16", "bfloat16"),
        ({"dtype": "float32"}, "float32", "float32"),
        ({"param_dtype": "float32"}, "bfloat16", "float32"),
    ]:
        model = from_pretrained(tmp_path, **asked)
        assert (model.config.dtype, model.config.param_dtype) == (dtype, param_dtype)
        expected = every.astype(np.float32)
        if param_dtype == "bfloat16":  # to the nearest, of two the even one
            words = expected.view(np.uint32)
            rounded = words + 0x7FFF + (words >> 16 & 1)
            expected = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
        embedding = np.asarray(model.embed.embedding[...])
        assert np.isfinite(embedding).all() and embedding.dtype == param_dtype
        np.testing.assert_array_equal(embedding.astype(np.float32), expected)
    with pytest.raises(PretrainedError, match="dtype='float16'; name bfloat16 or float32"):
        from_pretrained(tmp_path, dtype="float16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
def test_the_file_has_the_asked_dtype(tmp_path, dtype, param_dtype):
    model = make(param_dtype=param_dtype)
    save_pretrained(tmp_path, model, ByteTokenizer(), dtype=dtype)
    expected = dtype or param_dtype  # as they are
    assert stored_dtypes(tmp_path) == {expected}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == expected
    rounded = jax.tree.map(lambda p: np.asarray(p).astype(expected), nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(from_pretrained(tmp_path)), rounded)
