"""How likely a model finds texts: the log-probabilities of their tokens."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from twell_jax.inference.generation import padded_length
from twell_jax.models import QUANTISED_OPTIONS, Transformer


def log_likelihoods(
    model: Transformer, rows: Sequence[tuple[Sequence[int], int]], *, batch: int
) -> list[tuple[float, bool]]:
    """Scores the last tokens of rows of tokens, each after all before it in its row.

    Args:
      model: the language model.
      rows: for each, its token ids, at most `context + 1`, and how many of the last of them are
        scored, fewer than all. The last token is only predicted, never read.
      batch: rows at a time.

    Returns:
      For each row, the sum of the scored tokens' log-probabilities, in nats, and whether each of
      them is the most likely.
    """
    graph, params = nnx.split(model)
    score = _SCORE[bool(model.quantised())]
    results: dict[int, tuple[float, bool]] = {}
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        width = padded_length(max(len(rows[chosen[0]][0]) - 1, 1))  # a row may score no token
        tokens = np.zeros((batch, width + 1), np.int32)
        scored = np.zeros((batch, width), bool)
        for row, i in enumerate(chosen):
            ids, count = rows[i]
            tokens[row, : len(ids)] = ids
            scored[row, len(ids) - 1 - count : len(ids) - 1] = True
        sums, greedy = jax.device_get(score(graph, params, tokens, scored))
        for row, i in enumerate(chosen):
            results[i] = float(sums[row]), bool(greedy[row])
    return [results[i] for i in range(len(rows))]


def _score(graph, params, tokens, scored):
    """Scores the targets of each row that `scored: bool [B, T]` marks.

    Returns, `[B]` each, the sum of their log-probabilities and whether all are the most likely.
    """
    logits, _ = nnx.merge(graph, params)(tokens[:, :-1])
    targets = tokens[:, 1:]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    greedy = jnp.argmax(logits, axis=-1) == targets
    return -jnp.sum(loss, axis=-1, where=scored), jnp.all(greedy, axis=-1, where=scored)


_SCORE = {  # by whether weights are 8-bit floats
    in_8_bits: jax.jit(_score, static_argnames="graph", compiler_options=options)
    for in_8_bits, options in ((False, None), (True, QUANTISED_OPTIONS))
}
