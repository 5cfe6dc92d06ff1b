"""Removes dead neurons from a trained model, for inference."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from twell_jax.analysis.activity import activity_patterns
from twell_jax.config import ModelConfig
from twell_jax.ffn import BY_NEURON, LiveWidth, SparseMLP
from twell_jax.ffn.numeric import is_integer
from twell_jax.ffn.quantised import EightBits
from twell_jax.models import Transformer


@dataclass(frozen=True)
class PruneReport:
    """What `prune_dead` kept.

    Attributes:
      live: int [layers], number of neurons that were active. All of them remain.
      kept: int [layers], number of neurons that can still be active: `live` rounded up, as
        kernels compute whole tiles of neurons anyway.
      neurons: int [layers, width], the former index of each remaining neuron, from the most used to
        the least. Those from `kept` on are never active.
    """

    live: np.ndarray
    kept: np.ndarray
    neurons: np.ndarray

    @property
    def leaves_out(self) -> bool:
        """Whether a layer has neurons among `neurons` that are never active."""
        return bool((self.kept < self.neurons.shape[1]).any())


def prune_dead(
    params: nnx.State, config: ModelConfig, usage: np.ndarray, *, multiple: int = 128
) -> tuple[nnx.State, ModelConfig, PruneReport]:
    """Removes neurons that were never active and sorts the others by usage.

    All layers keep the same number of neurons, the width, as they are stacked. It is the number of
    live neurons of the layer that has the most, rounded up. Beside the weights, each layer has its
    own number of neurons that can be active, rounded up likewise, and kernels leave out the others.
    If the width has no others, there are no numbers, and nothing that they cost.

    The output for a token stays the same, up to rounding in the dtype of the computation, if
    no removed neuron is active for this token or one before it in its sequence:

    - Masking the removed neurons (setting their weights to zero) would change no bit.
    - Sorting changes the order in which the down projection sums over neurons, so the last bits.
    - Cutting masked neurons off the end changes no bit where matmuls sum in order, as XLA's do on
      CPUs at widths that are multiples of 128.

    Args:
      params: the parameters of a `Transformer`.
      config: its configuration.
      usage: `[layers, d_ff]`, how often each neuron was active (`Activity.usage`), or if it was.
      multiple: widths are rounded up to a multiple of it, but not beyond d_ff.

    Returns:
      The new parameters, their configuration (d_ff is the width, and live_width whether there are
        numbers), and a report.

    Raises:
      ValueError: weights are quantised, usage does not have the shape of the model, or
        multiple is no integer or < 1.
    """
    _require_floats(params["blocks"]["mlp"])
    shape = (config.layers, config.d_ff)
    if usage.shape != shape:
        raise ValueError(f"usage must be [layers, d_ff] = {list(shape)}, got {list(usage.shape)}")
    before = params["blocks"]["mlp"]
    report = _most_used(usage, multiple, before["live"][...] if "live" in before else config.d_ff)
    neurons = report.neurons

    def keep(path, weights):  # [layers, d_ff, d_model], or biases [layers, d_ff]
        if path[0].key not in BY_NEURON:
            return weights
        which = neurons if weights.ndim == 2 else neurons[:, :, None]
        return jnp.take_along_axis(weights, which, axis=1)

    mlp = jax.tree_util.tree_map_with_path(keep, nnx.filter_state(before, nnx.Param))
    if report.leaves_out:
        mlp["live"] = LiveWidth(jnp.asarray(report.kept, jnp.int32))
    others = nnx.filter_state(params, nnx.Not(LiveWidth))
    params = nnx.merge_state(others, nnx.State({"blocks": {"mlp": mlp}}))
    changes = {"d_ff": neurons.shape[1], "live_width": report.leaves_out}
    return params, config.model_copy(update=changes), report


def prune_mlp(mlp: SparseMLP, usage: np.ndarray, *, multiple: int = 128) -> np.ndarray:
    """Removes the dead neurons of one module, in place, and sorts the others by usage.

    For models that hold their layers apart: each gets its own width, so that it takes less memory.
    Optimizers must be made after this.

    Args:
      mlp: the module; its weights are not stacked over layers.
      usage: `[d_ff]`, how often each neuron was active, or whether it was.
      multiple: the width is the number of neurons that were active, rounded up to a multiple of
        it, but not beyond d_ff.

    Returns:
      int [width], the former index of each remaining neuron.

    Raises:
      ValueError: weights are quantised or stacked, usage does not have the module's shape, or
        multiple is no integer or < 1.
    """
    _require_floats(nnx.state(mlp))
    if mlp.w_up.ndim != 2:
        raise ValueError(
            f"the weights of mlp are stacked, {list(mlp.w_up.shape)}, and need one width; prune a "
            "Transformer by prune_dead, other models before they are stacked"
        )
    if usage.shape != mlp.w_up.shape[:1]:
        raise ValueError(f"usage must be [{mlp.w_up.shape[0]}], got {list(usage.shape)}")
    before = len(usage) if mlp.live is None else mlp.live[...]
    report = _most_used(usage[None], multiple, before)
    (neurons,) = report.neurons
    for name in BY_NEURON:
        if (param := getattr(mlp, name)) is not None:
            param.set_value(param[...][neurons])
    mlp.live = LiveWidth(jnp.int32(report.kept[0])) if report.leaves_out else nnx.data(None)
    return neurons


def _require_floats(block: nnx.State) -> None:
    """Raises ValueError if weights of a feed-forward block are quantised."""
    if names := [*nnx.filter_state(block, EightBits)]:
        raise ValueError(
            f"the {' and '.join(names)} of a feed-forward block are quantised; prune the model "
            "first, then call quantise_mlps"
        )


def _most_used(usage: np.ndarray, multiple: int, before: Any) -> PruneReport:
    """What to keep of layers whose neurons were active so often, `usage: [layers, d_ff]`.

    `before` is how many could be active, `[layers]` or one number: no others come to life.

    Raises:
      ValueError: multiple < 1.
    """
    if not is_integer(multiple) or multiple < 1:
        raise ValueError(f"multiple must be an integer of at least 1, got {multiple!r}")
    live = np.count_nonzero(usage, axis=1)
    d_ff = usage.shape[1]
    rounded = np.minimum(-(-live // multiple) * multiple, d_ff)
    kept = np.minimum(rounded, np.asarray(before))
    width = max(rounded.max(), min(multiple, d_ff))
    neurons = np.argsort(-usage.astype(np.float64), axis=1, kind="stable")[:, :width]
    return PruneReport(live, kept, neurons)


def fires_removed(
    model: Transformer,
    report: PruneReport,
    sequences: np.ndarray,
    *,
    batch: int,
    document_end: int | None = None,
) -> np.ndarray:
    """Finds tokens with an active neuron that `prune_dead` removed; there the output changes.

    Args:
      model: the model before pruning.
      report: the report of `prune_dead`.
      sequences: int [n, T + 1], not those on which `usage` was counted.
      batch, document_end: see `activity_patterns`.

    Returns:
      bool [layers, n, T], whether a removed neuron of the layer is active for the token.

    Raises:
      ValueError: there are no sequences.
    """
    removed = np.ones((model.config.layers, model.config.d_ff), bool)
    is_dead = np.arange(report.neurons.shape[1]) >= report.kept[:, None]
    np.put_along_axis(removed, report.neurons, is_dead, axis=1)
    if not len(sequences):
        raise ValueError("sequences: there are none")
    patterns = activity_patterns(model, sequences, batch=batch, document_end=document_end)
    return np.concatenate(
        [jnp.any(active & removed[:, None, None], axis=-1) for _, active in patterns], axis=1
    )
