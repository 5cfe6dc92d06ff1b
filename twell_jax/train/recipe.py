"""The settings of `configs/sparsify.yaml` that follow from the model, for `twell_jax.sparsify`.

They are overrides, which those of the user follow: who gives one has it.
"""

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from twell_jax.config import Config, ModelConfig
from twell_jax.ffn.stats import UNION_NEURONS
from twell_jax.train.init_from import is_run, settings_of
from twell_jax.train.run_directory import load_config

log = logging.getLogger(__name__)

_STEPS = 2000
_CONTEXT = 2048  # at most: longer sequences take memory, and neurons become sparse without
_SEQUENCES, _MICRO_BATCH = 64, 8
_ROUNDED = 32  # tokens; a micro-batch then has whole tiles of 256, on which U is measured
_UNION = 0.07  # docs/study.md
_NARROW = 0.7  # U of a chunk and a half, from which on a target of U says little


def overrides(name: str, given: Mapping[str, Any]) -> list[str]:
    """What the configuration is changed by for a model.

    Args:
      name: of the model, as for `init_from`.
      given: what the user has set, by whole keys; it decides what else follows.

    Raises:
      ConfigError: there is no such model.
    """
    model, steps = settings_of(name), _whole(given, "steps", _STEPS)
    source = load_config(name) if is_run(name) else None
    found = _of_length(steps, given) | _of_batches(model, source, steps, given)
    if "sparsity_target" in given:
        found["union_target"] = None
    elif "union_target" not in given:
        found |= _target(model.d_ff)
    # Rectifiers stay: the weights were trained for them.
    found["model.activation"] = "relu" if model.activation == "silu" else model.activation
    if source:
        found["optimizer.lr"] = float(f"{source.optimizer.lr / 3:.2g}")
        if "data.source" not in given:  # else the run's other keys belong to another text
            data = source.data.model_dump(mode="json", exclude={"tokenizer"})
            found |= {f"data.{key}": value for key, value in data.items()}
    if {**found, **given}.get("data.mask_documents"):
        log.info("lasso_share: 0, as kernels compute no lasso where documents are masked")
        found["lasso_share"] = 0
    return [f"{key}={_written(value)}" for key, value in found.items()]


def _of_length(steps: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """What takes its share of the steps. The model first learns to do with another activation."""
    tenth = steps // 10
    return {
        "steps": steps,
        "l1_warmup": [0, tenth],
        "l1_stages": min(4, _rise(given, tenth)),
        "optimizer.warmup_steps": steps // 20,
        "eval_every": max(10, tenth),
        "checkpoint_every": max(10, steps // 4),
    }


def _rise(given: Mapping[str, Any], default: int) -> int:
    """The steps in which the L1 term rises; the default where a check will name what is given."""
    match given.get("l1_warmup", [0, default]):
        case None:
            return 0
        case [int(start), int(end)]:
            return max(0, end - start)
    return default


def _of_batches(
    model: ModelConfig, source: Config | None, steps: int, given: Mapping[str, Any]
) -> dict[str, Any]:
    context = min(model.context, _CONTEXT)
    context -= context % _ROUNDED if context > _ROUNDED else 0
    if context < model.context and "model.context" not in given:
        log.info(
            "model.context: %d of the %d tokens that the model reads; model.context=N takes others",
            *(context, model.context),
        )
    sequences = source.batch_sequences if source else _SEQUENCES
    tokens = sequences * _whole(given, "model.context", context)
    return {
        "model.context": context,
        "batch_tokens": tokens,
        "micro_batch": source.micro_batch if source else _MICRO_BATCH,
        "dead_window_tokens": max(1, steps * _whole(given, "batch_tokens", tokens) // 10),
    }


def _target(d_ff: int) -> dict[str, Any]:
    """That of the study, or what is next to it where few chunks of neurons make a block."""
    # As `config.doubts` has it: a layer has a chunk as soon as one neuron is active.
    least = math.ceil(1500 / -(-d_ff // UNION_NEURONS)) / 1000
    if least <= _UNION:
        return {"union_target": _UNION}
    if least < _NARROW:
        log.info(
            "union_target: %g, not the study's %g: U is counted in chunks of %d neurons, of %d",
            *(least, _UNION, UNION_NEURONS, d_ff),
        )
        return {"union_target": least}
    nnz = max(d_ff / 20, 0.01)
    log.info(
        "sparsity_target: %g in place of a target of U, which is counted in chunks of %d neurons, "
        "of %d",
        *(nnz, UNION_NEURONS, d_ff),
    )
    return {"union_target": None, "sparsity_target": nnz}


def _whole(given: Mapping[str, Any], key: str, default: int) -> int:
    """What is given, if it is a number; a check of the configuration will name what else it is."""
    value = given.get(key)
    return value if type(value) is int and value > 0 else default


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
