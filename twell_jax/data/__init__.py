"""Turns text into training batches: documents, tokenizers, token cache and input pipeline."""

import hashlib
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from twell_jax.config import Config, ConfigError
from twell_jax.data import chats, corpus, marks, tokenizers
from twell_jax.data.shards import TokenStream
from twell_jax.data.tokenizers import Tokenizer
from twell_jax.data.windows import Windows

if TYPE_CHECKING:
    import grain

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """The data of a training run.

    Attributes:
      tokenizer: the tokenizer that made the tokens.
      train: yields {"tokens": int32 [batch_sequences // process_count, context + 1]} without end,
        in a fixed order; targets are the inputs shifted by one. Tokens that are not learnt, as they
        belong to no answer, are marked: see `data.marks`. Its iterator's `get_state()` is a
        small JSON-serialisable dict, the same on every process, from which `set_state` continues.
      held_out: int32 [n, context + 1], 1 <= n <= eval_sequences, the same on every process, and
        marked likewise; at least one predicted token counts. The sequences are spread evenly over
        the held-out tokens; of a streamed dataset they are the first.
      fingerprint: identifies the tokenizer and the training tokens; a run can only continue on data
        with the same one.
      unigram_cross_entropy: cross-entropy of `held_out`, in nats per token, if token frequencies
        alone predict it. They are counted on at most `corpus.UNIGRAM_TOKENS` training tokens.
      held_out_bytes: number of bytes, in UTF-8, of the text of the tokens that `held_out` predicts
        and that count, never the first of a sequence; None if the tokenizer did not make them.
    """

    tokenizer: Tokenizer
    train: "grain.IterDataset"
    held_out: np.ndarray
    fingerprint: str
    unigram_cross_entropy: float
    held_out_bytes: int | None

    def bits_per_byte(self, held_out_ce: float) -> float | None:
        """A cross-entropy of `held_out`, in nats per token, as bits per byte of its text.

        Unlike the cross-entropy it can be compared between tokenizers. None if the text is not
        known, or empty.
        """
        if not self.held_out_bytes:
            return None
        nats = held_out_ce * np.sum(marks.counts(self.held_out[:, 1:]))
        return nats / math.log(2) / self.held_out_bytes


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
    # They take 0.3 s to import, for grain, and commands that only read text need none of it.
    from twell_jax.data import pipeline, streaming

    batch, rest = divmod(config.batch_sequences, process_count)
    if rest or not batch:
        raise ConfigError(
            f"batch_tokens: {config.batch_sequences} sequences a step cannot be shared evenly "
            f"among {process_count} processes"
        )
    tokens = corpus.load(config, tokenizer)
    train = _windows(tokens.train, "training", config)
    held_out = _windows(tokens.held_out, "held-out", config).spread(config.eval_sequences)
    if not marks.counts(held_out[:, 1:]).any():
        raise ConfigError(
            "data.held_out_fraction: the held-out sequences have no answer; give more text, or "
            "raise the fraction, eval_sequences or model.context"
        )
    if config.data.mask_documents and config.data.format == "messages":
        _require_whole_conversations(config, tokens.tokenizer)
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
        tokens.tokenizer,
        batches,
        held_out,
        _fingerprint(tokens.tokenizer, train, sample),
        unigram,
        _held_out_bytes(config, tokens.tokenizer, sample, held_out),
    )


def unigram_cross_entropy(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Cross-entropy of a unigram model with add-one smoothing, in nats per predicted token.

    Args:
      train: int [n, context + 1], windows whose predicted tokens (all but the first, and without
        marked ones) are counted.
      held_out: int [m, context + 1], windows whose predicted tokens are scored.
      vocab_size: one more than the largest possible id.
    """
    counts, targets = (
        np.bincount(labels[marks.counts(labels)], minlength=vocab_size)
        for labels in (train[:, 1:], held_out[:, 1:])
    )
    log_probabilities = np.log((counts + 1) / (counts + 1).sum())
    return float(-(targets @ log_probabilities) / targets.sum())


def _held_out_bytes(
    config: Config, tokenizer: Tokenizer, sample: np.ndarray, held_out: np.ndarray
) -> int | None:
    """Bytes of the text of what is predicted; None, with a warning, if it cannot be known."""
    largest = max(sample.max(), held_out.max())
    if config.data.source == "tokens" and largest >= tokenizer.size:
        log.warning(
            "data.tokenizer: the shards hold token %d, and %s has %d, so it did not make them: "
            "there are no bits per byte and no sample text; name the tokenizer that did",
            *(largest, config.data.tokenizer, tokenizer.size),
        )
        return None
    return sum(_predicted_bytes(tokenizer, window) for window in held_out)


def _predicted_bytes(tokenizer: Tokenizer, window: np.ndarray) -> int:
    ids, counts = marks.ids(window), np.append(marks.counts(window), False)
    counts[0] = False
    borders = np.flatnonzero(np.diff(counts)) + 1  # where tokens that count begin, and end, ...
    total = 0
    for start, stop in borders.reshape(-1, 2):
        # A decoder may drop the space before a first token, so one that is not predicted is it.
        part = ids[start - 1 : stop]
        total += tokenizers.count_bytes(tokenizer, part)
        total -= tokenizers.count_bytes(tokenizer, part[:1])
    return total


def _require_whole_conversations(config: Config, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the chat template writes the token that divides documents."""
    template = chats.template(config.data)
    roles = ["user", "assistant", "user", "assistant"]
    found = chats.conversation(template, [{"role": role, "content": "a"} for role in roles])
    ids, _ = tokenizer.encode_with_spans(found.text, special_tokens=True)
    if tokenizer.eot_id in ids:
        raise ConfigError(
            "data.mask_documents: the chat template writes the token that ends documents within "
            "conversations, so attention would end there, too; write data.mask_documents=false"
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
