"""Training examples from a token stream of known length, by index."""

from dataclasses import dataclass

import numpy as np

from twell_jax.config import ConfigError
from twell_jax.data import marks
from twell_jax.data.shards import TokenStream


@dataclass(frozen=True)
class Windows:
    """The examples of a token stream: windows of context + 1 tokens at stride context, by index.

    The last token of a window is the first of the next, so every token but the stream's first is
    predicted exactly once. The stream's last (length - 1) % context tokens are left out.

    Raises:
      ConfigError: when a window is read that holds an id of vocab_size or more.
    """

    stream: TokenStream
    context: int
    vocab_size: int

    def __len__(self) -> int:
        return max(len(self.stream) - 1, 0) // self.context

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """The window 0 <= index < len, as {"tokens": int32 [context + 1]}, marked as the stream."""
        start = index * self.context
        tokens = self.stream.read(start, start + self.context + 1)
        largest = (marks.ids(tokens) if tokens.dtype == np.int32 else tokens).max()
        if largest >= self.vocab_size:
            raise ConfigError(
                f"model.vocab_size: the data holds token {largest}, so the vocabulary needs "
                f"more than {self.vocab_size} tokens"
            )
        return {"tokens": tokens.astype(np.int32)}

    def spread(self, count: int) -> np.ndarray:
        """Evenly spread windows, int32 [min(count, len), context + 1]."""
        count = min(count, len(self))
        indices = np.arange(count) * len(self) // count
        return np.stack([self[int(index)]["tokens"] for index in indices])
