"""Training examples from a Hugging Face dataset, which is tokenised while it is read."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from twell_jax.config import DataConfig
from twell_jax.data.documents import text_of
from twell_jax.data.sources import StreamedDocuments, is_held_out
from twell_jax.data.tokenizers import Tokenizer, encode_documents

_DOCUMENTS = 256  # read and tokenised at once

# Takes a state of the iterator; yields the windows after it, each with the state that follows.
_WindowsFrom = Callable[[dict[str, Any]], Iterator[tuple[np.ndarray, dict[str, Any]]]]


def batches(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    context: int,
    batch: int,
    process_index: int,
    process_count: int,
) -> grain.IterDataset:
    """Batches without end, in the order of the dataset, which is read again when it ends.

    Every process reads the whole stream and takes every `process_count`-th window of it. So in each
    step the processes together take the same windows whatever `process_count` is, and the
    iterator's state is the same. It holds the position in the dataset, the tokens left over from
    before it (at most `context`) and the number of windows taken since.

    Args:
      data: names the dataset and the share of it that is held out, which training skips.
      tokenizer: applied to the documents, each followed by end-of-text.
      context: a window holds context + 1 tokens; consecutive windows share one token.
      batch: examples per step over all processes, divisible by `process_count`.
      process_index: which of the processes this is.
      process_count: number of processes that share a batch.

    Returns:
      A dataset of {"tokens": int32 [batch // process_count, context + 1]}; tokens whose prediction
      does not count are marked (`data.marks`).
    """
    windows_from = functools.partial(_windows, data, tokenizer, context)
    windows = _WindowDataset(windows_from, process_index, process_count)
    return grain.experimental.ThreadPrefetchIterDataset(
        windows.batch(batch // process_count), prefetch_buffer_size=4
    )


class _WindowDataset(grain.IterDataset):
    def __init__(self, windows_from: _WindowsFrom, process_index: int, process_count: int) -> None:
        super().__init__()
        self._arguments = (windows_from, process_index, process_count)

    def __iter__(self) -> "_WindowIterator":
        return _WindowIterator(*self._arguments)


class _WindowIterator(grain.DatasetIterator):
    _windows: Iterator[tuple[np.ndarray, dict[str, Any]]]

    def __init__(self, windows_from: _WindowsFrom, process_index: int, process_count: int) -> None:
        super().__init__()
        self._windows_from = windows_from
        self._process_index = process_index
        self._process_count = process_count
        self.set_state({"position": None, "leftover": [], "taken": 0})

    def __next__(self) -> dict[str, np.ndarray]:
        group = [next(self._windows) for _ in range(self._process_count)]
        _, self._state = group[-1]
        window, _ = group[self._process_index]
        return {"tokens": window}

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self._state = state
        self._windows = self._windows_from(state)


def _windows(
    data: DataConfig, tokenizer: Tokenizer, context: int, state: dict[str, Any]
) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """All windows from `state` on, each with the state from which the next ones continue."""
    stream = StreamedDocuments(data, state["position"])
    leftover, taken = np.array(state["leftover"], np.int32), state["taken"]
    while True:
        start = {"position": stream.position, "leftover": leftover.tolist()}
        found = list(itertools.islice(stream, _DOCUMENTS))
        if not found:
            stream = StreamedDocuments(data)
        fraction = data.held_out_fraction
        kept = [document for document in found if not is_held_out(text_of(document), fraction)]
        tokens = np.concatenate([leftover, *encode_documents(tokenizer, kept)], dtype=np.int32)
        count = max(tokens.size - 1, 0) // context
        for index in range(taken, count):
            window = tokens[index * context : (index + 1) * context + 1]
            yield window, {**start, "taken": index + 1}
        leftover, taken = tokens[count * context :], 0
