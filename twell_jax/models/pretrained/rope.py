"""Reads what config.json says of rotary positions, and writes it."""

import math
from pathlib import Path
from typing import Any

from twell_jax.config import RopeScaling
from twell_jax.models.pretrained.architectures import words
from twell_jax.models.pretrained.json_file import PretrainedError, first, positive, unsupported
from twell_jax.models.pretrained.keys import require_known

_THETA = 1e4
_DEFAULT = "default"
# The keys that each type needs, and those that yarn may have; ours are called the same.
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OF_YARN = ("beta_fast", "beta_slow", "truncate")
_TYPES = (_DEFAULT, *_NEEDED)
# A type has no use for the keys of the others. "finetuned" stands beside early yarns.
_KEYS = words(
    """
    type rope_type rope_theta partial_rotary_factor original_max_position_embeddings finetuned
    attention_factor mscale mscale_all_dim
    """
).union(_OF_YARN, *_NEEDED.values())


def read(
    path: Path, given: dict[str, Any], partial_rotary: bool
) -> tuple[float, RopeScaling | None, float]:
    """The base of the frequencies, how they are scaled if they are, and the share of a head.

    transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`,
    and the earliest called the latter's `rope_type` just `type`. The theta of an object comes
    first. Of two objects, that of `rope_scaling` says how.

    Args:
      path: of config.json, for messages.
      given: its content and the defaults of the model.
      partial_rotary: whether the model may rotate less than whole heads.

    Raises:
      PretrainedError: an object is none, lacks a key or asks for something else.
    """
    objects = {}
    for name in ("rope_scaling", "rope_parameters"):
        objects[name] = first(given.get(name), {})
        if not isinstance(objects[name], dict):
            raise PretrainedError(
                f"{path}: {name} must be an object or null, got {objects[name]!r}"
            )
    theta = first(*(rope.get("rope_theta") for rope in objects.values()), given.get("rope_theta"))
    name = "rope_scaling" if objects["rope_scaling"] else "rope_parameters"
    rope = objects[name]
    share = first(rope.get("partial_rotary_factor"), given.get("partial_rotary_factor"), 1.0)
    if share != 1 and not partial_rotary:
        raise unsupported(path, "partial_rotary_factor", share, [1.0])
    return first(theta, _THETA), _scaling(path, name, rope, given), share


def _scaling(
    path: Path, name: str, rope: dict[str, Any], given: dict[str, Any]
) -> RopeScaling | None:
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise PretrainedError(
            f"{path}: {name}.{nested[0]}: layers with different rotary positions are not supported"
        )
    key = "rope_type" if "rope_type" in rope else "type"
    kind = rope.get(key, _DEFAULT)
    if kind not in _TYPES:
        raise unsupported(path, f"{name}.{key}", kind, _TYPES)
    require_known(path, f"{name}.", rope, _KEYS)
    if kind == _DEFAULT:
        return None
    context = positive(path, "max_position_embeddings", given["max_position_embeddings"])
    original = first(
        given.get("original_max_position_embeddings"),
        rope.get("original_max_position_embeddings"),
        context,
    )
    positive(path, "original_max_position_embeddings", original)
    # A factor that yarn lacks is the growth of the context.
    defaults = {"factor": context / original} if kind == "yarn" else {}
    values: dict[str, Any] = {} if kind == "linear" else {"original_context": original}
    for key in _NEEDED[kind]:
        value = first(rope.get(key), defaults.get(key))
        if value is None:
            raise PretrainedError(f"{path}: {name} has no {key}, which {kind} needs")
        values[key] = positive(path, f"{name}.{key}", value)
    if kind == "yarn":
        optional = {key: rope.get(key) for key in _OF_YARN}
        values |= {key: value for key, value in optional.items() if value is not None}
        values["attention_factor"] = _attention_factor(path, name, rope, values["factor"])
    return RopeScaling(type=kind, **values)


def _attention_factor(path: Path, name: str, rope: dict[str, Any], factor: float) -> float | None:
    """What yarn multiplies cosine and sine by; None if it follows from the factor."""
    keys = ("mscale", "mscale_all_dim")
    if rope.get("attention_factor") is not None or not all(rope.get(key) for key in keys):
        return rope.get("attention_factor")
    scales = (positive(path, f"{name}.{key}", rope[key]) for key in keys)
    above, below = (0.1 * scale * math.log(max(factor, 1)) + 1 for scale in scales)
    return above / below


def to_dict(scaling: RopeScaling) -> dict[str, Any]:
    """The object `rope_scaling` of config.json."""
    tree: dict[str, Any] = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type == "linear":
        return tree
    tree["original_max_position_embeddings"] = scaling.original_context
    if scaling.type == "yarn":
        return tree | {key: getattr(scaling, key) for key in (*_OF_YARN, "attention_factor")}
    return tree | {key: getattr(scaling, key) for key in _NEEDED[scaling.type]}
