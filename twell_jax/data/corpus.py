"""The tokenizer and the two token streams, training and held-out, of a configuration."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import __version__ as bpe_version

from twell_jax.config import Config, ConfigError
from twell_jax.data import cache, records, shards, sources, text_files, tokenizers
from twell_jax.data.documents import Document, text_of
from twell_jax.data.shards import TokenStream
from twell_jax.data.tokenizers import Tokenizer

UNIGRAM_TOKENS = 2**22  # training tokens counted for the unigram baseline
BPE_CHARACTERS = 2**26  # characters of a streamed dataset on which a bpe is trained

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and the tokens of all documents, or of the first ones of a stream."""

    tokenizer: Tokenizer
    train: TokenStream
    held_out: TokenStream


def load(config: Config, tokenizer: Tokenizer | None = None) -> Corpus:
    """Reads or makes the corpus that `config.data` describes.

    The given tokenizer makes the tokens; None takes what `data.tokenizer` names.

    - stdlib, files: all documents. They are tokenised once and kept in `data.cache_dir`, under a
      key made of the files' content and the settings. Whole documents are held out; if one of the
      splits would not have a window of `model.context` + 1 tokens, the end of the text is.
    - tokens: the given shards. Without `held_out_paths` the last `held_out_fraction` of their
      tokens is held out.
    - hf: the first `UNIGRAM_TOKENS` training tokens, and as many held-out tokens as an evaluation
      takes. A bpe is trained on the first `BPE_CHARACTERS`, again at every start, with the same
      result.

    Raises:
      ConfigError: the documents or the tokenizer cannot be used, or do not fit the vocabulary.
    """
    if config.data.source == "hf":
        return _streamed(config, tokenizer)
    if config.data.source == "tokens":
        return _given(config, tokenizer)
    return _cached(config, tokenizer)


def _cached(config: Config, tokenizer: Tokenizer | None) -> Corpus:
    """The corpus of all documents. Whole ones are held out, or the end of the text of too few."""
    data, window = config.data, config.model.context + 1
    files = text_files.digests(sources.text_files(data), data)
    documents = partial(sources.documents, list(files), data)

    def whole_documents() -> Iterator[tuple[Document, bool]]:
        return sources.by_document(documents(), data.held_out_fraction)

    def end_of_text() -> Iterator[tuple[Document, bool]]:
        characters = sum(len(text_of(document)) for document in documents())
        return sources.by_position(documents(), data.held_out_fraction, characters)

    content: dict[str, Any] = {
        "source": data.source,
        "files": [(path.suffix, digest) for path, digest in files.items()],
        "text_field": data.text_field,
        "held_out_fraction": data.held_out_fraction,
    }
    if any(text_files.holds_lines(path) and path.suffix != ".jsonl" for path in files):
        content["lines"] = "records"  # up to version 0.2 only .jsonl was
    if any(path.suffix.lower() == ".json" for path in files):
        content["json"] = "records"  # up to version 0.2 each was a text
    if data.format != "text":
        content |= {"format": data.format, **records.reader(data).key}
    if _both_have(whole_documents(), window):
        corpus = _tokenised(config, tokenizer, content, whole_documents)
        if min(len(corpus.train), len(corpus.held_out)) >= window:
            return corpus
    log.warning(
        "data.held_out_fraction: there are too few documents to hold out whole ones, so the last "
        "%g %% of the text are held out",
        100 * data.held_out_fraction,
    )
    return _tokenised(config, tokenizer, content | {"split": "position"}, end_of_text)


def _tokenised(
    config: Config,
    given: Tokenizer | None,
    content: dict[str, Any],
    split: Callable[[], Iterator[tuple[Document, bool]]],
) -> Corpus:
    """Tokenises documents, which are held out or not, and trains a bpe first; both are cached.

    Args:
      config: the run.
      given: the tokenizer, as in `load`.
      content: all that decides the documents and their split; part of the key in the cache.
      split: called for each pass; yields every document and whether it is held out.
    """
    data, cache_dir = config.data, Path(config.data.cache_dir)

    def documents(held_out: bool) -> Iterator[Document]:
        return (document for document, is_held_out in split() if is_held_out == held_out)

    def train_bpe(directory: Path) -> None:
        log.info("training a bpe of %d tokens", config.model.vocab_size)
        texts = map(text_of, documents(held_out=False))
        bpe = tokenizers.train_bpe(texts, config.model.vocab_size)
        tokenizers.save(bpe, directory / "tokenizer.json")

    def tokenise(directory: Path) -> None:
        log.info("tokenising %d files", len(content["files"]))
        for name, held_out in ("train", False), ("held_out", True):
            arrays = tokenizers.encode_documents(tokenizer, documents(held_out))
            shards.write(directory, name, arrays)

    if data.tokenizer == "bpe" and not given:
        key = {**content, "bpe": [config.model.vocab_size, bpe_version]}
        tokenizer = tokenizers.load(cache.entry(cache_dir, key, train_bpe) / "tokenizer.json")
    else:
        tokenizer = _fitting(config, given)
    directory = cache.entry(cache_dir, {**content, "tokenizer": tokenizer.to_json()}, tokenise)
    dtypes = (np.uint16, np.uint32) if data.format == "text" else (np.int32,)
    train, held_out = (
        shards.open_shards(
            sorted(directory.glob(f"{name}-*.npy")), key="data.cache_dir", dtypes=dtypes
        )
        for name in ("train", "held_out")
    )
    return Corpus(tokenizer, train, held_out)


def _both_have(split: Iterable[tuple[Document, bool]], tokens: int) -> bool:
    """Whether both splits may have so many tokens: a token has at least a byte."""
    most = [0, 0]
    for document, held_out in split:
        most[held_out] += len(text_of(document).encode()) + 1  # the end of the text
        if min(most) >= tokens:
            return True
    return False


def _given(config: Config, tokenizer: Tokenizer | None) -> Corpus:
    data = config.data
    key = "data.paths"
    paths = sources.expand(data.paths, key=key)
    stream = shards.open_shards(paths, key=key)
    if not data.held_out_paths:
        train, held_out = stream.split(int(len(stream) * (1 - data.held_out_fraction)))
    else:
        key = "data.held_out_paths"
        held_out_paths = sources.expand(data.held_out_paths, key=key)
        if both := sorted({*paths} & {*held_out_paths}):
            raise ConfigError(
                f"{key}: {both[0]} is in data.paths, too; leave it out of one of them"
            )
        held_out = shards.open_shards(held_out_paths, key=key)
        train = stream
    return Corpus(_fitting(config, tokenizer), train, held_out)


def _streamed(config: Config, tokenizer: Tokenizer | None) -> Corpus:
    data = config.data
    if data.tokenizer == "bpe" and not tokenizer:
        all_texts = map(text_of, sources.streamed(data, held_out=False))
        texts = _first_characters(all_texts, BPE_CHARACTERS)
        tokenizer = tokenizers.train_bpe(texts, config.model.vocab_size)
    else:
        tokenizer = _fitting(config, tokenizer)

    def prefix(held_out: bool, count: int) -> TokenStream:
        documents = sources.streamed(data, held_out=held_out)
        return _first_tokens(tokenizers.encode_documents(tokenizer, documents), count)

    return Corpus(
        tokenizer,
        prefix(held_out=False, count=UNIGRAM_TOKENS),
        prefix(held_out=True, count=config.eval_sequences * config.model.context + 1),
    )


def _fitting(config: Config, tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or the named one, whose ids the model must have."""
    tokenizer = tokenizer or tokenizers.named(config.data.tokenizer)
    if tokenizer.size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: the tokenizer {config.data.tokenizer} has {tokenizer.size} tokens, "
            f"got {config.model.vocab_size}"
        )
    return tokenizer


def _first_tokens(arrays: Iterable[np.ndarray], count: int) -> TokenStream:
    taken, size = [], 0
    for array in arrays:
        taken.append(array[: count - size])
        size += array.size
        if size >= count:
            break
    return TokenStream(taken)


def _first_characters(texts: Iterable[str], count: int) -> Iterator[str]:
    for text in texts:
        yield text
        count -= len(text)
        if count <= 0:
            return
