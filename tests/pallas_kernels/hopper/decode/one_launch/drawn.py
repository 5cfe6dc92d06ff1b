"""Random layers, streams and caches."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.decode.one_launch.shape import Shape
from pallas_kernels.layers import Layers
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import Quantised, rounded
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights
from tests import seeds


class Case(NamedTuple):
    """Shapes of a step.

    Attributes:
      layers, batch, width, neurons, heads, kv_heads, size, capacity: of the model and the cache.
      offset: by how many of its deviations a gate is below zero on average.
      is_sparse, rectifier, gated: of the feed-forward blocks.
      has_biases, has_head_norms: of attention.
      in_8_bits: "mlp": gate and up are 8-bit floats; "all": attention's matrices, too.
      lengths: of the sequences; none for about as many as the cache has room for.
      rotated: features of a head that have positions; none for all.
      window, residual_scale: as of `decode_layers`.
      has_layer_norms: in place of RMS norms.
      has_mlp_biases: of gate, up and down.
      live: neurons of each layer; none if all are.
      launches: as of `decode_layers`.
      has_8_bit_cache: whether keys and values are 8-bit floats.
    """

    layers: int
    batch: int
    width: int
    neurons: int
    heads: int
    kv_heads: int
    size: int
    capacity: int
    offset: float = 0.0
    is_sparse: bool = True
    rectifier: Rectifier | None = RELU
    gated: bool = True
    has_biases: bool = False
    has_head_norms: bool = False
    in_8_bits: str | None = None
    lengths: tuple[int, ...] = ()
    rotated: int | None = None
    window: int | None = None
    residual_scale: float = 1.0
    has_layer_norms: bool = False
    has_mlp_biases: bool = False
    live: tuple[int, ...] = ()
    launches: int = 1
    has_8_bit_cache: bool = False

    @property
    def options(self) -> dict:
        """Of `decode_layers`."""
        return {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "eps": 1e-5,
            "rectifier": self.rectifier,
            "is_sparse": self.is_sparse,
            "window": self.window,
            "residual_scale": self.residual_scale,
            "launches": self.launches,
        }

    def shape(self, blocks: int) -> Shape:
        """Of the step on so many thread blocks."""
        layers, batch, width, neurons, heads, kv_heads, size, capacity, *_ = self
        return Shape(
            blocks, layers, batch, capacity, width, neurons, heads, kv_heads, size, self.gated,
            self.is_sparse, self.rectifier, (2, 2, 2), self.rotated or size, self.window,
            self.residual_scale, 1 if self.has_8_bit_cache else 2,
        )  # fmt: skip


def _in_8_bits(stored):
    """Keys or values with a scale for each token and head."""
    of = rounded(stored)
    return Quantised(of.values, jnp.swapaxes(of.scale[..., 0], 2, 3))


def operands(case: Case):
    """Stream, layers, keys, values, lengths and rope; free slots of the cache hold NaN."""
    layers, batch, d, h, heads, kv_heads, size, capacity, offset, *_ = case
    keys = iter(jax.random.split(jax.random.key(seeds.integer()), 31))

    def normal(*shape, scale=1.0, shift=0.0):
        return (jax.random.normal(next(keys), shape) * scale + shift).astype(jnp.bfloat16)

    x = normal(batch, d, scale=0.5, shift=1.0)
    x = jnp.pad(x, ((0, -batch % 8), (0, 0)))
    qkv = tuple(normal(layers, d, n * size, scale=d**-0.5) for n in (heads, kv_heads, kv_heads))
    out = normal(layers, heads * size, d, scale=(heads * size) ** -0.5)
    activated, linear, down = (
        normal(layers, h, d, scale=d**-0.5, shift=-offset / d),
        normal(layers, h, d, scale=d**-0.5),
        normal(layers, h, d, scale=0.3 * h**-0.5),
    )
    live = jnp.array(case.live, jnp.int32) if case.live else None
    inner = (activated, linear) if case.gated else (activated,)
    mlp = replace(Weights.of(inner, down), live=live)
    scales = tuple(normal(layers, d, scale=0.05, shift=1.0) for _ in range(2))
    full = [max(capacity - 1 - 37 * b, 1) for b in range(batch)]
    lengths = jnp.array(case.lengths or full, jnp.int32)
    is_free = (jnp.arange(capacity) >= lengths[:, None])[None, :, :, None, None]
    cache = (normal(layers, batch, capacity, kv_heads, size) for _ in range(2))
    if case.has_8_bit_cache:
        cache = map(_in_8_bits, cache)
        scale_is_free = jnp.swapaxes(is_free[..., 0], 2, 3)
        k, v = (
            Quantised(
                jnp.where(is_free, jnp.float8_e4m3fn(jnp.nan), of.values),
                jnp.where(scale_is_free, jnp.nan, of.scale),
            )
            for of in cache
        )
    else:
        k, v = (jnp.where(is_free, jnp.nan, values) for values in cache)
    angles = jax.random.uniform(next(keys), (batch, (case.rotated or size) // 2), maxval=6.0)
    stream, norm_biases = Stream.of(x, normal(d, scale=0.05, shift=1.0)), None
    if case.has_layer_norms:
        of_norm = normal(d, scale=0.05, shift=1.0), normal(d, scale=0.2)
        stream = Stream.of(x, *of_norm, eps=case.options["eps"])
        norm_biases = normal(layers, d, scale=0.2), normal(layers, d, scale=0.2)
    rope = jnp.cos(angles), jnp.sin(angles)
    biases, head_scales = (None, None), None
    if case.has_biases:
        biases = normal(layers, (heads + 2 * kv_heads) * size), normal(layers, d, scale=0.1)
    if case.has_head_norms:
        head_scales = tuple(normal(layers, size, scale=0.1, shift=1.0) for _ in range(2))
    inner_biases, down_bias = None, None
    if case.has_mlp_biases:
        inner_biases = tuple(normal(layers, h, scale=0.3) for _ in mlp.inner)
        down_bias = normal(layers, d, scale=0.1)
    if case.in_8_bits:
        mlp = replace(Weights.of([*map(rounded, mlp.inner)], mlp.down), live=live)
    if case.in_8_bits == "all":
        qkv = tuple(rounded(jnp.swapaxes(w, 1, 2)) for w in qkv)
        out = rounded(jnp.swapaxes(out, 1, 2))
    of = Layers(
        qkv, biases[0], out, biases[1], mlp, scales, head_scales, norm_biases, inner_biases,
        down_bias,
    )  # fmt: skip
    return stream, of, k, v, lengths, rope
