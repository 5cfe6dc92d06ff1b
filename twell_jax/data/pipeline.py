"""Batches of the examples of a token stream, by `grain`."""

import grain
import numpy as np

from twell_jax.data.windows import Windows


def batches(
    windows: Windows, *, batch: int, seed: int, process_index: int, process_count: int
) -> grain.IterDataset:
    """Shuffled batches without end: every epoch holds each window once, in a new order.

    In step k the processes together take the same windows whatever `process_count` is, and the
    iterator's state is the same, {"next_index": k}.

    Args:
      windows: the examples.
      batch: examples per step over all processes, divisible by `process_count`.
      seed: decides the order; any non-negative integer.
      process_index: which of the processes this is.
      process_count: number of processes that share a batch.

    Returns:
      A dataset of {"tokens": int32 [batch // process_count, context + 1]}.
    """
    # grain adds the epoch's number to its seed; unhashed, seeds 0 and 1 would share shuffles.
    (shuffle_seed,) = np.random.SeedSequence(seed).generate_state(1)
    return (
        grain.MapDataset.source(windows)
        .shuffle(int(shuffle_seed))
        .repeat()
        .slice(slice(process_index, None, process_count))
        .batch(batch // process_count, drop_remainder=True)  # without end there is none
        .to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=4))
    )
