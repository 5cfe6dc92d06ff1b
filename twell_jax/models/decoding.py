"""One more token of each of a few sequences, by kernels: which of them, and with what.

`pallas_kernels.hopper.decode.step` has the layers. Its kernels take the stacked weights of all
layers and a layer's number, so nothing is copied.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format, Layout

from pallas_kernels import in_place
from pallas_kernels.kernels import MAX_FEW_TOKENS, DecodeKernels, Kernels
from pallas_kernels.layers import Layers
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import Operand, Quantised
from pallas_kernels.weights import Weights
from twell_jax.config import ModelConfig
from twell_jax.ffn import dispatch
from twell_jax.ffn.activations import rectifier
from twell_jax.ffn.algorithms import Case, Request
from twell_jax.ffn.explained import on_device
from twell_jax.ffn.partition import auto_axes
from twell_jax.models.attention import Attention
from twell_jax.models.cache import KVCache
from twell_jax.models.layers import scaled
from twell_jax.models.quantised import ATTENTION, Part, QuantisedLinear
from twell_jax.models.rope import rope_table
from twell_jax.models.transformer import IN_PLACE_OPTIONS, Transformer

# For programs that decode. A chain of kernels overlaps only if it is no part of a CUDA graph.
DECODE_OPTIONS = IN_PLACE_OPTIONS | {"xla_gpu_enable_command_buffer": ""}

_SPARSE = "few_tokens"  # the algorithm of sparse blocks
_MOST_BLOCKS = 132  # thread blocks of a launch
_TOGETHER = 8  # sequences of a launch for all layers
# Up to so many sequences, and bytes of a layer that such launches read again, they are faster than
# XLA: docs/design/0035-one-launch.md.
_MOST_TOGETHER, _MOST_AGAIN = 32, 320 * 2**20
_ROWS = 8  # kernels take a multiple of so many tokens
_COLUMNS = 64  # and matrices with a multiple of so many columns


def decode(model: Transformer, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """`model.decode(tokens, cache)`, by kernels where they can serve; see `DECODE_OPTIONS`.

    Args:
      model: the model; its `config.decode_implementation` may ask for one or the other.
      tokens: int `[B, 1]`.
      cache: what came before; its arrays are changed in place where the caller donates them.

    Returns:
      The logits, float32 `[B, vocab]`, and the extended cache.

    Raises:
      CannotServe: the config asks for kernels, and they cannot serve.
    """
    _, batch, capacity, *_ = cache.k.shape
    kernels, _ = _kernels(model, batch, capacity)
    if kernels is None:
        return model.decode(tokens, cache)
    by_kernels = partial(_step, kernels, model)
    if model.config.decode_implementation == "mosaic":
        return by_kernels(tokens, cache)
    return jax.lax.platform_dependent(tokens, cache, cuda=by_kernels, default=model.decode)


def explain_decoding(
    model: Transformer, batch: int = 1, capacity: int = 1024, device: str | None = None
) -> str:
    """Says in one line what computes `decode` for a model, and why.

    Args:
      model: the model; its parameters may be `jax.ShapeDtypeStruct`s.
      batch: sequences that get a token each.
      capacity: tokens that the cache has room for.
      device: the name of a GPU, as of `twell_jax.explain`; None: the device that JAX would take.

    Raises:
      ValueError: `device` is no name.
      CannotServe: as `decode` does.
    """
    sequences = "one sequence" if batch == 1 else f"{batch} sequences"
    launches = "by kernels"
    with on_device(device):
        kernels, why = _kernels(model, batch, capacity)
        if model.config.decode_implementation != "mosaic":
            _check_blocks(model, batch)
        if kernels is None:
            return f"decodes {sequences} by XLA: {why}"
        if _in_one_launch(kernels, model.config, model.quantised(), batch, capacity):
            count = -(-batch // _TOGETHER)
            launches = "in one launch" if count == 1 else f"in {count} launches"
        passed_over = _selection(kernels, model.config, batch).passed_over
    dense = [why for rule, why in passed_over if rule.algorithm == _SPARSE]
    blocks = f"dense: {dense[0]}" if dense else "sparse"
    return f"decodes {sequences} {launches}, with feed-forward blocks that are {blocks}"


def _kernels(model: Transformer, batch: int, capacity: int) -> tuple[Kernels | None, str]:
    """The kernels that decode; or None, and why.

    Raises:
      CannotServe: the config asks for kernels, and they cannot serve.
    """
    wanted = model.config.decode_implementation
    if wanted == "xla":
        return None, "decode_implementation is 'xla'"
    w_down = jax.ShapeDtypeStruct(model.blocks.mlp.w_down.shape[1:], jnp.bfloat16)
    kernels, no_back_end = dispatch.back_end(w_down)
    if kernels is None:
        why = no_back_end
    else:
        why = _unsupported(kernels, model.config, model.quantised(), batch, capacity)
    if why and wanted == "mosaic":
        raise dispatch.CannotServe.because("decode_implementation='mosaic'", why)
    return (None, why) if why else (kernels, "")


def _check_blocks(model: Transformer, batch: int) -> None:
    """Raises CannotServe if blocks cannot serve what the config asks of them where XLA decodes,
    which is a part of most programs in which kernels do."""
    graph, params = nnx.split(model.blocks.mlp)
    x = jax.ShapeDtypeStruct((batch, 1, model.config.d_model), model.config.dtype)

    def block(params, x):
        return nnx.merge(graph, jax.tree.map(lambda a: a[0], params))(x)

    jax.eval_shape(block, params, x)


def _unsupported(
    kernels: Kernels,
    config: ModelConfig,
    quantised: tuple[Part, ...],
    batch: int,
    capacity: int,
) -> str | None:
    """Why kernels cannot decode with a model, in words; None if they can.

    Args:
      kernels: the back end.
      config: the model's.
      quantised: its parts in 8 bits.
      batch: sequences of the cache, of which each gets one more token.
      capacity: tokens of the cache.
    """
    size = config.head_dim
    # Every key of the model that changes what is computed must be known to a kernel or be here, or
    # in `_unsupported_by_chain`.
    unknown = _those_true(
        {
            "biases of the feed-forward blocks": config.mlp_bias,
            "a w_down of 8-bit weights": "down" in quantised,
        }
    )
    inner = ("gate", "up") if config.gated else ("up",)
    mixed = [
        together
        for together in (inner, ("query", "key", "value"))
        if 0 < len({*together} & {*quantised}) < len(together)
    ]
    if auto_axes():
        return "it serves one device, not a mesh"
    if not config.dtype == config.param_dtype == "bfloat16":
        return (
            f"dtype and param_dtype must be bfloat16, got {config.dtype} and {config.param_dtype}"
        )
    if batch > MAX_FEW_TOKENS or capacity % 8:
        return (
            f"it serves up to {MAX_FEW_TOKENS} sequences in a cache whose capacity is a "
            f"multiple of 8, got {batch} and {capacity}"
        )
    if size not in (64, 128) or config.heads > 8 * config.num_kv_heads:
        return (
            "heads must have 64 or 128 features, and at most 8 may share a key/value head, got "
            f"{size}, and {config.heads} heads for {config.num_kv_heads}"
        )
    if unknown:
        return f"it has no kernels for {' and '.join(unknown)}"
    if mixed:
        return f"{', '.join(mixed[0])} must all have 8-bit weights, or none, got {quantised}"
    if _in_one_launch(kernels, config, quantised, batch, capacity):
        return None
    return _unsupported_by_chain(config, quantised, capacity)


def _unsupported_by_chain(
    config: ModelConfig, quantised: tuple[Part, ...], capacity: int
) -> str | None:
    """Why several launches for each layer cannot decode with a model; None if they can."""
    d_model, d_ff, attended = config.d_model, config.d_ff, config.heads * config.head_dim
    unknown = _those_true(
        {
            f"{config.norm} norms": config.norm != "rms",
            "norms of queries and keys": config.qk_norm,
            "a rotation of some features of a head alone": config.rotary_size != config.head_dim,
            "a scale of the residual stream": config.residual_scale != 1,
            "8-bit weights without a gate": "up" in quantised and not config.gated,
        }
    )
    if d_model % 1024 or attended % 256 or d_ff % 256:
        return (
            "d_model must be a multiple of 1024, d_ff and heads * head_size of 256, got "
            f"{d_model}, {d_ff} and {attended}"
        )
    if _window(config, capacity) is not None:
        return f"it attends to all of a cache, which has {capacity} tokens, not to a window of them"
    return f"it has no kernels for {' and '.join(unknown)}" if unknown else None


def _those_true(parts: Mapping[str, bool]) -> list[str]:
    return [part for part, is_there in parts.items() if is_there]


def _window(config: ModelConfig, capacity: int) -> int | None:
    """Tokens of a cache of `capacity` that a token attends to, itself included; None: all."""
    window = config.sliding_window
    return None if window is None or window >= capacity else window


def _in_one_launch(
    kernels: Kernels,
    config: ModelConfig,
    quantised: tuple[Part, ...],
    batch: int,
    capacity: int,
) -> bool:
    """Whether a launch computes all layers for eight sequences: it takes more models than a chain
    of launches, which reads weights once for all sequences."""
    attended, stored = (n * config.head_dim for n in (config.heads, config.num_kv_heads))
    tile = 128 if quantised else 64  # numbers of a row that are copied together
    serves = (
        not config.live_width
        and config.d_model % tile == attended % tile == 0
        and config.d_ff % 64 == config.rotary_size % 4 == 0
        and config.d_ff >= _MOST_BLOCKS * 16
        and min(config.d_model, attended) >= (1024 if quantised else 512)
        and kernels.has_room(
            batch=min(batch, _TOGETHER),
            capacity=capacity,
            width=config.d_model,
            neurons=config.d_ff,
            heads=config.heads,
            kv_heads=config.num_kv_heads,
            size=config.head_dim,
            gated=config.gated,
            is_sparse=_is_sparse(kernels, config, batch),
            in_8_bits=("query" in quantised, "out" in quantised, "up" in quantised),
        )
    )
    if not serves or batch <= _TOGETHER:
        return serves
    matrices = 3 if config.gated else 2
    layer = 2 * config.d_model * (2 * attended + 2 * stored + matrices * config.d_ff)
    return (
        batch <= _MOST_TOGETHER
        and (-(-batch // _TOGETHER) - 1) * layer <= _MOST_AGAIN
        and _unsupported_by_chain(config, quantised, capacity) is not None
    )


def laid_out(model: Transformer, batch: int, capacity: int) -> Transformer:
    """The model with attention's matrices as decoding reads them, so that no step transposes them.

    What multiplies by XLA takes any layout. Without a kernel for a whole step it is the model.

    Args:
      model: the model.
      batch, capacity: sequences and tokens of the cache.
    """
    kernels, _ = _kernels(model, batch, capacity)
    of_model = model.config, model.quantised(), batch, capacity
    if kernels is None or not _in_one_launch(kernels, *of_model):
        return model
    model = nnx.clone(model)  # whose variables are its own
    for name in ATTENTION:
        if isinstance(layer := getattr(model.blocks.attention, name), nnx.Linear):
            layout = Format(Layout((0, 2, 1)), layer.kernel[...].sharding)
            layer.kernel.set_value(jax.device_put(layer.kernel[...], layout))
    return model


def _selection(kernels: Kernels, config: ModelConfig, batch: int) -> dispatch.Selection:
    """What serves feed-forward blocks, as `sparse_ffn` would choose without live neurons and 8-bit
    weights: about these `decode` has decided before.

    Raises:
      CannotServe: the config asks for kernels in them, and they cannot serve.
    """
    case = Case(
        tokens=batch,
        width=config.d_model,
        neurons=config.d_ff,
        gated=config.gated,
        activation=config.ffn_activation,
        back_end=kernels.name,
    )
    return dispatch.select(case, Request(config.ffn_implementation))


def _is_sparse(kernels: Kernels, config: ModelConfig, batch: int) -> bool:
    return _selection(kernels, config, batch).rule.algorithm == _SPARSE


def _step(
    kernels: Kernels, model: Transformer, tokens: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    config, batch = model.config, len(tokens)
    layers, first_norm = _layers(model)
    act = rectifier(config.ffn_activation)
    is_sparse = _is_sparse(kernels, config, batch)
    cos, sin = rope_table(cache.lengths[:, None], config)
    rope = cos.reshape(batch, -1), sin.reshape(batch, -1)
    x = scaled(model.embed(jnp.pad(tokens[:, 0], (0, -batch % _ROWS))), config.embed_scale)
    # The first layer reads the cache at once. A cache that is not donated has been copied by then:
    # XLA copies it first, and the kernels that make the stream wait for what comes before them.
    stream = Stream.of(x, *first_norm, eps=config.norm_eps)
    k, v = in_place.mutable(cache.k), in_place.mutable(cache.v)
    stream = kernels.decode_layers(
        stream,
        layers,
        k,
        v,
        cache.lengths,
        rope,
        heads=config.heads,
        kv_heads=config.num_kv_heads,
        eps=config.norm_eps,
        rectifier=act,
        is_sparse=is_sparse,
        in_one_launch=_in_one_launch(kernels, config, model.quantised(), batch, cache.k.shape[2]),
        window=_window(config, cache.k.shape[2]),
        residual_scale=config.residual_scale,
    )
    logits = _logits(kernels, model, stream)[:batch]
    extended = KVCache(in_place.contents(k), in_place.contents(v), cache.lengths)
    return logits, extended.advance(1)


def _layers(model: Transformer) -> tuple[Layers, list[jax.Array]]:
    """The stacked weights; and of the first norm the scale, and the bias if it is a layer norm."""
    attention, mlp = model.blocks.attention, model.blocks.mlp
    qkv = attention.query, attention.key, attention.value
    biases = [_array(p.bias) for p in (*qkv, attention.out)] if model.config.attention_bias else []
    names = ("scale", "bias") if model.config.norm == "layer" else ("scale",)
    scales, *norm_biases = (_of_norms(model, name) for name in names)
    return Layers(
        qkv=tuple(_matrix(projection) for projection in qkv),
        qkv_bias=jnp.concatenate(biases[:3], axis=1) if biases else None,
        out=_matrix(attention.out),
        out_bias=biases[3] if biases else None,
        mlp=Weights(
            _array(mlp.w_gate) if model.config.gated else None,
            _array(mlp.w_up),
            _array(mlp.w_down),
            _array(mlp.live) if model.config.live_width else None,
        ),
        scales=scales[1:],
        head_scales=_head_scales(attention),
        norm_biases=norm_biases[0][1:] if norm_biases else None,
    ), [first[0] for first, *_ in (scales, *norm_biases)]


def _of_norms(model: Transformer, name: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A parameter of the norms, `[L, D]` each: in front of attention, in front of the feed-forward
    block, and behind that, which is the next layer's first or the model's last."""
    before, between, last = (
        _array(getattr(norm, name))
        for norm in (model.blocks.attention_norm, model.blocks.mlp_norm, model.norm)
    )
    return before, between, jnp.concatenate([before[1:], last[None]])


def _head_scales(attention: Attention) -> tuple[jax.Array, jax.Array] | None:
    if attention.query_norm is None or attention.key_norm is None:
        return None
    return _array(attention.query_norm.scale), _array(attention.key_norm.scale)


def _array(parameter: Any) -> Any:
    return parameter[...]


def _matrix(layer: nnx.Linear | QuantisedLinear) -> Operand:
    return _array(layer.weight if isinstance(layer, QuantisedLinear) else layer.kernel)


def _k_axis(matrix: Operand) -> int:
    """The axis of its inputs in a stack of such matrices."""
    return 2 if isinstance(matrix, Quantised) else 1


def _logits(kernels: DecodeKernels, model: Transformer, stream: Stream) -> jax.Array:
    weight, k_axis = _array(model.embed.embedding), 2
    if model.unembed is not None:
        weight = _matrix(model.unembed)
        k_axis = _k_axis(weight)
    is_centred = model.config.norm == "layer"
    if is_centred or model.config.vocab_size % _COLUMNS or model.config.d_model % 1024:
        return model.logits(model.norm(stream.x))
    only: Any = np.zeros(1, np.int32)  # a constant
    project = partial(kernels.project, eps=model.config.norm_eps, dtype=jnp.float32)
    logits = project(stream, (jax.tree.map(lambda a: a[None], weight),), only, k_axis=k_axis)
    return scaled(logits, model.config.logit_scale)
