"""Digests differ where arrays differ, whatever the devices that hold them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.seeds import rng
from twell_jax.train import digest


def of(array):
    (found,) = {text for x in digest.of_arrays(array).values() for text in digest.texts(x)}
    return found


def drawn(dtype, shape):
    """An array of random bits, as signed integers of its width and as `dtype`."""
    bits = rng().integers(-(2**15), 2**15, (*shape, 2), dtype=np.int16)
    bits = bits[..., 0] if dtype == jnp.bfloat16 else bits.view(np.int32)[..., 0]
    return bits, lambda changed: jnp.asarray(changed.view(dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.parametrize("shape", [(), (16, 24)])
def test_every_bit_counts(dtype, shape):
    bits, as_dtype = drawn(dtype, shape)
    expected = of(as_dtype(bits))
    assert of(as_dtype(bits.copy())) == expected
    flips = [np.left_shift(bits.dtype.type(1), i) for i in range(8 * bits.dtype.itemsize)]
    position = tuple(rng().integers(shape)) if shape else ()
    for flip in flips:
        changed = bits.copy()
        changed[position] ^= flip
        assert of(as_dtype(changed)) != expected


def test_what_would_cancel_in_a_plain_sum_counts():
    bits, as_dtype = drawn(jnp.float32, (16, 24))
    bits[0, 0], bits[3, 5] = 17, 18
    expected = of(as_dtype(bits))
    swapped, signs = bits.copy(), bits.copy()
    swapped[0, 0], swapped[3, 5] = 18, 17
    signs[[2, 7], [1, 1]] ^= np.int32(-(2**31))
    for changed in (swapped, signs, bits[::-1].copy(), np.roll(bits, 1), np.zeros_like(bits)):
        assert of(as_dtype(changed)) != expected


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_every_mesh_finds_the_same(dtype):
    bits, as_dtype = drawn(dtype, (16, 24))
    array = as_dtype(bits)
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), devices=jax.devices("cpu")[:8])
    for spec in (P(), P("fsdp"), P(None, "fsdp"), P("data", "fsdp"), P(("data", "fsdp"))):
        assert of(jax.device_put(array, NamedSharding(mesh, spec))) == of(array)


def test_a_digest_needs_no_copy_of_the_array():
    array = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    memory = digest._sums.lower(array).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * memory.argument_size_in_bytes


def test_replicas_are_compared_each():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices("cpu")[:4])
    copies = [jax.device_put(np.float32([1, 2]), device) for device in mesh.devices]
    copies[2] = jax.device_put(np.float32([1, 3]), mesh.devices[2])
    array = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P()), copies)
    first, second, third, fourth = digest.texts(digest.of_arrays({"x": array})["x"])
    assert first == second == fourth != third


def test_json_is_compared_as_it_comes_back():
    saved = {"b": (1, 0.1), "a": {"c": None}}
    assert digest.of_json(saved) == digest.of_json({"a": {"c": None}, "b": [1, 0.1]})
    assert digest.of_json(saved) != digest.of_json({"a": {"c": None}, "b": [1, 0.2]})
