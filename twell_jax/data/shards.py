"""Token streams: `.npy` files of ids, written in order and read memory-mapped.

They are uint16 or uint32 or, in the cache, int32 if some tokens are marked (`data.marks`).
"""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from twell_jax import untrusted
from twell_jax.config import ConfigError

_SHARD_TOKENS = 2**26
_HEADER_BYTES = 2**14  # NumPy takes headers of at most 10,000
_READERS = {  # of headers, by the version of the format; a later one has names that are no ASCII
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


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


def open_shards(
    paths: Iterable[Path], *, key: str, dtypes: Sequence[type] = (np.uint16, np.uint32)
) -> "TokenStream":
    """Maps shards into memory as one stream, in the given order.

    Raises:
      ConfigError: a file is no 1-D .npy of one of `dtypes`; the message begins with `key`.
    """
    arrays = []
    for path in paths:
        try:
            arrays.append(_mapped(path, dtypes))
        except OSError as error:
            raise ConfigError(f"{key}: {path}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ConfigError(f"{key}: {path}: {error}") from None
    return TokenStream(arrays)


def _mapped(path: Path, dtypes: Sequence[type]) -> np.ndarray:
    """The array of a .npy file, memory-mapped.

    Raises:
      OSError: the file cannot be read.
      ValueError: it holds something else than one array of tokens; the message says what.
    """
    with untrusted.open_file(path) as file:
        start, size = io.BytesIO(file.read(_HEADER_BYTES)), file.seek(0, io.SEEK_END)
    if start.getvalue().startswith(b"PK"):
        raise ValueError("must be a .npy file of one array, not .npz or another zip")
    if not start.getvalue().startswith(np.lib.format.MAGIC_PREFIX):
        raise ValueError(
            "not a readable .npy file (it does not begin as one; make one of bare ids by "
            f"numpy.save('tokens.npy', numpy.fromfile({str(path)!r}, numpy.uint16)), or "
            "numpy.uint32)"
        )
    try:
        shape, _, dtype = _READERS[np.lib.format.read_magic(start)](start)
    except Exception as error:  # Python's own parsers read it, each with errors of its own
        raise ValueError(f"not a readable .npy file ({error}); numpy.save writes one") from None
    # True is an int, too
    if dtype not in dtypes or [type(length) for length in shape] != [int]:
        raise ValueError(
            "tokens must be a 1-D array of uint16 or uint32, got "
            f"{len(shape)}-D {dtype} of shape {untrusted.short(shape)}"
        )
    (length,), offset = shape, start.tell()
    if size - offset != length * dtype.itemsize:
        raise ValueError(
            f"its header says {length} tokens of {dtype.itemsize} bytes, but {size - offset} bytes "
            "follow it; write the file anew"
        )
    return np.memmap(path, dtype, "r", offset, shape) if length else np.empty(0, dtype)


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
