"""Prompts, and one more token of each of a few sequences: what computes them, and why."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout

from pallas_kernels.kernels import MAX_FEW_TOKENS, Kernels
from twell_jax.config import ModelConfig
from twell_jax.ffn import dispatch
from twell_jax.ffn.algorithms import Case, Request
from twell_jax.ffn.explained import on_device
from twell_jax.ffn.partition import auto_axes
from twell_jax.models.cache import KVCache
from twell_jax.models.decode_step import step
from twell_jax.models.quantised import ATTENTION, Part
from twell_jax.models.transformer import IN_PLACE_OPTIONS, Transformer

# For programs that decode. A chain of kernels overlaps only if it is no part of a CUDA graph.
DECODE_OPTIONS = IN_PLACE_OPTIONS | {"xla_gpu_enable_command_buffer": ""}

_SPARSE = "few_tokens"  # the algorithm of sparse blocks
_MOST_BLOCKS = 132  # thread blocks of a launch
_TILE = 8  # sequences that a launch for all layers multiplies together
# Up to so many sequences, and bytes of a layer that such launches read again, they are faster than
# XLA: docs/design/0035-one-launch.md.
_MOST_TOGETHER, _MOST_AGAIN = 32, 320 * 2**20


def read_prompts(
    model: Transformer, tokens: jax.Array, capacity: int, lengths: jax.Array | None = None
) -> tuple[jax.Array, KVCache]:
    """`model.prefill(tokens, capacity, lengths)`, where the config leaves the choice by XLA alone
    if there are fewer than 1024 tokens.

    512 tokens of 2b gained nothing by kernels (0.99x, record
    `inference-cached-nvidia-h200-20261126-4`). Up to 64 would gain 7 us a layer (record
    `ffn-few-nvidia-h200-20261127`), in between nobody has timed a model; but to trace and to
    compile kernels takes a second or two.
    """
    if tokens.size < dispatch.MANY_TOKENS:
        model = _without_kernels(model)
    return model.prefill(tokens, capacity, lengths)


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
    config, quantised = model.config, model.quantised()
    by_kernels = partial(
        step,
        kernels,
        model,
        is_sparse=_is_sparse(kernels, config, batch),
        launches=_launches(kernels, config, quantised, batch, capacity),
        window=_window(config, capacity),
    )
    if model.config.decode_implementation == "mosaic":
        return by_kernels(tokens, cache)
    elsewhere = _without_kernels(model).decode
    return jax.lax.platform_dependent(tokens, cache, cuda=by_kernels, default=elsewhere)


def _without_kernels(model: Transformer) -> Transformer:
    """The model as platforms without kernels compute it, if its config leaves the choice to blocks:
    JAX would trace their kernels, too."""
    config = model.config
    if config.ffn_implementation is not None or config.ffn_gradients is not None:
        return model
    other = nnx.clone(model)
    other.config = other.blocks.config = config.model_copy(update={"ffn_implementation": "xla"})
    other.blocks.mlp.implementation = "xla"
    return other


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
        if count := _launches(kernels, model.config, model.quantised(), batch, capacity):
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
    if not kernels.decodes:
        return f"{kernels.name} has no kernels that decode"
    size = config.head_dim
    # Every key of the model that changes what is computed must be known to a kernel or be here, or
    # in `_unsupported_by_chain`.
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
    if size % 16 or size > 256:
        return f"the features of a head must be a multiple of 16, up to 256, got {size}"
    if config.kv_cache_dtype is not None and size % 32:
        return f"in 8 bits it stores heads of a multiple of 32 features, got {size}"
    if "down" in quantised:
        return "it has no kernels for a w_down of 8-bit weights"
    if mixed:
        return f"{', '.join(mixed[0])} must all have 8-bit weights, or none, got {quantised}"
    if _launches(kernels, config, quantised, batch, capacity):
        return None
    why = _unsupported_by_chain(config, quantised, capacity)
    if why and _launches(kernels, config, quantised, 1, capacity):
        return f"it serves fewer sequences, but for {batch} {why}"
    return why


def _unsupported_by_chain(
    config: ModelConfig, quantised: tuple[Part, ...], capacity: int
) -> str | None:
    """Why a chain of launches for each layer cannot decode with a model; None if it can."""
    d_model, d_ff, attended = config.d_model, config.d_ff, config.heads * config.head_dim
    unknown = _those_true(
        {
            f"{config.norm} norms": config.norm != "rms",
            "norms of queries and keys": config.qk_norm,
            "a rotation of some features of a head alone": config.rotary_size != config.head_dim,
            "a scale of the residual stream": config.residual_scale != 1,
            "8-bit weights without a gate": "up" in quantised and not config.gated,
            "a cache of 8-bit floats": config.kv_cache_dtype is not None,
            "biases of the feed-forward blocks": config.mlp_bias,
            "heads of other than 64 or 128 features": config.head_dim not in (64, 128),
            "more than 8 heads with the same key/value head": config.heads
            > 8 * config.num_kv_heads,
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


def _launches(
    kernels: Kernels,
    config: ModelConfig,
    quantised: tuple[Part, ...],
    batch: int,
    capacity: int,
) -> int:
    """How many launches compute all layers, each for a part of the sequences: the fewest for which
    it has room; 0 if a chain must, or XLA.

    They take more models than a chain, which reads weights once for all sequences.
    """
    attended = config.heads * config.head_dim
    tile = 128 if quantised else 64  # numbers of a row that are copied together
    if (
        config.d_model % tile
        or attended % tile
        or config.d_ff % 64
        or config.rotary_size % 4
        or config.d_ff < _MOST_BLOCKS * 16
        or min(config.d_model, attended) < (1024 if quantised else 512)
    ):
        return 0
    tiles = -(-batch // _TILE)
    for launches in range(1, tiles + 1):
        if kernels.has_room(
            batch=min(batch, _TILE * -(-tiles // launches)),
            capacity=capacity,
            width=config.d_model,
            neurons=config.d_ff,
            heads=config.heads,
            kv_heads=config.num_kv_heads,
            size=config.head_dim,
            gated=config.gated,
            is_sparse=_is_sparse(kernels, config, batch),
            in_8_bits=(
                "query" in quantised,
                "out" in quantised,
                "up" in quantised,
                config.kv_cache_dtype is not None,
            ),
        ):
            break
    else:
        return 0
    if batch <= _TILE or _pays(config, quantised, batch, capacity, launches):
        return launches
    return 0


def _pays(
    config: ModelConfig, quantised: tuple[Part, ...], batch: int, capacity: int, launches: int
) -> bool:
    """Whether so many launches are faster for more than `_TILE` sequences than what else can."""
    stored = config.num_kv_heads * config.head_dim
    matrices = (3 if config.gated else 2) * config.d_ff
    layer = 2 * config.d_model * (2 * config.heads * config.head_dim + 2 * stored + matrices)
    return (
        batch <= _MOST_TOGETHER
        and (launches - 1) * layer <= _MOST_AGAIN
        and _unsupported_by_chain(config, quantised, capacity) is not None
    )


def laid_out(model: Transformer, batch: int, capacity: int) -> Transformer:
    """The model with attention's matrices as decoding reads them, so that no step transposes them.

    What multiplies by XLA takes any layout. Without a kernel for a whole step it is the model.

    Args:
      model: the model; its parameters may be `jax.ShapeDtypeStruct`s.
      batch, capacity: sequences and tokens of the cache.
    """
    kernels, _ = _kernels(model, batch, capacity)
    of_model = model.config, model.quantised(), batch, capacity
    if kernels is None or not _launches(kernels, *of_model):
        return model
    model = nnx.clone(model)  # whose variables are its own
    for name in ATTENTION:
        if isinstance(layer := getattr(model.blocks.attention, name), nnx.Linear):
            layer.kernel.set_value(_by_columns(layer.kernel.get_value()))
    return model


def _by_columns[A: (jax.Array, jax.ShapeDtypeStruct)](matrices: A) -> A:
    """Matrices of all layers `[L, K, N]` whose columns lie in memory one after the other."""
    sharding = matrices.sharding or jnp.zeros(()).sharding
    layout = Format(Layout((0, 2, 1), tiling=()), sharding)  # as an array says its own
    if isinstance(matrices, jax.Array):
        return jax.device_put(matrices, layout)
    return jax.ShapeDtypeStruct(matrices.shape, matrices.dtype, sharding=layout)


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
