"""Turns text into training batches: documents, tokenizers, token cache and input pipeline."""

import hashlib
import logging
from dataclasses import dataclass

import grain
import numpy as np

from twell_jax.config import Config, ConfigError
from twell_jax.data import corpus, pipeline, streaming
from twell_jax.data.pipeline import Windows
from twell_jax.data.shards import TokenStream
from twell_jax.data.tokenizers import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """The data of a training run.

    Attributes:
      tokenizer: the tokenizer that made the tokens.
      train: yields {"tokens": int32 [batch_sequences // process_count, context + 1]} without end,
        in a fixed order; targets are the inputs shifted by one. Its iterator's `get_state()` is a
        small JSON-serialisable dict, the same on every process, from which `set_state` continues.
      held_out: int32 [n, context + 1], 1 <= n <= eval_sequences, the same on every process. The
        sequences are spread evenly over the held-out tokens; of a streamed dataset they are the
        first.
      fingerprint: identifies the tokenizer and the training tokens; a run can only continue on data
        with the same one.
      unigram_cross_entropy: cross-entropy of `held_out`, in nats per token, if token frequencies
        alone predict it. They are counted on at most `corpus.UNIGRAM_TOKENS` training tokens.
    """

    tokenizer: Tokenizer
    train: grain.IterDataset
    held_out: np.ndarray
    fingerprint: str
    unigram_cross_entropy: float


def load(
    config: Config,
    tokenizer: Tokenizer | None = None,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> Data:
    """Opens the data of a run, and tokenises it first if needed.

    Args:
      config: the run.
      tokenizer: makes the tokens; None takes what `data.tokenizer` names.
      process_index: which of the processes this is.
      process_count: number of processes that share a batch.

    Raises:
      ConfigError: the message, one line, names what is wrong with the data or the settings.
    """
    batch, rest = divmod(config.batch_sequences, process_count)
    if rest or not batch:
        raise ConfigError(
            f"batch_tokens: {config.batch_sequences} sequences a step cannot be shared evenly "
            f"among {process_count} processes"
        )
    tokens = corpus.load(config, tokenizer)
    train = _windows(tokens.train, "training", config)
    held_out = _windows(tokens.held_out, "held-out", config).spread(config.eval_sequences)
    sharding = {
        "batch": config.batch_sequences,
        "process_index": process_index,
        "process_count": process_count,
    }
    if config.data.source == "hf":
        batches = streaming.batches(
            config.data, tokens.tokenizer, context=config.model.context, **sharding
        )
    else:
        batches = pipeline.batches(train, seed=config.seed, **sharding)
    sample = train.spread(max(1, corpus.UNIGRAM_TOKENS // config.model.context))
    if config.data.source == "tokens":
        _warn_of_unknown(tokens.tokenizer, max(sample.max(), held_out.max()), config)
    unigram = unigram_cross_entropy(sample, held_out, config.model.vocab_size)
    return Data(
        tokens.tokenizer, batches, held_out, _fingerprint(tokens.tokenizer, train, sample), unigram
    )


def unigram_cross_entropy(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Cross-entropy of a unigram model with add-one smoothing, in nats per predicted token.

    Args:
      train: int [n, context + 1], windows whose predicted tokens (all but the first) are counted.
      held_out: int [m, context + 1], windows whose predicted tokens are scored.
      vocab_size: one more than the largest possible id.
    """
    counts, targets = (
        np.bincount(windows[:, 1:].ravel(), minlength=vocab_size) for windows in (train, held_out)
    )
    log_probabilities = np.log((counts + 1) / (counts + 1).sum())
    return float(-(targets @ log_probabilities) / targets.sum())


def _warn_of_unknown(tokenizer: Tokenizer, most: int, config: Config) -> None:
    """Warns if the largest id seen in the shards is none of the tokenizer's."""
    if most >= tokenizer.size:
        log.warning(
            "data.tokenizer: the shards hold the id %d, and %s has %d tokens, so it did not make "
            "them and text cannot be printed; name the one that did",
            most,
            config.data.tokenizer,
            tokenizer.size,
        )


def _fingerprint(tokenizer: Tokenizer, train: Windows, sample: np.ndarray) -> str:
    digest = hashlib.blake2b(tokenizer.to_json().encode(), digest_size=16)
    digest.update(str(len(train.stream)).encode())
    digest.update(sample)
    return digest.hexdigest()


def _windows(stream: TokenStream, split: str, config: Config) -> Windows:
    windows = Windows(stream, config.model.context, config.model.vocab_size)
    if not len(windows):
        where = f"data.held_out_fraction: at {config.data.held_out_fraction} the {split} split has"
        if config.data.held_out_paths:
            where = f"data.{'held_out_paths' if split == 'held-out' else 'paths'}: there are"
        raise ConfigError(
            f"{where} {len(stream)} tokens, of which model.context + 1 = "
            f"{config.model.context + 1} are needed; give more text, or change the fraction or the "
            "context"
        )
    return windows
