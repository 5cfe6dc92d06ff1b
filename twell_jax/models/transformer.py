"""A decoder whose feed-forward blocks are sparse: norms, RoPE, causal attention."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter

import jax
import jax.numpy as jnp
from flax import nnx

from twell_jax.config import ModelConfig
from twell_jax.ffn import FFNStats, SownStats, Windows, quantise_mlps
from twell_jax.ffn.algorithms import LayerGradients
from twell_jax.ffn.quantised import AXES, EightBits, quantised_projections
from twell_jax.models.attention import in_window, split_documents
from twell_jax.models.block import Block
from twell_jax.models.cache import KVCache
from twell_jax.models.layers import linear, logical_axes, norm, scaled
from twell_jax.models.quantised import PARTS, Part, QuantisedLinear, transposed
from twell_jax.models.remat import POLICIES
from twell_jax.models.rope import rope_table
from twell_jax.models.sharding import LOGICAL_AXES, split_batch

# Without these XLA copies most weights of a layer out of the stacked arrays, and once more to
# multiply by several at a time. By these, cuBLAS reads them in place.
IN_PLACE_OPTIONS = {
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_gpu_enable_triton_gemm": False,
}
# For `jax.jit` around `Transformer.prefill`, as `compiler_options`. What does not need each other
# runs at the same time: query, key and value; the heavy tokens of a block beside the others. Of a
# block's kernels these alone do, and they share no counter. Two layers in a turn of the loop leave
# x where the next turn wants it, which saves a copy where kernels add to the residual.
PREFILL_OPTIONS = IN_PLACE_OPTIONS | {
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
}


class Transformer(nnx.Module):
    """Decoder-only language model.

    Training calls `logits, stats = model(tokens)`, generation calls
    `logits, cache = model.prefill(tokens, capacity)` and then
    `logits, cache = model.decode(tokens, cache)`. The parameters of the blocks are stacked along a
    leading "layers" axis and the blocks run under `jax.lax.scan`, so that compile time does not
    grow with depth.

    Args:
      config: shapes, dtypes and options.
      rngs: source of the initial weights.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(config.init_scale)
        self.embed = nnx.Embed(
            config.vocab_size,
            config.d_model,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            embedding_init=init,
            embedding_metadata=logical_axes("vocab", "embed"),
            rngs=rngs,
        )
        layers = nnx.vmap(
            lambda rngs: Block(config, rngs=rngs),
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        self.blocks = layers(rngs.split(config.layers))
        self.norm = norm(config, rngs)
        self.unembed: nnx.Linear | QuantisedLinear | None = nnx.data(None)
        if not config.tie_embeddings:
            shape = (config.d_model, config.vocab_size)
            self.unembed = linear(config, shape, ("embed", "vocab"), rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        document_end: int | None = None,
        per_token_stats: bool = False,
        ffn_gradients: tuple[LayerGradients, ...] | None = None,
    ) -> tuple[jax.Array, FFNStats]:
        """Computes next-token logits.

        Args: see `hidden`.

        Returns:
          The logits, float32 `[B, T, vocab]`, and the `FFNStats` of `hidden`.

        Raises: see `hidden`.
        """
        x, stats = self.hidden(
            tokens,
            document_end=document_end,
            per_token_stats=per_token_stats,
            ffn_gradients=ffn_gradients,
        )
        return self.logits(x), stats

    def hidden(
        self,
        tokens: jax.Array,
        *,
        document_end: int | None = None,
        per_token_stats: bool = False,
        ffn_gradients: tuple[LayerGradients, ...] | None = None,
        windows: Windows | None = None,
        unroll: bool = False,
    ) -> tuple[jax.Array, FFNStats]:
        """Computes what `logits` and `head` take, for losses that need no logits of all tokens.

        Args:
          tokens: int `[B, T]`.
          document_end: id of the end-of-text token. If given, attention does not cross it and
            positions restart after it. It belongs to the document that it ends.
          per_token_stats: return statistics of each token, not of all together; `fired` is then the
            pattern of the activations. Set `ffn_implementation="xla"` with it, as kernels would run
            token by token.
          ffn_gradients: for each layer, how its feed-forward block computes gradients (see
            `sparse_ffn`); None takes the config's. Consecutive layers with the same value run in
            one loop; each loop is compiled separately.
          windows: those of `FFNStats.lasso`, if it is wanted; with `document_end` they end where
            documents do.
          unroll: unroll the loops. A loop copies what its layers keep for the backward pass into
            arrays of all layers, and back; but it is compiled faster.

        Returns:
          `[B, T, D]` in the compute dtype, normed, and the `FFNStats` with leading axes `[layers]`,
          or `[layers, B, T]` if per token.

        Raises:
          ValueError: `ffn_gradients` does not have a value for each layer.
          CannotServe: the config or `ffn_gradients` asks for kernels, and they cannot serve.
        """
        positions, mask = jnp.arange(tokens.shape[1])[None], None
        if document_end is not None:
            positions, mask = split_documents(tokens, document_end)
            if windows is not None:
                documents = jnp.cumsum(positions == 0, axis=1, dtype=jnp.int32)
                windows = replace(windows, documents=documents)
        x, stats, _ = self._run_blocks(
            tokens,
            positions,
            mask,
            per_token_stats=per_token_stats,
            ffn_gradients=ffn_gradients,
            windows=windows,
            unroll=unroll,
        )
        return x, stats

    def prefill(
        self, tokens: jax.Array, capacity: int, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Reads prompts into a new cache; compile it with `PREFILL_OPTIONS`.

        Args:
          tokens: int `[B, T]`, prompts from their first token on.
          capacity: number of tokens for which the cache has room, at least T.
          lengths: int32 `[B]`, from 1 to T, the tokens of each prompt; what follows them has no
            influence. None: all have T.

        Returns:
          The logits after the last token of each prompt, float32 `[B, vocab]`, and the cache.
        """
        batch, count = tokens.shape
        cache = KVCache.empty(self.config, batch, capacity)
        if lengths is None:
            lengths = jnp.full(batch, count, jnp.int32)
        return self._extend(tokens, cache, cache.place(count)[0], None, lengths)

    def decode(self, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Extends sequences by `tokens: int [B, T]`, which follow those in `cache`.

        Returns the logits after the last token, float32 `[B, vocab]`, and the extended cache. The
        caller must keep `cache.lengths + T` within the capacity. `models.decode` is faster for one
        token of each of a few sequences.
        """
        batch, count = tokens.shape
        return self._extend(tokens, cache, *cache.place(count), jnp.full(batch, count, jnp.int32))

    def _extend(
        self,
        tokens: jax.Array,
        cache: KVCache,
        positions: jax.Array,
        mask: jax.Array | None,
        counts: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """Extends each sequence by so many of its tokens."""
        x, _, stored = self._run_blocks(tokens, positions, mask, cache)
        assert stored is not None  # because a cache was given
        last = jnp.take_along_axis(x, counts[:, None, None] - 1, axis=1)[:, 0]
        return self.logits(last), stored.advance(counts)

    def _run_blocks(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        cache: KVCache | None = None,
        *,
        per_token_stats: bool = False,
        ffn_gradients: tuple[LayerGradients, ...] | None = None,
        windows: Windows | None = None,
        unroll: bool = False,
    ) -> tuple[jax.Array, FFNStats, KVCache | None]:
        """Embeds tokens and runs the layers on them.

        Returns:
          `[B, T, D]` after the last norm, the `FFNStats` of all layers, and the cache, which holds
          the tokens but has its old `lengths`.
        """
        layers = self.config.layers
        if ffn_gradients is None:
            ffn_gradients = (None,) * layers
        if len(ffn_gradients) != layers:
            raise ValueError(
                f"ffn_gradients must have a value for each of {layers} layers, got {ffn_gradients}"
            )
        rope = rope_table(positions, self.config)
        batch, count = tokens.shape
        first = 0 if cache is None else cache.lengths
        mask = in_window(mask, first, batch, count, self.config.sliding_window)
        graph, *params = nnx.split(self.blocks, EightBits, nnx.Param, ...)
        # Here and not where they are used, as the backward pass would convert them once more there.
        params[1] = jax.tree.map(partial(matrices_in, self.config.dtype), params[1])

        bounds = None
        if self.config.matmul_dtype is not None and cache is None and not per_token_stats:
            # Of all layers in a few kernels, which for each would be many small ones.
            bounds = jax.vmap(lambda params: nnx.merge(graph, *params).bounds())(params)

        def block(gradients, carry, layer):
            x, cache = carry
            index, params, bounds = layer
            options = dict(gradients=gradients, per_token_stats=per_token_stats, windows=windows)
            x, stats, cache = nnx.merge(graph, *params)(
                x, rope, mask, cache, index, bounds=bounds, **options
            )
            return (split_batch(x), cache), stats

        every = jnp.arange(layers), params, bounds
        carry = split_batch(scaled(self.embed(tokens), self.config.embed_scale)), cache
        parts = []
        for gradients, which in _runs(ffn_gradients):
            body: Callable = partial(block, gradients)
            if self.config.remat != "none":
                # A loop keeps XLA from merging what is computed again with what was computed first.
                body = jax.checkpoint(body, policy=POLICIES[self.config.remat], prevent_cse=unroll)
            operands = jax.tree.map(itemgetter(which), every)
            carry, part = jax.lax.scan(body, carry, operands, unroll=unroll)
            parts.append(part)
        x, cache = carry
        stats = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
        # The scan runs copies of the module. What they sow is lost, so it is sown again here.
        self.blocks.mlp.sow(SownStats, "stats", stats, capture_noop=True)
        return self.norm(x), stats, cache

    def logits(self, x: jax.Array) -> jax.Array:
        """Logits of `x: [..., D]`, which the last norm has normed: float32 `[..., vocab]`."""
        if isinstance(self.unembed, QuantisedLinear):
            return self.unembed(scaled(x, self.config.logit_scale)).astype(jnp.float32)
        x, unembedding = self.head(x)
        return jnp.dot(x, unembedding.astype(x.dtype).T).astype(jnp.float32)

    def head(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The operands of the product that makes logits of `x: [..., D]`, which is normed.

        Returns:
          `[..., D]` in the compute dtype; the unembedding `[vocab, D]` in that of the parameters.

        Raises:
          ValueError: the head is quantised.
        """
        if isinstance(self.unembed, QuantisedLinear):
            raise ValueError("the head has 8-bit weights, which only `logits` multiplies")
        if self.unembed is None:
            unembedding = self.embed.embedding[...]
        else:
            unembedding = self.unembed.kernel[...].T
        return scaled(x, self.config.logit_scale), unembedding

    def quantise(self, parts: Sequence[Part]) -> None:
        """Makes 8-bit floats of weights, in place; see `quantise_mlps`, which does so for blocks.

        What is quantised already stays. A head that is the embedding becomes a matrix of its own,
        as tokens are embedded exactly: `config.tie_embeddings` is False from then on.

        Args:
          parts: which of `PARTS`; `quantised.COVERED` has usual ones.

        Raises:
          ValueError: there is no such part, or a weight holds an inf or a NaN.
        """
        if unknown := [part for part in parts if part not in PARTS]:
            raise ValueError(f"parts must be of {[*PARTS]}, got {unknown}")
        quantise_mlps(self, [name for name in AXES if name in parts])
        self.blocks.attention.quantise(parts)
        if "head" in parts and self.unembed is None:
            self.unembed = QuantisedLinear(self.embed.embedding)
            self.config = self.config.model_copy(update={"tie_embeddings": False})
        elif "head" in parts and isinstance(self.unembed, nnx.Linear):
            self.unembed = QuantisedLinear(transposed(self.unembed.kernel))

    def quantised(self) -> tuple[Part, ...]:
        """The parts whose weights are 8-bit floats."""
        of_blocks = *quantised_projections(self.blocks.mlp), *self.blocks.attention.quantised()
        return (*of_blocks, "head") if isinstance(self.unembed, QuantisedLinear) else of_blocks


def graphdef(config: ModelConfig, quantised: Sequence[Part] = ()) -> nnx.GraphDef:
    """The structure of a `Transformer`; `nnx.merge` combines it with parameters into a model.

    Args: as of `of_shapes`.
    """
    return nnx.graphdef(of_shapes(config, quantised))


def of_shapes(config: ModelConfig, quantised: Sequence[Part] = ()) -> Transformer:
    """A `Transformer` with `jax.ShapeDtypeStruct`s in place of parameters.

    Args:
      config: the model's.
      quantised: the parts that are quantised (`Transformer.quantise`).
    """

    def make() -> Transformer:
        model = Transformer(config, rngs=nnx.Rngs(0))
        model.quantise(quantised)
        return model

    with nnx.logical_axis_rules(LOGICAL_AXES):
        return nnx.eval_shape(make)


def matrices_in(dtype: jax.typing.DTypeLike, weight: jax.Array) -> jax.Array:
    """A weight of all layers, in `dtype` if it is a matrix of each: scales and biases stay."""
    return weight.astype(dtype) if weight.ndim > 2 else weight


def _runs[T](values: Sequence[T]) -> Iterator[tuple[T, slice]]:
    """Splits values into runs of equal neighbours: each run's value and the slice it spans."""
    start = 0
    for value, equal in groupby(values):
        stop = start + len(list(equal))
        yield value, slice(start, stop)
        start = stop
