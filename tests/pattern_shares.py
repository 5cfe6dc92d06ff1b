"""What a pattern has in its tiles, in NumPy: its shares, and which neurons are active."""

import numpy as np


def shares(active, most_heavy=256):
    """(union, listed) of activations `[M, H]`, as `pallas_kernels.pattern_shares` defines them."""
    used = np.asarray(active) != 0
    h, items, all_items, left = used.shape[1], 0, 0, 0
    for start in range(0, len(used), 256):
        tile = used[start : start + 256]
        groups = [tile[:, n : n + 64] for n in range(0, h, 64)]
        many = [group.sum(axis=1) > 16 for group in groups]
        usual = [group[~outlying].any(axis=0) for group, outlying in zip(groups, many, strict=True)]
        size, outlying = tile.any(axis=0).sum(), np.any(many, axis=0).sum()
        if 256 * (size - np.sum(np.concatenate(usual))) > 1.5 * h * outlying:
            left += outlying
            if left <= most_heavy:
                size = np.sum(np.concatenate(usual))
        items += np.ceil(size / 128)
        all_items += np.ceil(h / 128)
    lengths = [used[:, n : n + 64].any(axis=1).sum() for n in range(0, h, 64)]
    tiles = -(-len(used) // 256)
    return items / all_items, np.ceil(np.array(lengths) / 64).sum() / (4 * tiles * len(lengths))


def fired_tiles(active):
    """In how many tiles of 256 tokens each neuron is active, int [H], of activations `[M, H]`."""
    used = np.asarray(active) != 0
    return sum(used[start : start + 256].any(axis=0) for start in range(0, len(used), 256))
