"""Token streams: `.npy` files of uint16 or uint32 ids, written in order and read memory-mapped."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from twell_jax.config import ConfigError

_SHARD_TOKENS = 2**26


def write(directory: Path, name: str, arrays: Iterable[np.ndarray]) -> None:
    """Writes the concatenation of 1-D arrays as name-00000.npy, name-00001.npy, ...

    At most one shard is held in memory. If there are no tokens, no file is written.
    """
    pending, size, shard = [], 0, 0
    for array in arrays:
        pending.append(array)
        size += array.size
        if size >= _SHARD_TOKENS:
            np.save(directory / f"{name}-{shard:05d}.npy", np.concatenate(pending))
            pending, size, shard = [], 0, shard + 1
    if pending:
        np.save(directory / f"{name}-{shard:05d}.npy", np.concatenate(pending))


def open_shards(paths: Iterable[Path], *, key: str) -> "TokenStream":
    """Maps shards into memory as one stream, in the given order.

    Raises:
      ConfigError: a file is no 1-D .npy of uint16 or uint32; the message begins with `key`.
    """
    arrays = []
    for path in paths:
        try:
            _require_magic(path)
            array = np.load(path, mmap_mode="r")
        except (ValueError, OSError, EOFError) as error:
            raise ConfigError(f"{key}: {path}: not a readable .npy file ({error})") from None
        if not isinstance(array, np.ndarray):
            raise ConfigError(f"{key}: {path}: must be a .npy file of one array, not .npz")
        if array.dtype not in (np.uint16, np.uint32) or array.ndim != 1:
            raise ConfigError(
                f"{key}: {path}: tokens must be a 1-D array of uint16 or uint32, "
                f"got {array.ndim}-D {array.dtype}"
            )
        arrays.append(array)
    return TokenStream(arrays)


def _require_magic(path: Path) -> None:
    """Raises ValueError if a file does not begin as NumPy's do, which `np.load` takes for a pickle.

    A file that holds nothing but ids is often called .bin.
    """
    with path.open("rb") as file:
        if not file.read(6).startswith((b"\x93NUMPY", b"PK")):
            raise ValueError(
                "it does not begin as one; make one of bare ids by numpy.save('tokens.npy', "
                f"numpy.fromfile({str(path)!r}, numpy.uint16)), or numpy.uint32"
            )


class TokenStream:
    """The concatenation of 1-D arrays of token ids, which may be memory-mapped."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = tuple(arrays)
        self._ends = np.cumsum([array.size for array in arrays], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._arrays else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start <= i < stop (inside the stream) as one 1-D array."""
        return np.concatenate(self._parts(start, stop))

    def split(self, position: int) -> tuple["TokenStream", "TokenStream"]:
        """The streams of the tokens before `position` and of the others."""
        return (
            TokenStream(self._parts(0, position)),
            TokenStream(self._parts(position, len(self))),
        )

    def _parts(self, start: int, stop: int) -> list[np.ndarray]:
        parts = []
        for shard in range(int(np.searchsorted(self._ends, start, side="right")), len(self._ends)):
            array = self._arrays[shard]
            begin = int(self._ends[shard]) - array.size
            if begin >= stop:
                break
            parts.append(array[max(start - begin, 0) : stop - begin])
        return parts
