"""Cross-entropy from hidden states, without the logits of all tokens at once.

The logits of a micro-batch are the largest array of a training step: a float32 for each token and
each row of the vocabulary. Here a chunk of tokens has its logits at a time. Where gradients are
asked for, a chunk's gradients follow at once, while its logits exist, so that nothing is computed
twice: as in Liger Kernel's fused linear cross-entropy (arXiv 2410.10989). See docs/design/0026.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from twell_jax.ffn import float8
from twell_jax.models.sharding import on_shares

# Each chunk reads and writes the whole sum of the unembedding's gradients. With the logits of 1 GiB
# that is a few per cent of what its three matmuls take on an H100.
CHUNK_BYTES = 2**30


def token_cross_entropy(hidden: jax.Array, unembedding: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross-entropy of each token, in nats. `mean_cross_entropy` is for gradients.

    Args:
      hidden: `[B, T, D]` in the compute dtype, to which matmuls round the logits.
      unembedding: `[vocab, D]` in any dtype, not split over "vocab".
      labels: int `[B, T]`.

    Returns:
      float32 `[B, T]`, B split over the devices as in `split_batch`.
    """
    return on_shares(_of_tokens, hidden, labels, whole=unembedding.astype(hidden.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def mean_cross_entropy(
    hidden: jax.Array,
    unembedding: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None = None,
    in_8_bits: bool = False,
) -> jax.Array:
    """The mean of `token_cross_entropy` over all tokens, float32 [].

    With `weights`, float32 `[B, T]` and without gradients, that of each token is multiplied by its
    weight before. With `in_8_bits` the product for logits has operands of 8 bits, as
    `float8.products`; those for gradients have not.

    The mean's gradients, in reverse mode alone, are computed with it. That of `unembedding` is
    summed over the chunks and the devices in float32, and has the dtype of `unembedding`.
    """
    # Without the gradients, which JAX does not compute where nothing asks for them.
    return _with_gradients(hidden, unembedding, labels, weights, in_8_bits)[0]


def _with_gradients(
    hidden: jax.Array,
    unembedding: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    in_8_bits: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    def of_share(hidden, labels, weights, unembedding):
        ce, of_hidden, of_unembedding = _gradients_of_tokens(
            hidden, labels, weights, unembedding, share, in_8_bits
        )
        return ce, of_hidden, of_unembedding[None]

    share = 1 / labels.size
    whole = unembedding.astype(hidden.dtype)
    ce, of_hidden, of_unembedding = on_shares(of_share, hidden, labels, weights, whole=whole)
    # One reduction over the devices, after all chunks.
    of_unembedding = jnp.sum(of_unembedding, axis=0).astype(unembedding.dtype)
    return jnp.mean(ce), (of_hidden, of_unembedding)


def _scale_gradients(
    in_8_bits: bool, gradients: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    of_hidden, of_unembedding = ((g * cotangent).astype(g.dtype) for g in gradients)
    return of_hidden, of_unembedding, None, None


mean_cross_entropy.defvjp(_with_gradients, _scale_gradients)


def _of_tokens(hidden: jax.Array, labels: jax.Array, unembedding: jax.Array) -> jax.Array:
    def of_chunk(_, operands):
        return None, _of_logits(operands[0] @ unembedding.T, operands[1])[0]

    _, ce = _over_chunks(of_chunk, None, hidden, labels, len(unembedding))
    return ce


def _gradients_of_tokens(
    hidden: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    unembedding: jax.Array,
    share: float,
    in_8_bits: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The cross-entropy of tokens, weighted, and the gradients of their sum times `share`.

    Returns:
      float32 `[B, T]`; the gradient of `hidden`, in its dtype; that of `unembedding`, in float32.
    """
    matrix = None
    if in_8_bits:  # rounded once for all chunks
        matrix = float8.scaled([unembedding], float8.FORWARD, joined=0, reduced=1)

    def of_chunk(total, operands):
        x, labels, weights = operands
        if matrix is None:
            logits = x @ unembedding.T
        else:
            logits = float8.dot(float8.scaled([x], float8.FORWARD), matrix, (1, 1), x.dtype)
        ce, log_sum = _of_logits(logits, labels)
        wanted = labels[:, None] == jnp.arange(len(unembedding))
        factor = share if weights is None else share * weights[:, None]
        of_logits = (jnp.exp(logits.astype(jnp.float32) - log_sum[:, None]) - wanted) * factor
        of_logits = of_logits.astype(x.dtype)
        total += jnp.matmul(of_logits.T, x, preferred_element_type=jnp.float32)
        return total, (ce if weights is None else ce * weights, of_logits @ unembedding)

    zeros = jnp.zeros(unembedding.shape, jnp.float32)
    vocab = len(unembedding)
    total, (ce, of_hidden) = _over_chunks(of_chunk, zeros, hidden, labels, vocab, weights)
    return ce, of_hidden, total


def _of_logits(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy of `logits: [tokens, vocab]` and their log-sum-exp, both float32."""
    log_sum = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    of_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return log_sum - of_label.astype(jnp.float32), log_sum


def _over_chunks(
    of_chunk: Callable,
    carry: Any,
    hidden: jax.Array,
    labels: jax.Array,
    vocab: int,
    weights: jax.Array | None = None,
) -> tuple[Any, Any]:
    """Scans over equal chunks of tokens, which `of_chunk` gets as `[C, D]`, `[C]` and `[C]`.

    Returns:
      The last carry, and the other results with leading axes `[B, T]` in place of `[C]`.
    """
    tokens = labels.size
    count = chunks(tokens, vocab)
    # Tokens that fill up the last chunk are zero, so that they add nothing to weight gradients.
    padding = -tokens % count

    def split(a: jax.Array) -> jax.Array:
        flat = a.reshape(tokens, *a.shape[2:])
        flat = jnp.pad(flat, [(0, padding), *[(0, 0)] * (flat.ndim - 1)]) if padding else flat
        return flat.reshape(count, -1, *a.shape[2:])

    def join(a: jax.Array) -> jax.Array:
        flat = a.reshape(-1, *a.shape[2:])[:tokens]
        return flat.reshape(*labels.shape, *a.shape[2:])

    operands = jax.tree.map(split, (hidden, labels, weights))
    carry, results = jax.lax.scan(of_chunk, carry, operands)
    return carry, jax.tree.map(join, results)


def chunks(tokens: int, vocab: int) -> int:
    """Into how many chunks the tokens of a device are split.

    They are as few as keep a chunk's float32 logits below 1 GiB. If the tokens do not divide by
    that number, but by another one less than twice as large, it is that one: nothing is padded.
    """
    least = -(-4 * tokens * vocab // CHUNK_BYTES)
    return next((count for count in range(least, 2 * least) if tokens % count == 0), least)
