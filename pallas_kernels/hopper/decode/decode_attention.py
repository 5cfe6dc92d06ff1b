"""Attention of one new token of each sequence over the cache, with rotary positions and the append.

A cluster of thread blocks serves one key/value head of one sequence. They take turns at steps of 64
keys, by TMA through a ring in shared memory, and each keeps a running softmax. Then they
send each other their parts, and each adds up some rows of the result in a fixed order.

Products are transposed, so that the few query heads which share a key/value head are the 8 columns
of a WGMMA and the keys (or the features of the values) its 64 rows.

The kernel is launched while those before it still run (programmatic dependent launch), or together
with the one that makes `qkv` (`launch`). It reads the cache at once, and `qkv` when that is there.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import support, warpgroup
from pallas_kernels.hopper.common.dependent_launch import launch_next
from pallas_kernels.hopper.common.tiles import TILED
from pallas_kernels.hopper.decode import attend, cluster, combine
from pallas_kernels.hopper.decode.launch import Phase, launched, only
from pallas_kernels.hopper.decode.token_ring import PARTS
from pallas_kernels.layouts.stream import MAX_TOKENS
from pallas_kernels.weights import DTYPES

_STEP = 64  # keys of a stage: the rows of a WGMMA
_COPIES = (8, 32)  # keys that are copied if the cache has no more of a step's
_STAGES = 3  # of the ring, at most
_FEATURES_ON_SM = 256  # size of a head times the blocks that fit with these stages
_MOST_SPLITS = 8  # blocks of a cluster: the most that is portable
# Steps that each block of a cluster has at least, if the cluster has more than four blocks: fewer
# blocks find room beside those of the projection, and load keys and values while that computes.
_STEPS_OF_MANY = 4
_LOG2_E = 1.4426950408889634


def decode_attention_phase(
    qkv: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    k_cache: jax.Ref,
    v_cache: jax.Ref,
    layer: jax.Array,
    lengths: jax.Array,
    *,
    heads: int,
    kv_heads: int,
) -> Phase[jax.Array]:
    """Appends one token to each of B sequences and computes what it attends to.

    Query and key are rotated in float32 and rounded; slot `lengths[b]` of the cache gets key and
    value. Then the result is `softmax(q k^T / sqrt(head_dim)) v` over the slots up to `lengths[b]`,
    inclusive, in float32, with probabilities rounded for the product with v. Other slots have no
    influence, whatever they hold.

    Kernels just before this one in the stream may still run when it starts. They may write `qkv`,
    nothing else that this one reads: not `layer`, `lengths`, nor this layer of the cache.

    Args:
      qkv: `[T, (heads + 2 kv_heads) * head_dim]`, bfloat16 or float16, T >= B: query, key and value
        of the new tokens, not rotated. Rows from B on are not read.
      rope: cosine and sine, float32 `[B, head_dim / 2]` each.
      k_cache, v_cache: mutable `[layers, B, S, kv_heads, head_dim]` in the dtype of qkv, B from 1
        to 64, S a multiple of 8, head_dim 64 or 128.
      layer: int32 `[1]`, below `layers`.
      lengths: int32 `[B]`, below S: the number of tokens that each sequence has stored before this
        one.
      heads: number of query heads, 1 to 8 times `kv_heads`.
      kv_heads: number of key/value heads.

    Returns:
      `[T, heads * head_dim]` in the dtype of qkv; rows from B on are not written.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    _check(qkv, rope, k_cache, v_cache, layer, lengths, heads, kv_heads)
    _, batch, capacity, _, size = k_cache.shape
    steps = pl.cdiv(capacity, _STEP)
    splits = _splits(batch * kv_heads, steps, size)
    # In less shared memory, blocks of the next kernel can start before those of this one end.
    stages = min(_STAGES, pl.cdiv(steps, splits))
    return Phase(
        "decode_attention",
        clusters=batch * kv_heads,
        cluster=(pl.cdiv(splits, PARTS), min(splits, PARTS)),
        operands=(qkv, *rope, layer, lengths),
        refs=(k_cache, v_cache),
        outs=[jax.ShapeDtypeStruct((qkv.shape[0], heads * size), qkv.dtype)],
        form=only,
        memory=_memory(size, qkv.dtype, stages, splits),
        barriers=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        run=functools.partial(_run, heads=attend.Heads(heads, kv_heads, size)),
        options=dict(approx_math=True, reduction_scratch_bytes=1024),
    )


decode_attention = launched(decode_attention_phase)


def _memory(size, dtype, stages, splits):
    ring = plgpu.SMEM((stages, _STEP, size), dtype, transforms=TILED)
    return dict(
        k_smem=ring,
        v_smem=ring,
        q_smem=plgpu.SMEM((attend.HEADS, size), dtype, transforms=TILED),
        p_smem=plgpu.SMEM((attend.HEADS, _STEP), dtype, transforms=TILED),
        # Four blocks share an SM, and arrays begin at multiples of 1024 bytes, so the last row of
        # this one, behind the new key and value, holds the barrier of the exchange.
        small=plgpu.SMEM((3, size), dtype),
        o_parts=plgpu.SMEM((splits, size // splits, attend.HEADS), jnp.float32),
        sums=plgpu.SMEM((splits, 2, attend.HEADS), jnp.float32),
    )


def _check(qkv, rope, k_cache, v_cache, layer, lengths, heads, kv_heads):
    if k_cache.ndim != 5 or k_cache.dtype not in DTYPES:
        raise ValueError(
            "k_cache must be a bfloat16 or float16 [layers, B, S, kv_heads, head_dim], got "
            f"{k_cache.dtype} {list(k_cache.shape)}"
        )
    _, batch, capacity, stored, size = k_cache.shape
    if size not in (64, 128) or capacity % 8 or not capacity or not 1 <= batch <= MAX_TOKENS:
        raise ValueError(
            f"k_cache must have B from 1 to {MAX_TOKENS}, S a multiple of 8 and head_dim 64 or "
            f"128, got {list(k_cache.shape)}"
        )
    if stored != kv_heads or heads % kv_heads or not 1 <= heads // kv_heads <= attend.HEADS:
        raise ValueError(
            f"heads must be 1 to {attend.HEADS} times kv_heads, which k_cache has as its fourth "
            f"dimension, got heads {heads}, kv_heads {kv_heads}, k_cache {list(k_cache.shape)}"
        )
    if qkv.ndim != 2 or qkv.shape[0] < batch:
        raise ValueError(f"qkv must have at least {batch} rows, got {list(qkv.shape)}")
    width = (heads + 2 * kv_heads) * size
    support.check_array("qkv", qkv, (qkv.shape[0], width), k_cache.dtype)
    support.check_array("v_cache", v_cache, k_cache.shape, k_cache.dtype)
    for name, table in zip(("cosine", "sine"), rope, strict=True):
        support.check_array(f"the {name} in rope", table, (batch, size // 2), jnp.float32)
    support.check_array("layer", layer, (1,), jnp.int32)
    support.check_array("lengths", lengths, (batch,), jnp.int32)


def _splits(clusters: int, steps: int, size: int) -> int:
    """Blocks of a cluster: so many that they about fill the SMs, but each has some steps."""
    splits, blocks = 1, _FEATURES_ON_SM // size * support.sm_count()
    most = min(_MOST_SPLITS, steps // 2, blocks // clusters)
    if steps < _MOST_SPLITS * _STEPS_OF_MANY:
        most = min(most, PARTS)
    while 2 * splits <= most:
        splits *= 2
    return splits


def _run(cluster_number, wait, operands, refs, outs, memory, barriers, *, heads):
    (qkv, cos, sin, layer, lengths), (k_cache, v_cache), (out,) = operands, refs, outs
    k_smem, v_smem, q_smem, p_smem = (memory[f"{name}_smem"] for name in "kvqp")
    small, o_parts, sums = (memory[name] for name in ("small", "o_parts", "sums"))
    loaded, splits = barriers, o_parts.shape[0]
    sequence, head = cluster_number // heads.stored, cluster_number % heads.stored
    split = lax.axis_index("subcluster") * PARTS + lax.axis_index("part")
    (stages, step, _), new_smem, arrived = k_smem.shape, small.at[pl.ds(0, 2)], small.at[2]
    if splits > 1:
        cluster.prepare(arrived)
        cluster.expect(4 * (o_parts.size + sums.size), arrived)
    slot, number = lengths[sequence], layer[0]
    last_step = slot // step
    count = (last_step - split + splits) // splits  # steps split, split + splits, ... of this block

    def load(i):
        first = (split + i * splits) * step

        def copy(keys):
            for cache, smem in ((k_cache, k_smem), (v_cache, v_smem)):
                source = cache.at[number, sequence, pl.ds(first, keys), head]
                target = smem.at[i % stages, pl.ds(0, keys)]
                plgpu.copy_gmem_to_smem(source, target, loaded.at[i % stages])

        stored = slot - first
        for fewer, keys in zip((-1, *_COPIES), (*_COPIES, step), strict=True):
            is_right = fewer < stored if keys == step else (fewer < stored) & (stored <= keys)
            pl.when(is_right)(functools.partial(copy, keys))

    for i in range(stages):
        pl.when(i < count)(functools.partial(load, jnp.int32(i)))
    launch_next()
    wait()
    is_owner = (count > 0) & (split + (count - 1) * splits == last_step)
    stored = [cache.at[number, sequence, slot, head] for cache in (k_cache, v_cache)]
    rope = cos.at[sequence], sin.at[sequence]
    attend.place_new(qkv.at[sequence], rope, head, is_owner, q_smem, new_smem, stored, heads=heads)

    def attend_to_step(i, carry):
        stage, high = i % stages, slot - (split + i * splits) * step
        plgpu.barrier_wait(loaded.at[stage])
        k, v = k_smem.at[stage], v_smem.at[stage]

        @pl.when(high < step)
        def _():
            attend.patch(k, v, new_smem, high)

        carry = _add_step(carry, k, v, q_smem, p_smem, high)
        warpgroup.barrier()  # all warps' products with this stage have ended
        pl.when(i + stages < count)(functools.partial(load, i + stages))
        return carry

    top, totals, o = lax.fori_loop(0, count, attend_to_step, _nothing(step, heads.size))
    combine.send_parts(o, top, jnp.sum(totals, axis=0), split, o_parts, sums, arrived)
    if splits > 1:
        cluster.wait_for_parts(arrived)
    combine.store_combined(o_parts, sums, out.at[sequence], head, heads=heads, block=split)


def _nothing(step, size):
    """Running softmax of no keys: the largest score, sums by row of a step, and sums of values."""
    layout = plgpu.Layout.WGMMA
    shape = (attend.HEADS,)
    return (
        plgpu.layout_cast(jnp.full(shape, -jnp.inf, jnp.float32), layout.reduce(0)),
        plgpu.layout_cast(jnp.zeros((step, *shape), jnp.float32), layout),
        plgpu.layout_cast(jnp.zeros((size, *shape), jnp.float32), layout),
    )


def _add_step(carry, k, v, q, p_smem, high):
    """Adds the keys and values in rows up to `high`, at least one, to a running softmax.

    Args:
      carry: as `_nothing` starts it; scores are exponents of 2.
      k, v: SMEM `[step, size]`.
      q: SMEM `[8, size]`.
      p_smem: SMEM `[8, step]`, workspace.
      high: int32 scalar.
    """
    top, totals, o = carry
    (step, size), layout = k.shape, plgpu.Layout.WGMMA
    row = plgpu.broadcasted_iota(jnp.int32, (step, attend.HEADS), 0, layout=layout)
    scores = _product(k, q.T, step) * (_LOG2_E / size**0.5)
    scores = jnp.where(row <= high, scores, -jnp.inf)
    before, top = top, jnp.maximum(top, jnp.max(scores, axis=0))
    p = jnp.exp2(scores - _rows(top, step))
    shrink = jnp.exp2(before - top)
    attend.store_transposed(p.astype(p_smem.dtype), p_smem)
    totals = totals * _rows(shrink, step) + p
    o = o * _rows(shrink, size) + _product(v.T, p_smem.T, size)
    return top, totals, o


def _product(a, b, rows):
    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((rows, attend.HEADS), jnp.float32))


def _rows(x, rows):
    """`x: [8]` in each of the rows."""
    x = lax.broadcast_in_dim(x, (rows, attend.HEADS), (1,))
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)
