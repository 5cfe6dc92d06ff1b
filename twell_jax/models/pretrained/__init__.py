"""Models in Hugging Face's format: config.json, safetensors, tokenizer.json. No torch, no pickle.

`from_pretrained` reads the models of `architectures`, among them the sparse ones released with
arXiv 2603.23198, whose `model_type` ends in "_sparse_relu". `save_pretrained` writes a model in the
form of an architecture that can express it, which `transformers` loads if it has its class.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx

from twell_jax.data.tokenizers import Tokenizer
from twell_jax.ffn import Implementation
from twell_jax.models.pretrained import companions, config, forms, hub, quantisation, weights
from twell_jax.models.pretrained import tokenizer as tokenizer_file
from twell_jax.models.pretrained.architectures import ARCHITECTURES
from twell_jax.models.pretrained.config import PretrainedError
from twell_jax.models.quantised import Quantise, covered
from twell_jax.models.transformer import Transformer, graphdef, of_shapes

__all__ = ["PretrainedError", "from_pretrained", "save_pretrained"]

log = logging.getLogger(__name__)


def from_pretrained(
    name: str | Path | hub.Source,
    *,
    revision: str | None = None,
    dtype: str | None = None,
    param_dtype: str | None = None,
    ffn_implementation: Implementation | None = None,
    kv_cache_dtype: Literal["float8"] | None = None,
    quantise: Quantise | None = None,
    mesh: jax.sharding.Mesh | None = None,
    meanwhile: Callable[[Transformer], None] | None = None,
) -> Transformer:
    """Loads a model. Files are memory-mapped, and each device reads only its part of them.

    Args:
      name: a directory that holds config.json and model.safetensors, or shards and their index; if
        there is no such directory, a name on the Hugging Face hub (needs the extra "hf"). Or
        what `hub.find` has found.
      revision: branch, tag or commit on the hub, which may also be written "org/name@revision".
      dtype: dtype of the computation, "bfloat16" or "float32"; None takes that of config.json, and
        bfloat16 where that is float16.
      param_dtype: dtype of the parameters, likewise; None takes `dtype`. Those in the files are
        rounded to it; float32 holds float16 and bfloat16 exactly.
      ffn_implementation: see `sparse_ffn`.
      kv_cache_dtype: "float8" stores keys and values in 8 bits when generating; None: in `dtype`.
      quantise: what becomes 8-bit floats once it is loaded (`Transformer.quantise`): by "fp8" gates
        and up projections, by "fp8-all-but-down" also the projections of attention and the head.
        What the files hold in 8 bits is so in any case.
      mesh: from `sharding.make_mesh`; None takes JAX's default device.
      meanwhile: is called before weights are fetched and read, with `jax.ShapeDtypeStruct`s in
        their place: to compile what the model is for.

    Raises:
      PretrainedError: there is no such model, or the hub cannot be asked; a file is missing or
        broken, config.json asks for something that `Transformer` does not support, or a tensor is
        missing, unknown or of a wrong shape. The message names it.
      ValueError: `quantise` is another word, or a weight to quantise holds an inf or a NaN.
    """
    parts = covered(quantise)
    source = name if isinstance(name, hub.Source) else hub.find(name, revision)
    settings, stored = config.read(source.directory, dtype, param_dtype)
    chosen = {"ffn_implementation": ffn_implementation, "kv_cache_dtype": kv_cache_dtype}
    settings = settings.model_copy(update=chosen)
    if meanwhile is not None:
        meanwhile(of_shapes(settings, [*stored.quantised, *parts]))
    hub.fetch_weights(source)
    params = weights.load(source.directory, settings, mesh, stored)
    model = nnx.merge(graphdef(settings, stored.quantised), params)
    model.quantise(parts)
    return model


def save_pretrained(
    directory: str | Path,
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    source: str | Path | hub.Source | None = None,
) -> None:
    """Writes a model and its tokenizer in Hugging Face's format; weights in 8 bits stay so.

    The form is that of the first architecture in `architectures.WRITTEN` that can express the
    model: a plain one becomes a Llama, one with a sliding window a Mistral. A warning says if
    `transformers` has no class of it.

    If it has numbers of live neurons, config.json gets them as `live_neurons`. The gates of the
    other neurons (without a gate, their up projections) are written as zeros, as `transformers`
    does not know this key.

    Args:
      directory: must be empty; created if missing. "~" is the home directory.
      model: the language model.
      tokenizer: the one that the model was trained with. The written one adds no special tokens,
        unless `source` has one that does.
      dtype: dtype of the stored parameters, "bfloat16" or "float32"; None keeps theirs.
      max_shard_bytes: parameters are split over files of at most this size. A larger tensor gets a
        file of its own.
      source: the model from which this one was made, as `from_pretrained` takes it. The files of
        its tokenizer, its chat template among them, and generation_config.json are kept as they
        are; so is `max_position_embeddings`, unless this model's context is longer. None: nothing
        is kept.

    Raises:
      PretrainedError: the directory is not empty, `source` cannot be read or has another tokenizer,
        or no architecture can express this model; the line says what those need that come nearest.
    """
    directory = Path(os.path.expanduser(directory))
    dtype = dtype or model.config.param_dtype
    kept = None if source is None else _directory(source)
    its_tokenizer = kept if kept is not None and tokenizer_file.is_in(kept) else None
    name = forms.choose(model, tokenizer)
    tree = _settings(name, model, tokenizer, dtype, kept)
    if its_tokenizer is not None:
        tokenizer_file.require_same(its_tokenizer, tokenizer)
        companions.present(its_tokenizer, (*companions.OF_TOKENIZER, "generation_config.json"))
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise PretrainedError(f"{directory}: not empty; choose a new directory")
    weights.save(directory, model, ARCHITECTURES[name], dtype, max_shard_bytes)
    if its_tokenizer is not None:
        companions.copy_all(its_tokenizer, companions.OF_TOKENIZER, directory)
    else:
        tokenizer_file.save(directory, tokenizer, tree["max_position_embeddings"])
    forms.write(directory, tree, its_tokenizer, tokenizer.eot_id)
    if ARCHITECTURES[name].own_code:
        log.warning(
            "%s: is written as model_type=%s, whose class is no part of transformers; "
            "twell_jax reads it",
            *(directory, name),
        )


def _settings(
    name: str, model: Transformer, tokenizer: Tokenizer, dtype: str, kept: Path | None
) -> dict[str, Any]:
    """The content of config.json for a model of which `kept` is the source, if there is one."""
    held = model.blocks.mlp.live
    live = None if held is None else held[...].tolist()
    tree = forms.to_dict(name, model.config, dtype, tokenizer.eot_id, live)
    if quantised := model.quantised():
        tree[quantisation.KEY] = quantisation.to_dict(quantised)
    if tokenizer.size > model.config.vocab_size:
        raise PretrainedError(
            f"the tokenizer has {tokenizer.size} ids, the model only {model.config.vocab_size}"
        )
    return tree if kept is None else tree | forms.of_source(kept, model.config.context)


def _directory(source: str | Path | hub.Source) -> Path:
    return (source if isinstance(source, hub.Source) else hub.find(source)).directory
