"""A model with its tokenizer, loaded from a run, a Hugging Face directory or the hub."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
from flax import nnx

from twell_jax.config import ConfigError
from twell_jax.data.tokenizers import Tokenizer
from twell_jax.ffn import Implementation, LiveWidth
from twell_jax.ffn.quantised import EightBits
from twell_jax.models import Transformer, graphdef
from twell_jax.models.pretrained import config as pretrained_config
from twell_jax.models.pretrained import from_pretrained, hub
from twell_jax.models.pretrained import tokenizer as pretrained_tokenizer
from twell_jax.train.run_directory import RunPaths, load_run


@dataclass(frozen=True)
class LanguageModel:
    """A model that reads and writes text.

    Attributes:
      model: the network.
      tokenizer: translates between text and token ids.
      prefix: ids that the model expects before every text, such as the id of <s>.
      stop_ids: ids that end a text.
      bos_id: the id that begins a text, such as that of <s>, which `prefix` may leave out; None if
        there is none.

    Raises:
      ConfigError: the tokenizer, the prefix or `bos_id` has ids that the model's vocabulary lacks.
    """

    model: Transformer
    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    stop_ids: tuple[int, ...]
    bos_id: int | None = None

    def __post_init__(self) -> None:
        before = (*self.prefix, self.first_id)
        _require_ids(self.model.config.vocab_size, self.tokenizer, before)

    @property
    def first_id(self) -> int:
        """The id after which a text without a context begins: end-of-text if none is named."""
        return next(i for i in (self.bos_id, *self.prefix, self.tokenizer.eot_id) if i is not None)

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """The ids of a text to continue; `first_id` if there are none.

        Args:
          text: plain text, even where it looks like a special token.
          special_tokens: instead, special tokens in it are read as such, and `prefix` is not put
            before it: for text in the format of a chat, which has all that the model expects.
        """
        prefix = () if special_tokens else self.prefix
        encoded = self.tokenizer.encode([text], special_tokens=special_tokens)[0]
        return [*prefix, *encoded.tolist()] or [self.first_id]


def load(
    name: str,
    ffn_implementation: Implementation | None = None,
    meanwhile: Callable[[LanguageModel], None] | None = None,
    kv_cache_dtype: Literal["float8"] | None = None,
) -> LanguageModel:
    """The model of a run's last checkpoint or in Hugging Face's format, on the first device.

    Args:
      name: the `run_dir` of a run, or a directory with a config.json; if there is no such
        directory, a name on the Hugging Face hub, "org/name" or "org/name@revision".
      ffn_implementation: see `sparse_ffn`; the run's own setting is ignored.
      meanwhile: is called before parameters are read, with `jax.ShapeDtypeStruct`s in their place.
      kv_cache_dtype: "float8" stores keys and values in 8 bits when generating; None: as the run
        says, or in the dtype of the compute.

    Raises:
      ConfigError: the directory holds neither, the run has no checkpoint, or the tokenizer has ids
        that the model's vocabulary lacks.
      CheckpointError: no checkpoint of the run is whole.
      PretrainedError: see `from_pretrained`.
    """
    source = hub.find(name)
    directory = source.directory
    if (directory / "config.json").exists():
        subwords = pretrained_tokenizer.load(directory)
        prefix = tuple(pretrained_tokenizer.prefix(subwords))
        bos_id = pretrained_tokenizer.bos_id(directory, subwords)
        settings, _ = pretrained_config.read(directory, None, None)
        # before weights are fetched and read
        _require_ids(settings.vocab_size, subwords, prefix, directory / "tokenizer.json")
        ends = pretrained_config.ends(directory)[1] or (subwords.eot_id,)

        def with_model(model: Transformer) -> LanguageModel:
            return LanguageModel(in_compute_dtype(model), subwords, prefix, ends, bos_id)

        return with_model(
            from_pretrained(
                source,
                ffn_implementation=ffn_implementation,
                kv_cache_dtype=kv_cache_dtype,
                meanwhile=meanwhile and (lambda model: meanwhile(with_model(model))),
            )
        )
    if not RunPaths(directory).config.exists():
        raise ConfigError(f"{name}: is not the directory of a run and holds no config.json")

    def of_run(tokenizer: Tokenizer, model: Transformer) -> LanguageModel:
        stored = kv_cache_dtype or model.config.kv_cache_dtype
        chosen = {"ffn_implementation": ffn_implementation, "kv_cache_dtype": stored}
        settings = model.config.model_copy(update=chosen)
        model = in_compute_dtype(nnx.merge(graphdef(settings), nnx.state(model)))
        kept = RunPaths(directory).source  # of the model that it began with, as its export has it
        ends = pretrained_config.ends(kept)[1] if pretrained_tokenizer.is_in(kept) else ()
        return LanguageModel(model, tokenizer, (), ends or (tokenizer.eot_id,))

    _, tokenizer, model = load_run(name, meanwhile and (lambda *of: meanwhile(of_run(*of))))
    return of_run(tokenizer, model)


def _require_ids(
    vocab_size: int, tokenizer: Tokenizer, prefix: tuple[int, ...], path: Path | None = None
) -> None:
    """Raises ConfigError where the model lacks ids; `path` is of the file that has the prefix."""
    size = tokenizer.size
    if size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {size} ids, the model only {vocab_size}; take the model's own "
            "tokenizer, or enlarge the model's embedding"
        )
    if outside := [i for i in prefix if not 0 <= i < vocab_size]:
        where = f"{path}: post_processor" if path else "the prefix"
        raise ConfigError(
            f"{where} puts id {outside[0]} before a text, but the model's vocabulary is 0 to "
            f"{vocab_size - 1}; write the id that this token has there"
        )


def in_compute_dtype(model: Transformer) -> Transformer:
    """The model with its parameters rounded to `config.dtype`, as computing rounds all but norms'.

    So they are rounded once, not for every token. Weights in 8 bits stay.
    """
    dtype = model.config.dtype
    settings = model.config.model_copy(update={"param_dtype": dtype})
    eight_bits, live, others = nnx.state(model, EightBits, LiveWidth, ...)
    others = jax.tree.map(partial(_rounded, dtype), others)
    graph = graphdef(settings, model.quantised())
    return nnx.merge(graph, eight_bits, live, others)


def _rounded(
    dtype: jax.typing.DTypeLike, leaf: jax.Array | jax.ShapeDtypeStruct
) -> jax.Array | jax.ShapeDtypeStruct:
    return leaf.astype(dtype) if isinstance(leaf, jax.Array) else leaf.update(dtype=dtype)
