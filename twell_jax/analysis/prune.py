"""Removes dead neurons from a trained model, for inference."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from twell_jax.analysis.activity import firing_patterns
from twell_jax.config import ModelConfig
from twell_jax.models import Transformer


@dataclass(frozen=True)
class PruneReport:
    """What `prune_dead` kept.

    Attributes:
      live: int [layers], number of neurons that had fired. All of them remain.
      neurons: int [layers, width], the former index of each remaining neuron, from the most used to
        the least. A layer with fewer live neurons than the width ends in dead ones.
    """

    live: np.ndarray
    neurons: np.ndarray


def prune_dead(
    params: nnx.State, config: ModelConfig, usage: np.ndarray, *, multiple: int = 128
) -> tuple[nnx.State, ModelConfig, PruneReport]:
    """Removes neurons that never fired and sorts the others by usage.

    All layers keep the same number of neurons, the width. It is the number of live neurons of the
    layer that has the most, rounded up.

    The output for a token stays the same, up to rounding in the dtype of the computation, if
    neither this token nor one before it in its sequence fires a removed neuron:

    - Masking the removed neurons (setting their weights to zero) would change no bit.
    - Sorting changes the order in which the down projection sums over neurons, so the last bits.
    - Cutting masked neurons off the end changes no bit where matmuls sum in order, as XLA's do on
      CPUs at widths that are multiples of 128.

    Args:
      params: the parameters of a `Transformer`.
      config: its configuration.
      usage: `[layers, d_ff]`, how often each neuron fired (`Activity.usage`), or whether it did.
      multiple: the width is rounded up to a multiple of it, but not beyond d_ff.

    Returns:
      The new parameters, their configuration (whose d_ff is the width), and a report.

    Raises:
      ValueError: usage does not have the shape of the model, or multiple < 1.
    """
    shape = (config.layers, config.d_ff)
    if usage.shape != shape:
        raise ValueError(f"usage must be [layers, d_ff] = {list(shape)}, got {list(usage.shape)}")
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    live = np.count_nonzero(usage, axis=1)
    width = min(max(1, -(-live.max() // multiple)) * multiple, config.d_ff)
    neurons = np.argsort(-usage.astype(np.int64), axis=1, kind="stable")[:, :width]

    def keep(path, weights):  # [layers, d_ff, d_model], or biases [layers, d_ff]
        if path[0].key == "b_down":
            return weights
        which = neurons if weights.ndim == 2 else neurons[:, :, None]
        return jnp.take_along_axis(weights, which, axis=1)

    mlp = jax.tree_util.tree_map_with_path(keep, params["blocks"]["mlp"])
    params = nnx.merge_state(params, nnx.State({"blocks": {"mlp": mlp}}))
    return params, config.model_copy(update={"d_ff": int(width)}), PruneReport(live, neurons)


def fires_removed(
    model: Transformer,
    report: PruneReport,
    sequences: np.ndarray,
    *,
    batch: int,
    document_end: int | None = None,
) -> np.ndarray:
    """Finds the tokens that fire a neuron that `prune_dead` removed; there the output changes.

    Args:
      model: the model before pruning.
      report: the report of `prune_dead`.
      sequences: int [n, T + 1], not those on which `usage` was counted.
      batch, document_end: see `firing_patterns`.

    Returns:
      bool [layers, n, T], whether the token fires a removed neuron of the layer.

    Raises:
      ValueError: there are no sequences.
    """
    removed = np.ones((model.config.layers, model.config.d_ff), bool)
    np.put_along_axis(removed, report.neurons, False, axis=1)
    if not len(sequences):
        raise ValueError("sequences: there are none")
    patterns = firing_patterns(model, sequences, batch=batch, document_end=document_end)
    return np.concatenate(
        [jnp.any(fired & removed[:, None, None], axis=-1) for _, fired in patterns], axis=1
    )
