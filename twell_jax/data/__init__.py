"""Text to training batches: documents, tokenizers, the token cache and the input pipeline."""

import hashlib
from dataclasses import dataclass

import grain
import numpy as np

from twell_jax.config import Config, ConfigError
from twell_jax.data import corpus, pipeline, streaming
from twell_jax.data.pipeline import Windows
from twell_jax.data.shards import TokenStream
from twell_jax.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Data:
    """What a training run reads.

    Attributes:
      tokenizer: made the tokens below.
      train: yields {"tokens": int32 [batch_sequences // process_count, context + 1]} without end:
        inputs and, shifted by one, targets. Deterministic; its iterator's `get_state()` is a small
        JSON-serialisable dict, the same on every process, from which `set_state` continues.
      held_out: int32 [n, context + 1], 1 <= n <= eval_sequences, the same on every process. The
        sequences are spread evenly over the held-out tokens; a streamed dataset gives its first.
      fingerprint: identifies the tokenizer and the training tokens; a run continues on the same.
      unigram_cross_entropy: nats per token of predicting `held_out` from token frequencies alone. A
        model that has learnt anything is below it. The frequencies are those of (at most
        `corpus.UNIGRAM_TOKENS` tokens of) the training split.
    """

    tokenizer: Tokenizer
    train: grain.IterDataset
    held_out: np.ndarray
    fingerprint: str
    unigram_cross_entropy: float


def load(config: Config, *, process_index: int = 0, process_count: int = 1) -> Data:
    """Opens the data of a run and tokenises it first where needed.

    Raises:
      ConfigError: one line that names what is wrong with the data or the settings.
    """
    batch, rest = divmod(config.batch_sequences, process_count)
    if rest or not batch:
        raise ConfigError(
            f"batch_tokens: {config.batch_sequences} sequences a step cannot be shared evenly "
            f"among {process_count} processes"
        )
    tokens = corpus.load(config)
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
    unigram = unigram_cross_entropy(sample, held_out, config.model.vocab_size)
    return Data(
        tokens.tokenizer, batches, held_out, _fingerprint(tokens.tokenizer, train, sample), unigram
    )


def unigram_cross_entropy(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Cross-entropy, in nats per predicted token, of the add-one-smoothed unigram model.

    Args:
      train: int [n, context + 1], windows whose predicted tokens (all but the first) are counted.
      held_out: int [m, context + 1], windows whose predicted tokens are scored.
      vocab_size: number of tokens; ids are below it.
    """
    counts, targets = (
        np.bincount(windows[:, 1:].ravel(), minlength=vocab_size) for windows in (train, held_out)
    )
    log_probabilities = np.log((counts + 1) / (counts + 1).sum())
    return float(-(targets @ log_probabilities) / targets.sum())


def _fingerprint(tokenizer: Tokenizer, train: Windows, sample: np.ndarray) -> str:
    digest = hashlib.blake2b(tokenizer.to_json().encode(), digest_size=16)
    digest.update(str(len(train.stream)).encode())
    digest.update(sample)
    return digest.hexdigest()


def _windows(stream: TokenStream, split: str, config: Config) -> Windows:
    windows = Windows(stream, config.model.context, config.model.vocab_size)
    if not len(windows):
        where = f"data.held_out_fraction: at {config.data.held_out_fraction} the {split} split has"
        advice = "; documents are held out whole, so more or other documents may be needed"
        if config.data.source == "tokens":
            advice = ""
            if config.data.held_out_paths:
                where = f"data.{'held_out_paths' if split == 'held-out' else 'paths'}: there are"
        raise ConfigError(
            f"{where} {len(stream)} tokens, of which model.context + 1 = "
            f"{config.model.context + 1} are needed{advice}"
        )
    return windows
