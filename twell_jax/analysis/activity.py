"""Measures which neurons of a trained model are active: patterns of activations and statistics."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from twell_jax.data import marks
from twell_jax.models import Transformer, graphdef

# Changes to a ModelConfig for measuring: XLA runs anywhere and can give statistics by token.
THROUGH_XLA = {"ffn_implementation": "xla", "ffn_gradients": None}

UNION_SIZES = (1, 4, 16, 32, 64, 128, 256)  # consecutive tokens; a kernel's tile has 64 to 256
TOP_PERCENT = (1, 5, 10, 25)  # of the neurons


@dataclass(frozen=True)
class Activity:
    """Which neurons of a model were active on n sequences of T tokens.

    Attributes:
      ce: cross-entropy, nats per token, mean over the tokens that count.
      nnz: int32 [layers, n, T], number of neurons that were active for each token.
      usage: int64 [layers, d_ff], number of tokens for which each neuron was active.
      union: {size: float64 [layers]}, the mean share of the neurons that are active for any of
        `size` consecutive tokens, for each size of `UNION_SIZES` up to the length of a sequence.
    """

    ce: float
    nnz: np.ndarray
    usage: np.ndarray
    union: dict[int, np.ndarray]


def activity_patterns(
    model: Transformer, sequences: np.ndarray, *, batch: int, document_end: int | None = None
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Runs a model through XLA and yields which neurons were active.

    Args:
      model: the language model.
      sequences: int32 [n, T + 1], tokens, which may be marked (`data.marks`); the targets are the
        inputs shifted by one.
      batch: sequences at a time; the last batch may be shorter.
      document_end: see `Transformer`.

    Yields:
      For each batch of b sequences, the cross-entropy, float32 [b, T] in nats, and whether each
      neuron was active for each token, bool [layers, b, T, d_ff].
    """
    settings = model.config.model_copy(update=THROUGH_XLA)
    graph = graphdef(settings, model.quantised())

    @jax.jit
    def run(params, tokens):
        tokens = marks.ids(tokens)
        logits, stats = nnx.merge(graph, params)(
            tokens[:, :-1], document_end=document_end, per_token_stats=True
        )
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return ce, stats.fired

    params = nnx.state(model)
    for start in range(0, len(sequences), batch):
        yield run(params, sequences[start : start + batch])


def measure_activity(
    model: Transformer, sequences: np.ndarray, *, batch: int, document_end: int | None = None
) -> Activity:
    """Counts how often neurons are active; the arguments are those of `activity_patterns`."""
    ce: list[jax.Array] = []
    nnz: list[jax.Array] = []
    usage = np.zeros((), np.int64)
    union: dict[int, list[jax.Array]] = {
        size: [] for size in UNION_SIZES if size < sequences.shape[1]
    }
    patterns = activity_patterns(model, sequences, batch=batch, document_end=document_end)
    for batch_ce, active in patterns:
        ce.append(batch_ce)
        nnz.append(jnp.sum(active, axis=-1, dtype=jnp.int32))
        usage = usage + np.asarray(jnp.sum(active, axis=(1, 2), dtype=jnp.int32), np.int64)
        for size, shares in union.items():
            shares.append(union_share(active, size))
    return Activity(
        ce=float(np.concatenate(ce)[marks.counts(sequences[:, 1:])].mean(dtype=np.float64)),
        nnz=np.concatenate(nnz, axis=1),
        usage=usage,
        union={
            size: np.concatenate(shares, axis=1).mean(axis=1, dtype=np.float64)
            for size, shares in union.items()
        },
    )


@partial(jax.jit, static_argnames="size")
def union_share(active: jax.Array, size: int) -> jax.Array:
    """Share of the neurons that are active in a window of `size` tokens, mean over windows.

    Args:
      active: bool `[..., T, H]`.
      size: tokens in a window, 1 <= size <= T. The windows lie side by side from the first token
        on; the last T % size tokens belong to none.

    Returns:
      float32 `[...]`.
    """
    *leading, length, neurons = active.shape
    windows = length // size
    tiles = active[..., : windows * size, :].reshape(*leading, windows, size, neurons)
    return jnp.mean(jnp.any(tiles, axis=-2), axis=(-2, -1), dtype=jnp.float32)


def concentration(usage: np.ndarray) -> np.ndarray:
    """The share of all non-zero activations that the k most used neurons have, for every k.

    Args:
      usage: int `[..., H]`, how often each neuron was active.

    Returns:
      float64 `[..., H]` for k = 1 to H; zeros where no neuron was active.
    """
    cumulative = np.cumsum(-np.sort(-usage, axis=-1), axis=-1)
    return cumulative / np.maximum(cumulative[..., -1:], 1)


def summarise(activity: Activity) -> dict[str, Any]:
    """The statistics of a model, ready for JSON; each list has an entry per layer.

    Returns:
      d_ff, sequences, tokens: how many neurons, sequences and tokens were measured.
      held_out_ce: nats per token.
      nnz_mean, nnz_p50, nnz_p99, nnz_max: mean, percentiles and maximum of a token's nnz.
      sparsity: share of zeros among the activations.
      dead: number of neurons that were never active.
      nnz_by_position: a list per layer, the mean nnz at each position of a sequence.
      union: {size: share of d_ff}, see `Activity`.
      top_percent: {k: share of the non-zero activations that the k % most used neurons have}.
    """
    nnz, usage = activity.nnz, activity.usage
    _, sequences, length = nnz.shape
    d_ff = usage.shape[1]
    mean = nnz.mean(axis=(1, 2))
    p50, p99 = np.percentile(nnz, (50, 99), axis=(1, 2))
    share = concentration(usage)
    top = {percent: max(1, round(d_ff * percent / 100)) for percent in TOP_PERCENT}
    return {
        "d_ff": d_ff,
        "sequences": sequences,
        "tokens": sequences * length,
        "held_out_ce": activity.ce,
        "nnz_mean": mean.tolist(),
        "nnz_p50": p50.tolist(),
        "nnz_p99": p99.tolist(),
        "nnz_max": nnz.max(axis=(1, 2)).tolist(),
        "sparsity": (1 - mean / d_ff).tolist(),
        "dead": np.sum(usage == 0, axis=1).tolist(),
        "nnz_by_position": nnz.mean(axis=1).tolist(),
        "union": {str(size): shares.tolist() for size, shares in activity.union.items()},
        "top_percent": {str(percent): share[:, k - 1].tolist() for percent, k in top.items()},
    }
