"""8-bit weights in Hugging Face's format, by the convention of compressed-tensors.

config.json has a `quantization_config`. A matrix `NAME.weight` is float8_e4m3fn `[out, in]`, and
`NAME.weight_scale` `[out, 1]` is what its rows are multiplied with. This is the format
"float-quantized" with the strategy "channel" for weights and, for what they are multiplied with,
"token" and dynamic; its preset FP8_DYNAMIC (github.com/vllm-project/compressed-tensors).
"""

import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic_core import SchemaError, SchemaValidator, core_schema

from pallas_kernels.quantised import quantise
from twell_jax import untrusted
from twell_jax.models.pretrained import companions, files
from twell_jax.models.pretrained.json_file import PretrainedError, first, read_json, unsupported
from twell_jax.models.quantised import PARTS, Part

KEY = "quantization_config"

# The name of each part: in its layer, or in the model.
_HEAD = "lm_head"
_NAMES: dict[Part, str] = {
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "head": _HEAD,
}

# The values that are supported; the first of each is written.
_TOP: dict[str, tuple[Any, ...]] = {
    "format": ("float-quantized",),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
_EIGHT_BITS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (None,),
}
_PARTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "weights": _EIGHT_BITS | {"strategy": ("channel",), "dynamic": (False,)},
    "input_activations": _EIGHT_BITS | {"strategy": ("token",), "dynamic": (True,)},
}
# What a key that is absent means; for all others that is None.
_DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
_PATTERN = "re:"  # before a regular expression that stands for names
_MOST_PATTERNS, _MOST_CHARACTERS = 100, 1000


def to_dict(parts: Sequence[Part]) -> dict[str, Any]:
    """The `quantization_config` of a model with these parts in 8 bits."""
    others = [_NAMES[part].split(".") for part in PARTS if part not in parts]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                **{part: {k: v[0] for k, v in keys.items()} for part, keys in _PARTS.items()},
                "output_activations": None,
            }
        },
        "ignore": [rf"re:.*\.{name[-1]}$" if name[1:] else name[0] for name in others],
    }


def read(path: Path, tree: Mapping[str, Any], layers: int, is_tied: bool) -> tuple[Part, ...]:
    """The parts that are in 8 bits, by the tree of a config.json.

    Args:
      path: of that file, for messages.
      tree: its contents.
      layers: number of layers; each takes time.
      is_tied: whether the embedding is the head.

    Raises:
      PretrainedError: it asks for what is not supported; the message names the key.
    """
    config = tree.get(KEY)
    if config is None:
        return ()
    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise unsupported(path, f"{KEY}.quant_method", method, ["compressed-tensors"])
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        got = untrusted.short(groups)
        raise PretrainedError(f"{path}: {KEY}.config_groups must be one group, got {got}")
    (group,) = groups.values()
    _check(path, KEY, config, _TOP)
    _check(path, f"{KEY}.config_groups", group, {"output_activations": (None,)})
    for part, keys in _PARTS.items():
        _check(path, f"{KEY}.{part}", group.get(part), keys)
    is_target = _matcher(path, f"{KEY}.targets", group.get("targets"))
    is_ignored = _matcher(path, f"{KEY}.ignore", config.get("ignore"))

    def is_in_8_bits(name: str) -> bool:
        return is_target(name) and not is_ignored(name)

    in_layers = {part: name for part, name in _NAMES.items() if name != _HEAD}
    found = {
        tuple(part for part, name in in_layers.items() if is_in_8_bits(f"model.layers.{i}.{name}"))
        for i in range(layers)
    }
    if len(found) > 1:
        raise PretrainedError(f"{path}: {KEY} must say the same of all layers")
    (names,) = found
    if not is_in_8_bits(_HEAD):
        return names
    if is_tied:
        raise PretrainedError(
            f"{path}: {KEY} has {_HEAD} in 8 bits, but tie_word_embeddings=true makes it the "
            f"embedding, which is not; add {_HEAD} to ignore, or write tie_word_embeddings=false"
        )
    return (*names, "head")


def quantise_files(source: Path, directory: Path, parts: Sequence[Part], is_tied: bool) -> None:
    """Writes a model's files anew, with parts of it in 8 bits.

    All other tensors and files are copied as they are. Shards are read one after the other. If the
    head is among the parts and is the embedding, it becomes a matrix of its own.

    Args:
      source: holds config.json, which `config.read` takes, and safetensors.
      directory: empty, or to be created.
      parts: which are to be in 8 bits; a model without gates has none.
      is_tied: whether the embedding is the head.

    Raises:
      PretrainedError: a file cannot be read, the weights are in 8 bits already or hold an inf or a
        NaN, or the directory is not empty.
    """
    tree = read_json(source / "config.json")
    if tree.get(KEY) is not None:
        raise PretrainedError(f"{source}: is quantised already, by its {KEY}")
    kept = [
        path.name
        for path in sorted(source.glob("*"))
        if path.suffix in (".json", ".model", ".txt", ".jinja") and path.name != files.INDEX
    ]
    for name in kept:
        companions.require(source, name)
    held_by = files.tensors(source)
    _require_floats(source, held_by)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise PretrainedError(f"{directory}: not empty; choose a new directory")
    copies_head = is_tied and "head" in parts
    places: dict[str, str] = {}
    total = 0
    for name, held in held_by.items():
        tensors = _quantised(source / name, held, [_NAMES[part] for part in parts], copies_head)
        (directory / name).parent.mkdir(parents=True, exist_ok=True)  # an index may name folders
        files.write(directory / name, tensors)
        places |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if set(places.values()) != {files.FILE}:
        files.write_index(directory, places, total)
    for name in kept:
        companions.copy(source, name, directory)
    gated = any(".gate_proj." in name for name in places)
    tree[KEY] = to_dict([part for part in parts if gated or part != "gate"])
    if copies_head:
        tree["tie_word_embeddings"] = False
    (directory / "config.json").write_text(json.dumps(tree, indent=2) + "\n")


def _require_floats(source: Path, held_by: Mapping[str, Iterable[str]]) -> None:
    """Refuses tensors in 8 bits or fewer, which NumPy cannot read; no `config.json` says so."""
    for file, names in held_by.items():
        with files.opened(source / file) as stored:
            for name in sorted(names):
                if (dtype := stored.get_slice(name).get_dtype()).startswith(("F8", "F6", "F4")):
                    raise PretrainedError(
                        f"{source / file}: {name} is {dtype}; models to quantise have "
                        f"{', '.join(files.FLOATS)}"
                    )


def _quantised(
    path: Path, held: Container[str], names: Sequence[str], copies_head: bool
) -> dict[str, np.ndarray]:
    """The tensors `held` of a file, with the weights of `names` in 8 bits, and their scales.

    `copies_head` makes the head of the embedding, whatever head there was.
    """
    tensors: dict[str, np.ndarray] = {}
    alternatives = "|".join(map(re.escape, names))
    weight = re.compile(rf"(?:(?:.*\.)?layers\.\d+\.)?(?:{alternatives})\.weight")
    with files.opened(path) as stored:
        for name in stored.keys():  # noqa: SIM118
            if name not in held or (copies_head and name == f"{_HEAD}.weight"):
                continue
            tensors[name] = stored.get_tensor(name)
            if copies_head and name.endswith("embed_tokens.weight"):
                tensors |= _in_8_bits(path, f"{_HEAD}.weight", tensors[name])
            elif weight.fullmatch(name):
                tensors |= _in_8_bits(path, name, tensors[name])
    return tensors


def _in_8_bits(path: Path, name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    try:
        made = jax.device_get(quantise(tensor))
    except ValueError as error:
        raise PretrainedError(f"{path}: {name}: {error}") from None
    return {name: made.values, f"{name}_scale": made.scale}


def _check(path: Path, where: str, tree: Any, keys: Mapping[str, tuple[Any, ...]]) -> None:
    if not isinstance(tree, dict):
        raise PretrainedError(f"{path}: {where} must be an object, got {untrusted.short(tree)}")
    for key, values in keys.items():
        value = tree.get(key, _DEFAULTS.get(key))
        if not any(type(value) is type(known) and value == known for known in values):
            raise unsupported(path, f"{where}.{key}", value, values)


def _matcher(path: Path, where: str, given: Any) -> Callable[[str], bool]:
    """Whether a list of names and patterns has a layer's name, as compressed-tensors decides it."""
    entries = first(given, [])
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        got = untrusted.short(given)
        raise PretrainedError(f"{path}: {where} must be a list of names, got {got}")
    names = {entry for entry in entries if not entry.startswith(_PATTERN)}
    patterns = {entry.removeprefix(_PATTERN) for entry in entries if entry.startswith(_PATTERN)}
    if len(patterns) > _MOST_PATTERNS:
        raise PretrainedError(
            f"{path}: {where} has {len(patterns)} patterns; at most {_MOST_PATTERNS} are read"
        )
    regexes = [_regex(path, where, pattern) for pattern in sorted(patterns)]
    return lambda name: (
        not names.isdisjoint((name, "Linear")) or any(matches(name) for matches in regexes)
    )


def _regex(path: Path, where: str, pattern: str) -> Callable[[str], bool]:
    """Whether a name begins with what a regular expression stands for.

    pydantic has a matcher whose time is linear in the name; Python's own may take for ever.
    """
    reason = f"it has more than {_MOST_CHARACTERS} characters"
    if len(pattern) <= _MOST_CHARACTERS:
        schema = core_schema.str_schema(pattern=rf"\A(?:{pattern})", regex_engine="rust-regex")
        try:
            return SchemaValidator(schema).isinstance_python
        except SchemaError as error:
            reason = str(error).splitlines()[-1].strip().removeprefix("error: ")
    shown = untrusted.short(f"{_PATTERN}{pattern}")
    raise PretrainedError(
        f"{path}: {where} has the pattern {shown}, which cannot be read: {reason}"
    )
