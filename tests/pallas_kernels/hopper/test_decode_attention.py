import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import warpgroup
from pallas_kernels.hopper.decode import attend, cluster, combine
from pallas_kernels.hopper.decode import decode_attention as hopper
from pallas_kernels.reference import decode_attention as reference
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.launches import SM_BYTES, launches

LAYERS, LAYER = 3, 1


def draw(heads, kv_heads, size, batch, capacity, length, dtype, *, ragged=True, fill=np.nan):
    """Operands, of NumPy; `fill` is in all slots of the cache that nothing may attend to."""
    normal = functools.partial(seeds.rng().standard_normal, dtype=np.float32)
    qkv = normal((batch + 3, (heads + 2 * kv_heads) * size)).astype(dtype)
    qkv[batch:] = np.nan
    angle = 10 * normal((batch, size // 2))
    padding = np.zeros(batch, np.int32)
    if ragged:
        padding[:] = seeds.rng().integers(0, length + 1, batch)
        padding[0] = length  # nothing but the new token
    slots = np.arange(capacity)
    stored = (slots >= padding[:, None]) & (slots < length)
    caches = []
    for _ in range(2):
        cache = np.full((LAYERS, batch, capacity, kv_heads, size), fill, dtype)
        layer = normal(cache.shape[1:])
        cache[LAYER] = np.where(stored[:, :, None, None], layer, fill).astype(dtype)
        caches.append(cache)
    one = functools.partial(np.full, 1, dtype=np.int32)
    return qkv, (np.cos(angle), np.sin(angle)), *caches, one(LAYER), one(length), padding


def expected(qkv, rope, k_cache, v_cache, layer, length, padding, heads, kv_heads):
    """Result, in float64 but for rounding the rotated query and key, and both caches."""
    batch, dtype, size = padding.size, qkv.dtype, k_cache.shape[4]
    qkv = np.asarray(qkv[:batch], np.float64).reshape(batch, -1, size)
    q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=1)
    cos, sin = (np.asarray(table, np.float64)[:, None] for table in rope)

    def rotate(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(dtype)

    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    k_cache[layer[0], :, length[0]], v_cache[layer[0], :, length[0]] = rotate(k), v.astype(dtype)
    q = np.asarray(rotate(q), np.float64).reshape(batch, kv_heads, -1, size)
    out = np.empty(q.shape)
    for b in range(batch):
        slots = slice(padding[b], length[0] + 1)
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
    layer, length, padding = operands[4:]
    exact, keys, values = expected(*operands, heads, kv_heads)
    assert attended.dtype == operands[0].dtype
    assert relative_error(attended[: padding.size], exact) < 2 * ROUNDING
    new = (layer[0], slice(None), length[0])
    assert relative_error(k_cache[new], keys[new]) < ROUNDING / 4
    k_cache = k_cache.copy()
    k_cache[new] = keys[new]
    np.testing.assert_array_equal(bits(k_cache), bits(keys))
    np.testing.assert_array_equal(bits(v_cache), bits(values))


@functools.partial(jax.jit, static_argnums=0, static_argnames=("heads", "kv_heads"))
def run(function, qkv, rope, k_cache, v_cache, layer, length, padding, *, heads, kv_heads):
    refs = jax.new_ref(k_cache), jax.new_ref(v_cache)
    attended = function(qkv, rope, *refs, layer, length, padding, heads=heads, kv_heads=kv_heads)
    return attended, refs[0][...], refs[1][...]


def shapes(heads, kv_heads, size, batch, capacity, dtype):
    one, shape = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct
    qkv = shape((-(-batch // 8) * 8, (heads + 2 * kv_heads) * size), dtype)
    table = shape((batch, size // 2), jnp.float32)
    cache = shape((LAYERS, batch, capacity, kv_heads, size), dtype)
    return qkv, (table, table), cache, cache, one, one, shape((batch,), jnp.int32)


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


@pytest.mark.parametrize(("size", "on_sm"), [(64, 4), (128, 2)])
def test_as_many_blocks_as_planned_share_an_sm(lower, size, on_sm):
    call = functools.partial(run, hopper.decode_attention, heads=32, kv_heads=32)
    (launch,) = launches(lower(call, *shapes(32, 32, size, 4, 1024, jnp.bfloat16))).values()
    assert SM_BYTES // (launch.smem + 1024) == on_sm


def test_clusters_fill_the_sms_but_give_each_block_some_steps(monkeypatch):
    monkeypatch.setattr("pallas_kernels.hopper.common.support.sm_count", lambda: 132)
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
        assert hopper._splits(clusters, steps, size) == splits


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("length", [0, 5, 39])
def test_reference(length, dtype):
    operands = draw(6, 2, 64, 3, 40, length, dtype)
    out = run(reference.decode_attention, *operands, heads=6, kv_heads=2)
    assert_matches(out, operands, 6, 2)


class InJax:
    """What the steps in `attend` and `combine` do, for the interpreter."""

    def __init__(self, splits):
        self.board, self.meeting = {}, threading.Barrier(splits)

    @staticmethod
    def place_new(qkv, rope, head, is_owner, q_smem, new_smem, stored_refs, *, heads):
        vectors, group = qkv[...].reshape(-1, heads.size), heads.group
        a, b = jnp.split(vectors.astype(jnp.float32), 2, axis=1)
        cos, sin = (table[...] for table in rope)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], 1).astype(vectors.dtype)
        q = jax.lax.dynamic_slice_in_dim(rotated, head * group, group)
        q_smem[...] = jnp.pad(q, ((0, 8 - group), (0, 0)))
        new = rotated[heads.all + head], vectors[heads.all + heads.stored + head]
        new_smem[...] = jnp.stack(new)

        @pl.when(is_owner)
        def _():
            stored_refs[0][...], stored_refs[1][...] = new

    @staticmethod
    def patch(k_smem, v_smem, new_smem, low, high):
        row = jnp.arange(k_smem.shape[0])[:, None]
        new = new_smem[...]
        k_smem[...] = jnp.where(row == high, new[0], k_smem[...])
        v = jnp.where(row == high, new[1], v_smem[...])
        v_smem[...] = jnp.where((row < low) | (row > high), 0, v)

    @staticmethod
    def store_transposed(p, p_smem):
        p_smem[...] = p.T

    def send_parts(self, o, top, total, block, o_parts_ref, sums_ref, _):
        splits, rows, _ = o_parts_ref.shape

        def exchange(o, top, total, block):
            self.board[int(block)] = np.asarray(o).reshape(splits, rows, -1), (top, total)
            self.meeting.wait(timeout=60)  # all have sent
            o_parts = np.stack([self.board[sender][0][block] for sender in range(splits)])
            sums = np.stack([np.stack(self.board[sender][1]) for sender in range(splits)])
            self.meeting.wait(timeout=60)  # all have received
            return o_parts, sums

        out = [jax.ShapeDtypeStruct(ref.shape, jnp.float32) for ref in (o_parts_ref, sums_ref)]
        o_parts_ref[...], sums_ref[...] = io_callback(exchange, out, o, top, total, block)

    @staticmethod
    def store_combined(o_parts_ref, sums_ref, out_ref, head, *, heads, block):
        top, total = sums_ref[:, 0], sums_ref[:, 1]
        weight = jnp.exp2(top - jnp.max(top, axis=0))
        sums = jnp.sum(weight[:, None] * o_parts_ref[...], axis=0) / jnp.sum(weight * total, axis=0)
        rows = sums.shape[0]
        for i in range(heads.group):
            column = (head * heads.group + i) * heads.size + block * rows
            out_ref[pl.ds(column, rows)] = sums[:, i].astype(out_ref.dtype)


def replace_by_jax(monkeypatch, splits):
    """What the interpreter lacks, for clusters of so many blocks."""
    steps = InJax(splits)
    for module, names in (
        (attend, ("place_new", "patch", "store_transposed")),
        (combine, ("send_parts", "store_combined")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(steps, name))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "batch", "capacity", "length", "splits"),
    [
        (3, 1, 128, 2, 520, 518, 4),  # more steps than stages in the ring
        (4, 2, 64, 3, 248, 130, 2),
        (2, 2, 64, 1, 8, 0, 1),
    ],
)
def test_interpreted(monkeypatch, heads, kv_heads, size, batch, capacity, length, splits):
    replace_by_jax(monkeypatch, splits)
    monkeypatch.setattr(warpgroup, "barrier", lambda: None)
    for name in ("prepare", "expect"):
        monkeypatch.setattr(cluster, name, lambda *_: None)
    monkeypatch.setattr(cluster, "wait_for_parts", lambda _: None)
    monkeypatch.setattr(plgpu, "griddepcontrol_wait", lambda: None)
    monkeypatch.setattr(plgpu, "griddepcontrol_launch_dependents", lambda: None)
    monkeypatch.setattr(hopper, "_splits", lambda *_: splits)
    operands = draw(heads, kv_heads, size, batch, capacity, length, jnp.bfloat16)
    if splits == 1:
        operands[6][:] = 0
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
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
        (dict(length=np.zeros(1)), r"length must be int32 \[1\]"),
        (dict(padding=np.zeros(1, jnp.int32)), r"padding must be int32 \[3\]"),
    ],
)
def test_bad_operands_are_named(change, message):
    names = ("qkv", "rope", "k_cache", "v_cache", "layer", "length", "padding")
    operands = dict(zip(names, draw(6, 2, 64, 3, 40, 7, jnp.bfloat16), strict=True))
    operands |= dict(heads=6, kv_heads=2) | change
    kwargs = {name: operands.pop(name) for name in ("heads", "kv_heads")}
    with pytest.raises(ValueError, match=message):
        run(hopper.decode_attention, *operands.values(), **kwargs)


def poisoned(operands, heads, kv_heads):
    """`decode_attention` on memory that held NaN just before, and the caches."""
    poison = jnp.full((64, 1 << 20), jnp.nan)
    poison.block_until_ready()
    poison.delete()
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
    """Each token finds the keys and values of those before it, and padding stays out."""
    heads, kv_heads, batch, capacity = 4, 2, 3, 256
    *operands, padding = draw(heads, kv_heads, 64, batch, capacity, 126, jnp.bfloat16)
    qkv, rope, k_cache, v_cache, layer, _ = operands
    refs = jax.new_ref(jnp.asarray(k_cache)), jax.new_ref(jnp.asarray(v_cache))
    jax.block_until_ready((refs[0][...], refs[1][...]))
    call = jax.jit(functools.partial(hopper.decode_attention, heads=heads, kv_heads=kv_heads))
    for length in range(126, 131):
        operands = qkv, rope, k_cache, v_cache, layer, np.full(1, length, np.int32), padding
        device = jax.block_until_ready(jax.device_put((qkv, rope, *operands[4:])))
        attended = jax.block_until_ready(call(*device[:2], *refs, *device[2:]))
        out = attended, refs[0][...], refs[1][...]
        assert_matches(out, operands, heads, kv_heads)
        k_cache, v_cache = (np.asarray(cache) for cache in out[1:])
        qkv = np.concatenate([qkv[1:batch], qkv[:1], qkv[batch:]])
