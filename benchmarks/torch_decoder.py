"""A plain dense decoder in torch, of the shapes and with the weights of a `Transformer`.

It computes what `Transformer.decode` computes, with "silu" and in the config's dtype. Projections
of the same input are fused, attention is torch's own, over the filled part of a static cache. A
call that is measured is one CUDA graph.

It takes torch's own choice of the attention, flash, which was faster than cuDNN's and than the
memory-efficient one for 8 sequences (4.36 against 4.81 and 4.93 ms a step of 2b, a working
measurement on one H100).
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from twell_jax.config import ModelConfig
from twell_jax.models import KVCache, Transformer


class Layer(NamedTuple):
    """The weights of a layer; matrices are `[outputs, inputs]`.

    Attributes:
      attention_norm: `[D]`.
      qkv: `[(heads + 2 * kv_heads) * head_dim, D]`, for queries, keys and values.
      qkv_bias: `[(heads + 2 * kv_heads) * head_dim]`, or None.
      out: `[D, heads * head_dim]`.
      out_bias: `[D]`, or None.
      mlp_norm: `[D]`.
      up: `[2 * H, D]`, the gate's rows first, or `[H, D]` without a gate.
      down: `[D, H]`.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Weights(NamedTuple):
    """The weights of a model: `embedding` and `unembed` `[vocab, D]`, `norm` `[D]`."""

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    unembed: torch.Tensor


def weights_of(model: Transformer) -> Weights:
    """The model's parameters in its compute dtype, on their device; copies where they are fused."""
    attention, mlp = model.blocks.attention, model.blocks.mlp
    projections = attention.query, attention.key, attention.value

    def take(variable) -> torch.Tensor:
        return torch.from_dlpack(variable[...]).to(getattr(torch, model.config.dtype))

    def bias(*parts) -> torch.Tensor | list[None]:
        if not model.config.attention_bias:
            return [None] * model.config.layers
        return torch.cat([take(part.bias) for part in parts], dim=-1)

    stacked = (
        take(model.blocks.attention_norm.scale),
        torch.cat([take(part.kernel) for part in projections], dim=-1).mT.contiguous(),
        bias(*projections),
        take(attention.out.kernel).mT.contiguous(),
        bias(attention.out),
        take(model.blocks.mlp_norm.scale),
        torch.cat([take(w) for w in (mlp.w_gate, mlp.w_up) if w is not None], dim=1),
        take(mlp.w_down).mT.contiguous(),
    )
    embedding = take(model.embed.embedding)
    unembed = model.unembed and take(model.unembed.kernel).mT.contiguous()
    return Weights(
        embedding,
        [Layer(*layer) for layer in zip(*stacked, strict=True)],
        take(model.norm.scale),
        embedding if unembed is None else unembed,
    )


def copied(cache: KVCache) -> torch.Tensor:
    """Its keys and values, `[layers, 2, B, capacity, kv_heads, head_dim]`."""
    return torch.stack([torch.from_dlpack(a) for a in (cache.k, cache.v)], dim=1)


@torch.inference_mode()
def decode(
    config: ModelConfig, weights: Weights, tokens: torch.Tensor, cache: torch.Tensor, start: int
) -> torch.Tensor:
    """Reads tokens that follow the first `start` ones in the cache, and stores them in it.

    Args:
      config: the shapes.
      weights: those of the model.
      tokens: int64 `[B, T]`; T must be 1 unless `start` is 0.
      cache: of `copied`, for at least `start + T` tokens; changed in place.
      start: number of tokens in the cache.

    Returns:
      The logits after the last token, float32 `[B, vocab]`.
    """
    stop = start + tokens.shape[1]
    half = torch.arange(config.head_dim // 2, device=tokens.device)
    positions = torch.arange(start, stop, device=tokens.device)
    angle = positions[:, None, None] * config.rope_theta ** (-2 * half / config.head_dim)
    rope = angle.cos(), angle.sin()
    x = weights.embedding[tokens]
    for layer, (keys, values) in zip(weights.layers, cache, strict=True):
        x = _block(x, layer, rope, keys[:, :stop], values[:, :stop], config.norm_eps)
    x = functional.rms_norm(x[:, -1], x.shape[-1:], weights.norm, config.norm_eps)
    return functional.linear(x, weights.unembed).float()


def _block(x, layer, rope, keys, values, eps):
    """A layer on `x: [B, T, D]`, whose keys and values are the last T of those given."""
    batch, count, width = x.shape
    kv_heads, head_dim = keys.shape[2:]
    heads = layer.out.shape[1] // head_dim
    normed = functional.rms_norm(x, (width,), layer.attention_norm, eps)
    qkv = functional.linear(normed, layer.qkv, layer.qkv_bias).view(batch, count, -1, head_dim)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    keys[:, -count:] = _rotate(k, rope)
    values[:, -count:] = v
    attended = functional.scaled_dot_product_attention(
        *(a.transpose(1, 2) for a in (_rotate(q, rope), keys, values)),
        is_causal=count > 1,
        enable_gqa=heads != kv_heads,
    )
    x = x + functional.linear(attended.transpose(1, 2).flatten(2), layer.out, layer.out_bias)
    up = functional.linear(functional.rms_norm(x, (width,), layer.mlp_norm, eps), layer.up)
    if up.shape[-1] == layer.down.shape[1]:
        hidden = functional.silu(up)
    else:
        gate, up = up.chunk(2, dim=-1)
        hidden = functional.silu(gate) * up
    return x + functional.linear(hidden, layer.down)


def _rotate(x, rope):
    """`twell_jax.models.rope.rotate`, for `x: [B, T, heads, head_dim]`."""
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def has_cuda() -> bool:
    """Whether torch can use a GPU."""
    return torch.cuda.is_available()


def prepare(
    model: Transformer, tokens: np.ndarray, start: int, before: KVCache
) -> tuple[Callable[[], torch.Tensor], int]:
    """`decode` on a copy of a cache as one CUDA graph, and the device memory that it needs, in
    bytes.

    Args:
      model: the model, on the GPU.
      tokens: int `[B, T]`.
      start: number of tokens in the cache.
      before: the cache, on the GPU.
    """
    weights = weights_of(model)
    ids = torch.from_numpy(tokens).long().cuda()
    cache = copied(before)
    torch.cuda.reset_peak_memory_stats()
    run = captured(lambda: decode(model.config, weights, ids, cache, start))
    return run, torch.cuda.max_memory_allocated()


def captured(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`call` as a CUDA graph; its results share one buffer."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()  # whatever happens at a first call cannot be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX has threads of its own
        result = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def milliseconds(call: Callable[[], torch.Tensor], calls: int, repeats: int = 7) -> float:
    """Time of one call by the GPU's clock: the median of `repeats` means over calls."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def wait(result: torch.Tensor) -> torch.Tensor:
    """The result of a call in the host's memory."""
    return result.cpu()
