"""Reads and writes a `Transformer`'s parameters as Hugging Face's safetensors.

A `torch.nn.Linear` stores its matrix as `[out, in]`. Our attention and unembedding kernels are
`[in, out]`. Our feed-forward weights are neuron-major, `[d_ff, d_model]`, which is `[out, in]` for
gate and up and `[in, out]` for down. Both rotate pairs of features half a head apart, so heads need
no permutation. Hugging Face stores a tensor per layer; ours are stacked along the first axis.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from twell_jax.config import ModelConfig
from twell_jax.ffn.quantised import AXES
from twell_jax.models import sharding
from twell_jax.models.pretrained import files, on_devices
from twell_jax.models.pretrained.architectures import Architecture
from twell_jax.models.pretrained.config import Stored
from twell_jax.models.pretrained.files import Tensor
from twell_jax.models.pretrained.json_file import PretrainedError
from twell_jax.models.quantised import ATTENTION
from twell_jax.models.transformer import Transformer

_DERIVED = "rotary_emb.inv_freq"  # in old files; it follows from config.json
_BASE = "model."  # before all names but the head's, except in the files of a base model
_EMBED, _HEAD = f"{_BASE}embed_tokens.weight", "lm_head.weight"
_DOWN = "blocks.mlp.w_down"
_LIVE = "blocks.mlp.live"  # not in tensors, but in config.json
# Saved as zeros where a neuron is not live: of a block with and without a gate.
_SHUT = {
    gated: tuple(f"blocks.mlp.{kind}" for kind in (f"w_{name}", f"w_{name}.values", f"b_{name}"))
    for gated, name in ((True, "gate"), (False, "up"))
}
_ROWS = 4096  # that are compared at a time

# For each of our parameters, the name of their tensor, and whether it is the transpose of ours.
_NAMES = {
    "embed.embedding": (_EMBED, False),
    "norm.scale": ("model.norm.weight", False),
    "norm.bias": ("model.norm.bias", False),
    "unembed.kernel": (_HEAD, True),
    "blocks.attention_norm.scale": ("input_layernorm.weight", False),
    "blocks.attention_norm.bias": ("input_layernorm.bias", False),
    "blocks.attention.query.kernel": ("self_attn.q_proj.weight", True),
    "blocks.attention.query.bias": ("self_attn.q_proj.bias", False),
    "blocks.attention.key.kernel": ("self_attn.k_proj.weight", True),
    "blocks.attention.key.bias": ("self_attn.k_proj.bias", False),
    "blocks.attention.value.kernel": ("self_attn.v_proj.weight", True),
    "blocks.attention.value.bias": ("self_attn.v_proj.bias", False),
    "blocks.attention.out.kernel": ("self_attn.o_proj.weight", True),
    "blocks.attention.out.bias": ("self_attn.o_proj.bias", False),
    "blocks.attention.query_norm.scale": ("self_attn.q_norm.weight", False),
    "blocks.attention.key_norm.scale": ("self_attn.k_norm.weight", False),
    "blocks.mlp_norm.scale": ("post_attention_layernorm.weight", False),
    "blocks.mlp_norm.bias": ("post_attention_layernorm.bias", False),
    "blocks.mlp.w_gate": ("mlp.gate_proj.weight", False),
    "blocks.mlp.b_gate": ("mlp.gate_proj.bias", False),
    "blocks.mlp.w_up": ("mlp.up_proj.weight", False),
    "blocks.mlp.b_up": ("mlp.up_proj.bias", False),
    "blocks.mlp.b_down": ("mlp.down_proj.bias", False),
    _DOWN: ("mlp.down_proj.weight", True),
}
# Those of 8-bit weights. Those of linear layers lie as in files.
_LINEAR = ("unembed", *(f"blocks.attention.{name}" for name in ATTENTION))
_EIGHT_BITS = {f"blocks.mlp.w_{name}.values": _NAMES[f"blocks.mlp.w_{name}"] for name in AXES} | {
    f"{name}.weight.values": (_NAMES[f"{name}.kernel"][0], False) for name in _LINEAR
}
_SCALES = {
    f"{ours.removesuffix('.values')}.scale": (f"{theirs}_scale", transposed)
    for ours, (theirs, transposed) in _EIGHT_BITS.items()
}
_NAMES |= _EIGHT_BITS | _SCALES


@dataclass(frozen=True)
class _Layout:
    """The tensors in the files that make up one of our parameters.

    Attributes:
      names: names of the tensors, one per layer if `stacked`, else one.
      shape: shape of each tensor.
      stacked: whether the parameter has a leading axis of layers.
      transposed: whether the tensors are the transposes of ours.
      offset: what is added to the tensors to make ours.
      dtypes: those that the tensors may have, as files name them.
    """

    names: list[str]
    shape: tuple[int, ...]
    stacked: bool
    transposed: bool
    offset: float = 0.0
    dtypes: tuple[str, ...] = files.FLOATS


def load(
    directory: Path, config: ModelConfig, mesh: jax.sharding.Mesh | None, stored: Stored
) -> nnx.State:
    """Loads parameters in `config.param_dtype`, sharded over the mesh, if there is one.

    Raises:
      PretrainedError: there are no safetensors, or their tensors do not fit the model.
    """
    files.require_layers(directory, config.layers)
    tensors = _with_prefix(_open(directory, stored.passed_over))
    abstract = jax.eval_shape(lambda: _parameters(config, stored))
    leaves = {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(abstract)}
    names = _NAMES
    if stored.hybrid and _down_is_neuron_major(tensors, config):
        names = _NAMES | {_DOWN: (_NAMES[_DOWN][0], False)}
    layouts = {
        name: _layout(name, leaf, names, stored.scale_offset)
        for name, leaf in leaves.items()
        if name not in (*stored.absent, _LIVE)
    }
    if not config.tie_embeddings and _HEAD not in tensors:
        raise PretrainedError(
            f"{directory}: has no {_HEAD}. Save the model with its head (LlamaForCausalLM, not "
            "LlamaModel); if the embedding is its head, write tie_word_embeddings=true"
        )
    head = tensors.pop(_HEAD, None) if config.tie_embeddings else None
    _check(directory, tensors, layouts.values())
    if head is not None and not _same(head, tensors[_EMBED]):
        # Versions of transformers disagree on which of the two they use.
        raise PretrainedError(
            f"{directory}: config.json says tie_word_embeddings=true, but {_HEAD} differs from "
            f"{_EMBED}; write tie_word_embeddings=false to use both, or remove the former"
        )

    # Without a mesh, arrays are bound to no device, as those of a new model and of an optimizer
    # are. Where these differ, the first step on both binds all, and the second compiles anew.
    placements: dict[str, NamedSharding | None] = dict.fromkeys(leaves)
    if mesh is not None:
        of_params = jax.tree.leaves_with_path(sharding.of_params(abstract, mesh))
        placements = {_name(path): placement for path, placement in of_params}
    recipes = [
        on_devices.Recipe(
            name,
            leaves[name].shape,
            leaves[name].dtype,
            layout.stacked,
            layout.transposed,
            layout.offset,
            placements[name],
        )
        for name, layout in layouts.items()
    ]
    sources = {name: [tensors[of] for of in layout.names] for name, layout in layouts.items()}
    params = on_devices.read(recipes, sources, mesh)

    def found(path, leaf):
        name = _name(path)
        if name in params:
            return params[name]
        if name == _LIVE:
            return jnp.array(stored.live, leaf.dtype, device=placements[name])
        return jnp.zeros(leaf.shape, leaf.dtype, device=placements[name])

    return jax.tree.map_with_path(found, abstract)


def save(
    directory: Path,
    model: Transformer,
    architecture: Architecture,
    dtype: str,
    max_shard_bytes: int,
) -> None:
    """Writes model.safetensors, or shards and their index, with parameters as `dtype`."""
    params = {}
    live = np.asarray(model.blocks.mlp.live) if model.config.live_width else None
    for path, leaf in jax.tree.leaves_with_path(nnx.state(model, nnx.Param)):
        if _name(path) in architecture.absent:
            continue
        layout = _layout(_name(path), leaf, _NAMES, architecture.scale_offset)
        if live is not None and _name(path) in _SHUT[model.config.gated]:
            is_live = np.arange(model.config.d_ff) < live[:, None]
            is_live = is_live.reshape(*is_live.shape, *(leaf.ndim - 2) * [1])
            leaf = np.where(is_live, np.asarray(leaf), np.zeros((), leaf.dtype))
        kept = leaf.dtype if _name(path) in _EIGHT_BITS | _SCALES else jnp.dtype(dtype)
        for i, name in enumerate(layout.names):
            params[name] = layout, leaf, i, kept
    sizes = {
        name: math.prod(layout.shape) * kept.itemsize for name, (layout, *_, kept) in params.items()
    }
    shards = _shards(sizes, max_shard_bytes)
    written = [files.FILE]
    if len(shards) > 1:
        written = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, names in zip(written, shards, strict=True):
        tensors = {}
        for name in names:
            layout, leaf, i, kept = params[name]
            array = np.asarray(leaf[i] if layout.stacked else leaf)
            if layout.offset:
                array = array.astype(np.float32) - layout.offset
            array = array.astype(kept)
            tensors[name] = np.ascontiguousarray(array.T if layout.transposed else array)
        files.write(directory / file, tensors)
    if len(shards) > 1:
        places = {name: file for file, names in zip(written, shards, strict=True) for name in names}
        files.write_index(directory, places, sum(sizes.values()))


def _parameters(config: ModelConfig, stored: Stored) -> nnx.State:
    """Initial parameters of a model that is quantised as the files are."""
    model = Transformer(config, rngs=nnx.Rngs(0))
    model.quantise(stored.quantised)
    return nnx.state(model)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path[:-1], simple=True, separator=".")


def _layout(
    ours: str,
    leaf: jax.Array | jax.ShapeDtypeStruct,
    names: Mapping[str, tuple[str, bool]],
    scale_offset: float = 0.0,
) -> _Layout:
    theirs, transposed = names[ours]
    stacked = ours.startswith("blocks.")
    shape = leaf.shape[1:] if stacked else leaf.shape
    tensors = [theirs]
    if stacked:
        tensors = [f"{_BASE}layers.{i}.{theirs}" for i in range(leaf.shape[0])]
    offset = scale_offset if ours.endswith("norm.scale") else 0.0
    dtypes = files.EIGHT_BITS if ours in _EIGHT_BITS else files.FLOATS
    return _Layout(
        tensors, shape[::-1] if transposed else shape, stacked, transposed, offset, dtypes
    )


def _open(directory: Path, passed_over: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of all files by name, but those whose names contain one of `passed_over`."""
    tensors: dict[str, Tensor] = {}
    for file, names in files.tensors(directory).items():
        tensors |= {
            name: tensor
            for name, tensor in files.mapped(directory / file).items()
            if name in names
            and not (name.endswith(_DERIVED) or any(part in name for part in passed_over))
        }
    return tensors


def _down_is_neuron_major(tensors: dict[str, Tensor], config: ModelConfig) -> bool:
    """Whether the files of a hybrid model hold its down projections as `[d_ff, d_model]`.

    The publication's model transposes them when it is made, so this is what it saves. Files that
    were only relabelled have them as usual, which their shape tells unless it is square.
    """
    first = tensors.get(f"{_BASE}layers.0.{_NAMES[_DOWN][0]}")
    return first is not None and first.shape == (config.d_ff, config.d_model)


def _with_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names of a whole model, also those of a base model (LlamaModel)."""
    if _EMBED.removeprefix(_BASE) not in tensors:
        return tensors
    of_head = _HEAD, f"{_HEAD}_scale"
    return {name if name in of_head else _BASE + name: tensor for name, tensor in tensors.items()}


def _check(directory: Path, tensors: dict[str, Tensor], layouts: Iterable[_Layout]) -> None:
    expected = {name: layout for layout in layouts for name in layout.names}
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "not of this model": [name for name in tensors if name not in expected],
        "of a wrong shape": [
            f"{name} {list(tensors[name].shape)}, must be {list(layout.shape)}"
            for name, layout in expected.items()
            if name in tensors and tensors[name].shape != layout.shape
        ],
    }
    for dtypes in (files.FLOATS, files.EIGHT_BITS):
        problems[f"not {', '.join(dtypes)}"] = [
            f"{name} {tensor.dtype}"
            for name, tensor in tensors.items()
            if (expected[name].dtypes if name in expected else files.FLOATS) == dtypes
            and tensor.dtype not in dtypes
        ]
    said = [
        f"{len(names)} {problem}: {'; '.join(names[:4])}{'; ...' * (len(names) > 4)}"
        for problem, names in problems.items()
        if names
    ]
    if said:
        raise PretrainedError(f"{directory}: tensors do not fit config.json. {'. '.join(said)}")


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of files are equal; `b` is a matrix of floats."""
    if a.shape != b.shape or a.dtype not in files.FLOATS:
        return False
    return all(np.array_equal(a[rows], b[rows]) for rows in _blocks(a.shape[0]))


def _blocks(rows: int) -> Iterator[slice]:
    """Blocks of rows of a matrix, which may be large."""
    return (slice(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS))


def _shards(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """The names in order, split into files of at most `max_bytes` or of one larger tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
