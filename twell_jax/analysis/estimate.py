"""Estimates, without a GPU, how much faster kernels make a model, by which neurons it uses.

What a gated block takes by kernels on an H100 or H200, over what it takes by dense XLA, is a sum:

    forward   of 16,384 tokens: the gates, a third of a dense block's operations, are those of all
              neurons; the rest is of those that 256 tokens use (U), in started chunks of 128.
    both      forward and backward with sparse gradients, neurons in the order of their use. Those
              of weights wait for the longest list of tokens, and for the sum of all lists.
    decode    one token: the gates of all neurons, and the weights of those that are active.

What does not depend on neurons weighs more in small blocks ("small"). Models gain on the part of
their work that blocks are: scoring and training steps by operations, of which those outside of
blocks take `OUTSIDE` times as long; decoding by bytes of weights.

`python -m benchmarks.estimate` fits the coefficients to records, and prints their errors on others:
at most 14 % forward (median 6 %), 14 % in both passes (4 %; the same patterns on another card), 8 %
for one token, and 4 % for twelve runs of whole models. A test compares them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from twell_jax.analysis.activity import Activity
from twell_jax.config import ModelConfig
from twell_jax.ffn.activations import rectifier
from twell_jax.ffn.algorithms import CAPACITY, MARGIN, Case, Request
from twell_jax.ffn.dispatch import select
from twell_jax.ffn.stats import UNION_NEURONS, UNION_TOKENS

TOKENS = 16384  # in a call of the records, but for decoding
GROUP = 64  # neurons that share a list

# Fitted to the records study-nvidia-h200-20261124 (OUTSIDE, too) and
# ffn-goals-nvidia-h100-80gb-hbm3-20261127; to the former and gradients-nvidia-h200-20261129; to
# ffn-few-nvidia-h100-80gb-hbm3-20261126 and ffn-borders-{896,4096}-nvidia-h100-80gb-hbm3-20261127.
FORWARD = {"always": 0.326, "small": 0.0526, "union": 0.643}
BOTH = {"always": 0.103, "small": 0.106, "longest": 0.238, "union": 0.477, "listed": 0.371}
DECODE = {"always": 0.364, "small": 0.587, "active": 5.13}
OUTSIDE = 1.49

# At most, on other records. Of whole models, one that decodes in one launch is furthest off: it
# gains more than its blocks do alone.
ERRORS = {"forward": 0.15, "both": 0.17, "decode": 0.08, "model": 0.14}

PASSES = {"forward": "forward", "both": "forward and backward", "decode": "one token"}  # in words
MODEL = {"scoring": "forward", "training step": "both", "decoding one sequence": "decode"}
# The least and the largest D, and H, that records have; no others are estimated.
SHAPES = {
    **{"forward": ((896, 4096), (2816, 14336)), "both": ((1024, 2048), (2816, 5632))},
    **{"decode": ((896, 4096), (4864, 14336)), "scoring": ((1024, 2048), (2816, 5632))},
    "training step": ((2048, 2048), (2816, 5632)),
    "decoding one sequence": ((2048, 2048), (4864, 14336)),
}
MOST_ACTIVE = 0.05  # of the neurons for a token, in the records of decoding


@dataclass(frozen=True)
class Use:
    """Which neurons each layer uses; all float64 [layers], shares but for `nnz`.

    Attributes:
      nnz: mean number of active neurons for a token.
      union: the share of the neurons that 256 neighbouring tokens use.
      listed: the share of the groups of 64 neurons, in the order of their use, that a token uses.
      longest: the share of the tokens that use the group which most tokens use.
    """

    nnz: np.ndarray
    union: np.ndarray
    listed: np.ndarray
    longest: np.ndarray


@dataclass(frozen=True)
class Estimate:
    """How many times as fast as dense XLA, on an H100 or H200 in bfloat16; ready for JSON.

    Attributes:
      layers: for "forward", "both" and "decode" those of each layer; None where no record tells.
      model: for those of `MODEL` that records tell of.
      why_not: for the others, why.
    """

    layers: Mapping[str, Sequence[float | None]]
    model: Mapping[str, float]
    why_not: Mapping[str, str]

    def __str__(self) -> str:
        """One sentence for the model."""
        found = [f"{work} about {gain:.2f}x" for work, gain in self.model.items()]
        parts = [f"{', '.join(found)} (+- {100 * ERRORS['model']:.0f} %)"] if found else []
        for why in dict.fromkeys(self.why_not.values()):
            works = [work for work in MODEL if self.why_not.get(work) == why]
            parts.append(f"no estimate of {', '.join(works)}: {why}")
        return f"On an H100 or H200, in bfloat16, over dense XLA: {'; '.join(parts)}."


def use_of(frequencies: np.ndarray, union: np.ndarray) -> Use:
    """What layers use, of the share of tokens for which neurons are active, `[layers, H]`."""
    ranked = -np.sort(-frequencies, axis=1)
    ranked = np.pad(ranked, ((0, 0), (0, -ranked.shape[1] % GROUP)))
    # As if neurons were independent of each other.
    groups = 1 - np.prod(1 - ranked.reshape(len(ranked), -1, GROUP), axis=2)
    return Use(frequencies.sum(axis=1), union, groups.mean(axis=1), groups.max(axis=1))


def features(d_model: int, d_ff: int, use: Use) -> dict[str, np.ndarray]:
    """What coefficients multiply, float64 `[layers]` each, by their names."""
    small = 1024 * 2816 / (d_model * d_ff)
    started = np.where(use.union > 0, UNION_NEURONS / 2 / d_ff, 0)  # of the last chunk
    return {
        "always": np.ones_like(use.nnz),
        "small": np.full_like(use.nnz, small),
        "longest": small * use.longest,
        "union": np.minimum(use.union + started, 1),
        "listed": use.listed,
        "active": use.nnz / d_ff,
    }


def relative_time(coefficients: Mapping[str, float], found: Mapping[str, np.ndarray]) -> np.ndarray:
    """What blocks take over dense XLA, float64 `[layers]`, of their `features`."""
    return np.sum([factor * found[name] for name, factor in coefficients.items()], axis=0)


def outside(config: ModelConfig, *, of_bytes: bool = False) -> float:
    """The work of a model outside of its gated blocks over that inside, in operations or bytes.

    Sequences are as long as the context.
    """
    width, kv = (n * config.head_dim for n in (config.heads, config.num_kv_heads))
    of_layer: float = config.d_model * (2 * width + 2 * kv)
    of_layer += 0 if of_bytes else 2 * config.attended * width
    blocks = config.layers * 3 * config.d_model * config.d_ff
    return (config.layers * of_layer + config.vocab_size * config.d_model) / blocks


def model_time(of_blocks: np.ndarray, outside: float) -> float:
    """What a model takes over the dense one, of blocks and of what is outside of dense blocks."""
    return float((outside + np.mean(of_blocks)) / (outside + 1))


def estimate(config: ModelConfig, activity: Activity) -> Estimate:
    """Estimates the gain of a model's layers and of the model from what its neurons do.

    That of the model is for sequences as long as those that it read.
    """
    length = activity.nnz.shape[2]
    if nothing := without_activity(config, length):
        return nothing
    use = use_of(activity.usage / activity.nnz[0].size, activity.union[UNION_TOKENS])
    found = features(config.d_model, config.d_ff, use)
    times = {
        "forward": np.minimum(relative_time(FORWARD, found), 1),
        "both": planned(found),
        "decode": np.where(found["active"] > MOST_ACTIVE, np.nan, relative_time(DECODE, found)),
    }
    layers = {
        name: [None if _unknown(name, config) or np.isnan(time) else float(1 / time) for time in of]
        for name, of in times.items()
    }
    model, why_not = {}, {}
    as_read = config.model_copy(update={"context": length})
    operations, weights = OUTSIDE * outside(as_read), outside(config, of_bytes=True)
    for work, passes in MODEL.items():
        if problem := _unknown(work, config):
            why_not[work] = problem
        elif None in layers[passes]:
            why_not[work] = f"in a layer a token has over {MOST_ACTIVE:.0%} of the neurons active"
        else:
            others = weights if passes == "decode" else operations
            model[work] = 1 / model_time(times[passes], others)
    return Estimate(layers, model, why_not)


def without_activity(config: ModelConfig, length: int) -> Estimate | None:
    """An estimate of nothing, with the reasons, where no record tells of such a model.

    `length` is that of the sequences that it reads. None: what its neurons do decides.
    """
    why = _not_served(config, length)
    passes = MODEL.values()
    if why is None and not all(_unknown(name, config) for name in (*passes, *MODEL)):
        return None
    reasons = {work: why or _unknown(work, config) or "" for work in MODEL}
    return Estimate({name: [None] * config.layers for name in passes}, {}, reasons)


def _unknown(work: str, config: ModelConfig) -> str | None:
    """Why records do not tell of a model of these widths; None if they do."""
    widths = {"d_model": config.d_model, "d_ff": config.d_ff}
    for (name, width), (least, most) in zip(widths.items(), SHAPES[work], strict=True):
        if not least <= width <= most:
            known = f"{least} to {most}" if least < most else str(least)
            return f"{name} is {width}, in the records {known}"
    return None


def planned(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """What both passes take over dense XLA, where gradients are sparse as `GradientPlan` has it."""
    need = np.maximum(found["union"], found["listed"])
    return np.where(MARGIN * need <= CAPACITY, np.minimum(relative_time(BOTH, found), 1), 1)


def _not_served(config: ModelConfig, length: int) -> str | None:
    """Why nothing is estimated for a model; None if something is."""
    if rectifier(config.ffn_activation) is None:
        why = "is zero for no neuron, so kernels gain nothing; train the model with relu first"
        return f"{config.activation} {why}"
    if length < UNION_TOKENS:
        return f"sequences have {length} tokens, U is of {UNION_TOKENS} in a row"
    if config.d_model % 64:
        return f"kernels need a d_model that is a multiple of 64, got {config.d_model}"
    shape = TOKENS, config.d_model, config.d_ff, config.gated, config.ffn_activation
    case = Case(*shape, biases=config.mlp_bias, back_end="Hopper")
    passed_over = {rule.algorithm: why for rule, why in select(case, Request()).passed_over}
    refused = passed_over.get("unions")
    return refused and f"unions do not serve its blocks ({refused})"
