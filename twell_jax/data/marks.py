"""Marks tokens that are read, but whose prediction does not count, such as those of a question.

This is a loss mask inside the ids: token i then is ~i, which is negative, in int32 arrays of
tokens. So marks travel with their tokens through caches, batches and checkpoints. Each function
takes NumPy's arrays and JAX's.
"""

from typing import Any

import numpy as np


def ids(tokens: Any) -> Any:
    """The ids of tokens, int32 `[...]`, marked or not."""
    return tokens ^ (tokens >> 31)


def counts(tokens: Any) -> Any:
    """Whether the prediction of each token counts, bool `[...]`."""
    return tokens >= 0


def marked(ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Ids of any dtype, `[...]`, as int32, marked where `counts: bool [...]` is not set."""
    ids = ids.astype(np.int32)
    return np.where(counts, ids, ~ids)
