"""The files of a model that hold its tensors: one of safetensors, or several and their index."""

import contextlib
import json
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save_file

from pallas_kernels.quantised import E4M3
from twell_jax import untrusted
from twell_jax.models.pretrained.json_file import PretrainedError, read_json

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "BF16": jnp.bfloat16,
    "F16": np.float16,
    "F8_E4M3": E4M3,
}
FLOATS, EIGHT_BITS = ("F32", "BF16", "F16"), ("F8_E4M3",)
_MOST_LAYERS = 10_000  # taken from config.json where there are no tensors yet to compare with


def names(directory: Path) -> list[str]:
    """The names of the files that hold a model's tensors.

    Raises:
      PretrainedError: there are none, or their index is broken.
    """
    if (directory / FILE).exists():
        return [FILE]
    if (directory / INDEX).exists():
        return indexed(directory)
    if pickles := sorted(path.name for path in directory.glob("pytorch_model*.bin")):
        raise PretrainedError(
            f"{directory}: holds {pickles[0]} but no safetensors; a pickle can run any code and is "
            "not read. Convert it by transformers: AutoModelForCausalLM.from_pretrained(DIRECTORY)"
            ".save_pretrained(NEW_DIRECTORY)"
        )
    raise PretrainedError(f"{directory}: holds neither {FILE} nor {INDEX}")


def indexed(directory: Path) -> list[str]:
    """The names of the files that the directory's index says to hold the tensors.

    Raises:
      PretrainedError: the index is broken, or names a file elsewhere or of another format.
    """
    return sorted(set(_weight_map(directory).values()))


def tensors(directory: Path) -> dict[str, set[str]]:
    """For each file of a model, the names of the tensors that are read from it.

    Where several files have a tensor of one name, the index decides between them.

    Raises:
      PretrainedError: a file or the index cannot be read, or the index does not say where a
        tensor is.
    """
    found, holders = {}, defaultdict(list)
    for file in names(directory):
        with opened(directory / file) as stored:
            found[file] = set(stored.keys())
        for name in found[file]:
            holders[name].append(file)
    places = {} if list(found) == [FILE] else _weight_map(directory)
    for name, several in holders.items():
        chosen = places.get(name, several[0] if len(several) == 1 else "neither")
        if chosen not in several:
            raise PretrainedError(
                f"{directory}: {name} is in {' and in '.join(several[:2])}, but the weight_map of "
                f"{INDEX} names {chosen}"
            )
        for file in several:
            if file != chosen:
                found[file].remove(name)
    return found


def require_layers(directory: Path, layers: int) -> None:
    """Compares the number of layers with that of tensors, before each layer costs time.

    Raises:
      PretrainedError: there are more layers than tensors or, where these are still to be fetched,
        than any model has; or a file cannot be read.
    """
    is_here = (directory / FILE).exists() or (directory / INDEX).exists()
    paths = [directory / name for name in names(directory)] if is_here else []
    most, why = _MOST_LAYERS, f"no model of more than {_MOST_LAYERS} is read"
    if paths and all(path.exists() for path in paths):
        most = sum(map(_count, paths))
        why = f"there are only {most} tensors"
    if layers > most:
        raise PretrainedError(f"{directory}: config.json says {layers} layers, but {why}")


def _count(path: Path) -> int:
    with opened(path) as stored:
        return len(stored.keys())


def _weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise PretrainedError(f"{path}: has no weight_map of names to files")
    for file in sorted(set(places.values())):
        if not untrusted.is_inside(file):
            raise PretrainedError(
                f"{path}: weight_map names {file!r}; all files must be in the directory of the "
                "index"
            )
        if not file.endswith(".safetensors"):
            raise PretrainedError(f"{path}: weight_map names {file!r}; only safetensors are read")
    return places


def write_index(directory: Path, places: Mapping[str, str], total_size: int) -> None:
    """Writes the index of tensors by the names of their files; `total_size` is in bytes."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(places)}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a new file of safetensors.

    Raises:
      PretrainedError: it cannot be written, as if the disk is full.
    """
    path.touch()
    mode = path.stat().st_mode  # as the umask says; safetensors' own are the owner's alone
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise PretrainedError(f"{path}: cannot be written ({error})") from None
    path.chmod(stat.S_IMODE(mode))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of safetensors, memory-mapped.

    Raises:
      PretrainedError: it cannot be read.
    """
    try:
        untrusted.require_regular(path)
        file = safetensors.safe_open(path, "np")
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise PretrainedError(f"{path}: cannot be read ({error})") from None
    with file:
        yield file


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file; an index gives that part of it, memory-mapped.

    Attributes:
      dtype: as files name it, one of `FLOATS` or `EIGHT_BITS` where it is to be read.
      shape: its shape.
    """

    dtype: str
    shape: tuple[int, ...]
    _bytes: np.ndarray

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._bytes.view(_DTYPES[self.dtype]).reshape(self.shape)[index]


def mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name. Reading them takes neither a copy nor Python's lock.

    Raises:
      PretrainedError: it cannot be read.
    """
    with opened(path), untrusted.open_file(path) as file:  # whose header is sound, then
        # the length of the header, the header, then the tensors
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        content = np.memmap(file, np.uint8, "r")[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: Tensor(entry["dtype"], tuple(entry["shape"]), content[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
