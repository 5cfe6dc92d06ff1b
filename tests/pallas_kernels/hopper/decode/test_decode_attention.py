import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.common.primitives import interpreting
from pallas_kernels.hopper.decode import decode_attention as hopper
from pallas_kernels.reference import decode as reference
from tests.errors import ROUNDING, relative_error
from tests.launches import SM_BYTES, launches
from tests.pallas_kernels.hopper.decode.attention import LAYERS, draw, shapes
from tests.poisoned import poison


def expected(qkv, rope, k_cache, v_cache, layer, lengths, heads, kv_heads):
    """Result, in float64 but for rounding the rotated query and key, and both caches."""
    batch, dtype, size = lengths.size, qkv.dtype, k_cache.shape[4]
    qkv = np.asarray(qkv[:batch], np.float64).reshape(batch, -1, size)
    q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=1)
    cos, sin = (np.asarray(table, np.float64)[:, None] for table in rope)

    def rotate(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(dtype)

    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    new = layer[0], np.arange(batch), lengths
    k_cache[new], v_cache[new] = rotate(k), v.astype(dtype)
    q = np.asarray(rotate(q), np.float64).reshape(batch, kv_heads, -1, size)
    out = np.empty(q.shape)
    for b in range(batch):
        slots = slice(0, lengths[b] + 1)
        keys, values = (
            np.asarray(cache[layer[0], b, slots], np.float64) for cache in (k_cache, v_cache)
        )
        scores = np.einsum("hgd,shd->hgs", q[b], keys) / size**0.5
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        out[b] = np.einsum("hgs,shd->hgd", p, values)
    return out.reshape(batch, heads * size), k_cache, v_cache


def bits(cache):
    return np.asarray(cache).view(np.uint16)


def assert_matches(out, operands, heads, kv_heads):
    attended, k_cache, v_cache = jax.device_get(out)
    layer, lengths = operands[4:]
    exact, keys, values = expected(*operands, heads, kv_heads)
    assert attended.dtype == operands[0].dtype
    assert relative_error(attended[: lengths.size], exact) < 2 * ROUNDING
    new = layer[0], np.arange(lengths.size), lengths
    assert relative_error(k_cache[new], keys[new]) < ROUNDING / 4
    k_cache = k_cache.copy()
    k_cache[new] = keys[new]
    np.testing.assert_array_equal(bits(k_cache), bits(keys))
    np.testing.assert_array_equal(bits(v_cache), bits(values))


@functools.partial(jax.jit, static_argnums=0, static_argnames=("heads", "kv_heads"))
def run(function, qkv, rope, k_cache, v_cache, layer, lengths, *, heads, kv_heads):
    refs = jax.new_ref(k_cache), jax.new_ref(v_cache)
    attended = function(qkv, rope, *refs, layer, lengths, heads=heads, kv_heads=kv_heads)
    return attended, refs[0][...], refs[1][...]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("dtype", "batch"), [(jnp.bfloat16, 1), (jnp.float16, 3), (jnp.bfloat16, 64)]
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(32, 32, 64), (32, 4, 128), (8, 1, 64), (9, 3, 64)]
)
def test_lowers_without_a_gpu(lower, heads, kv_heads, size, dtype, batch):
    call = functools.partial(run, hopper.decode_attention, heads=heads, kv_heads=kv_heads)
    text = lower(call, *shapes(heads, kv_heads, size, batch, 1000, dtype))
    assert "decode_attention" in text and "output_operand_alias" in text


@pytest.mark.parametrize(("size", "on_sm"), [(64, 4), pytest.param(128, 2, marks=pytest.mark.slow)])
def test_as_many_blocks_as_planned_share_an_sm(lower, size, on_sm):
    call = functools.partial(run, hopper.decode_attention, heads=32, kv_heads=32)
    (launch,) = launches(lower(call, *shapes(32, 32, size, 4, 1024, jnp.bfloat16))).values()
    assert SM_BYTES // (launch.smem + 1024) == on_sm


def test_clusters_fill_the_sms_but_give_each_block_some_steps():
    for clusters, steps, size, splits in [
        (1, 1, 64, 1),
        (1, 5, 64, 2),
        (32, 8, 64, 4),
        (32, 31, 64, 4),
        (32, 32, 64, 8),
        (8, 99, 128, 8),
        (64, 99, 64, 8),
        (64, 99, 128, 4),
        (2048, 99, 64, 1),
    ]:
        with interpreting(sms=132):
            assert hopper._splits(clusters, steps, size) == splits


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("length", [0, 5, 39])
def test_reference(length, dtype):
    operands = draw(6, 2, 64, 3, 40, length, dtype)
    out = run(reference.decode_attention, *operands, heads=6, kv_heads=2)
    assert_matches(out, operands, 6, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "batch", "capacity", "length", "splits"),
    [
        (3, 1, 128, 2, 520, 518, 4),  # more steps than stages in the ring
        (4, 2, 64, 3, 248, 130, 2),
        (2, 2, 64, 1, 8, 0, 1),
    ],
)
def test_interpreted(interpreted, heads, kv_heads, size, batch, capacity, length, splits):
    operands = draw(heads, kv_heads, size, batch, capacity, length, jnp.bfloat16)
    # Blocks load the new token's slot, which one of them writes; they have its key and value.
    with interpreted(detect_races=False):
        phase = hopper.decode_attention_phase(*operands, heads=heads, kv_heads=kv_heads)
        assert phase.cluster == (1, splits)
        out = run(hopper.decode_attention, *operands, heads=heads, kv_heads=kv_heads)
        assert_matches(out, operands, heads, kv_heads)


CACHE = (LAYERS, 3, 40, 2, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k_cache=np.zeros(CACHE)), "k_cache must be a bfloat16 or float16"),
        (dict(k_cache=np.zeros(CACHE[1:], jnp.bfloat16)), "k_cache must be a bfloat16"),
        (dict(k_cache=np.zeros((1, 3, 41, 2, 64), jnp.bfloat16)), "S a multiple of 8"),
        (dict(k_cache=np.zeros((1, 3, 40, 2, 96), jnp.bfloat16)), "head_dim 64 or 128"),
        (dict(k_cache=np.zeros((1, 65, 40, 2, 64), jnp.bfloat16)), "B from 1 to 64"),
        (dict(v_cache=np.zeros((1, *CACHE[1:]), jnp.bfloat16)), "v_cache must be"),
        (dict(heads=5), "heads must be 1 to 8 times kv_heads"),
        (dict(heads=18), "heads must be 1 to 8 times kv_heads"),
        (dict(heads=6, kv_heads=3), "heads must be 1 to 8 times kv_heads"),
        (dict(qkv=np.zeros((2, 640), jnp.bfloat16)), "at least 3 rows"),
        (dict(qkv=np.zeros((6, 576), jnp.bfloat16)), r"qkv must be bfloat16 \[6, 640\]"),
        (dict(qkv=np.zeros((6, 640), jnp.float16)), "qkv must be bfloat16"),
        (dict(rope=(np.zeros((3, 32)), np.zeros((1, 32)))), "the sine in rope must be float32"),
        (dict(layer=np.zeros((), jnp.int32)), r"layer must be int32 \[1\]"),
        (dict(lengths=np.zeros(3)), r"lengths must be int32 \[3\]"),
        (dict(lengths=np.zeros(1, jnp.int32)), r"lengths must be int32 \[3\]"),
    ],
)
def test_bad_operands_are_named(change, message):
    names = ("qkv", "rope", "k_cache", "v_cache", "layer", "lengths")
    operands = dict(zip(names, draw(6, 2, 64, 3, 40, 7, jnp.bfloat16), strict=True))
    operands |= dict(heads=6, kv_heads=2) | change
    kwargs = {name: operands.pop(name) for name in ("heads", "kv_heads")}
    with pytest.raises(ValueError, match=message):
        run(hopper.decode_attention, *operands.values(), **kwargs)


def poisoned(operands, heads, kv_heads):
    """`decode_attention` on memory that held NaN just before, and the caches."""
    poison()
    qkv, rope, k_cache, v_cache, *numbers = jax.block_until_ready(jax.device_put(operands))
    refs = jax.new_ref(k_cache), jax.new_ref(v_cache)
    jax.block_until_ready(refs[0][...])  # the kernel does not wait for the copies
    jax.block_until_ready(refs[1][...])
    call = functools.partial(hopper.decode_attention, heads=heads, kv_heads=kv_heads)
    attended = jax.block_until_ready(jax.jit(call)(qkv, rope, *refs, *numbers))
    return attended, refs[0][...], refs[1][...]


@pytest.mark.gpu
@pytest.mark.parametrize("fill", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "batch", "capacity", "length", "dtype"),
    [
        (8, 8, 64, 1, 1024, 0, jnp.bfloat16),
        (8, 8, 64, 5, 1024, 63, jnp.float16),
        (8, 4, 128, 5, 1024, 64, jnp.bfloat16),
        (9, 3, 64, 5, 1000, 200, jnp.bfloat16),
        (9, 3, 128, 5, 1000, 200, jnp.float16),
        (8, 1, 64, 64, 1024, 1023, jnp.bfloat16),
        (8, 1, 128, 64, 1000, 999, jnp.bfloat16),
        (32, 32, 64, 1, 1000, 999, jnp.bfloat16),
        (32, 32, 64, 1, 1024, 64, jnp.bfloat16),
        (8, 2, 64, 1, 2048, 2047, jnp.bfloat16),
        (4, 4, 64, 64, 520, 200, jnp.float16),
        (16, 16, 64, 16, 1000, 999, jnp.bfloat16),
        (64, 8, 128, 1, 32768, 32767, jnp.bfloat16),
        (2, 1, 64, 1, 8, 7, jnp.bfloat16),
    ],
)
def test_matches_numpy(heads, kv_heads, size, batch, capacity, length, dtype, fill):
    ragged = batch > 1
    operands = draw(heads, kv_heads, size, batch, capacity, length, dtype, ragged=ragged, fill=fill)
    assert_matches(poisoned(operands, heads, kv_heads), operands, heads, kv_heads)


@pytest.mark.gpu
def test_same_bits_every_time():
    operands = draw(32, 4, 128, 5, 1000, 777, jnp.bfloat16)
    first, *_ = poisoned(operands, 32, 4)
    for _ in range(5):
        again, *_ = poisoned(operands, 32, 4)
        np.testing.assert_array_equal(bits(first[:5]), bits(again[:5]))


@pytest.mark.gpu
def test_tokens_one_after_another():
    """Each token finds the keys and values of those before it, of its own sequence."""
    heads, kv_heads, batch, capacity = 4, 2, 3, 256
    operands = draw(heads, kv_heads, 64, batch, capacity, 126, jnp.bfloat16)
    qkv, rope, k_cache, v_cache, layer, lengths = operands
    refs = jax.new_ref(jnp.asarray(k_cache)), jax.new_ref(jnp.asarray(v_cache))
    jax.block_until_ready((refs[0][...], refs[1][...]))
    call = jax.jit(functools.partial(hopper.decode_attention, heads=heads, kv_heads=kv_heads))
    for more in range(5):
        operands = qkv, rope, k_cache, v_cache, layer, lengths + np.int32(more)
        device = jax.block_until_ready(jax.device_put((qkv, rope, *operands[4:])))
        attended = jax.block_until_ready(call(*device[:2], *refs, *device[2:]))
        out = attended, refs[0][...], refs[1][...]
        assert_matches(out, operands, heads, kv_heads)
        k_cache, v_cache = (np.asarray(cache) for cache in out[1:])
        qkv = np.concatenate([qkv[1:batch], qkv[:1], qkv[batch:]])
