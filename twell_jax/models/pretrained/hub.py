"""Finds a model in Hugging Face's format: in a directory, or by its name on the Hugging Face hub.

Only settings, the tokenizer and safetensors are downloaded: no pickles, and no code. They are kept
in the cache of `huggingface_hub`, whose environment variables hold (HF_HOME, HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE). The package is imported only where a name is looked up.
"""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twell_jax import untrusted
from twell_jax.models.pretrained import files
from twell_jax.models.pretrained.companions import CARD, OF_TOKENIZER, SETTINGS
from twell_jax.models.pretrained.config import PretrainedError

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\S+))?", re.ASCII)
_SMALL = (*SETTINGS, *OF_TOKENIZER, CARD, files.INDEX)


@dataclass(frozen=True)
class Source:
    """Where the files of a model are.

    Attributes:
      directory: holds what there is of the settings and the tokenizer, and the weights if the model
        is not from the hub.
      repository: the name on the hub, from which `fetch_weights` adds the weights; None: local.
    """

    directory: Path
    repository: str | None = None


def is_name(text: str) -> bool:
    """Whether a text has the form org/name, that of a model on the hub, without a revision."""
    parts = _NAME.fullmatch(text)
    return parts is not None and parts[2] is None


def find(name: str | Path, revision: str | None = None) -> Source:
    """Finds a model; of one on the hub, downloads the small files that are not in the cache.

    Args:
      name: a directory, where "~" is the home directory; if there is none, a name on the hub,
        "org/name" or "org/name@revision".
      revision: branch, tag or commit on the hub; another way to write it. None takes the main one.

    Raises:
      PretrainedError: there is neither, a directory is given a revision, or the hub's files cannot
        be had. The message is one line.
    """
    path = os.path.expanduser(name)
    if os.path.exists(path):
        if revision is not None:
            raise PretrainedError(f"{path}: is a local path, which has no revision {revision!r}")
        return Source(Path(path))
    parts = _NAME.fullmatch(path)
    if not parts:
        raise PretrainedError(
            f"{path!r}: there is no such directory; a model on the Hugging Face hub is written "
            "org/name or org/name@revision"
        )
    repository, written = parts.groups()
    if written and revision is not None:
        raise PretrainedError(f"{path}: name one revision, got {written!r} and {revision!r}")
    revision = written or revision
    if revision is not None and not untrusted.is_inside(revision):  # it becomes a path in the cache
        raise PretrainedError(f"{repository}: {revision!r} is no branch, tag or commit")
    directory = _download(repository, revision, _SMALL, progress=False)
    return Source(directory, repository)


def fetch_weights(source: Source) -> None:
    """Downloads the safetensors of a model on the hub into its directory, if they are not there.

    Raises:
      PretrainedError: the model has none, or they cannot be had. The message is one line.
    """
    directory = source.directory
    if source.repository is None or (directory / files.FILE).exists():
        return
    wanted = [files.FILE]
    if (directory / files.INDEX).exists():
        wanted = files.indexed(directory)
    missing = [file for file in wanted if not (directory / file).exists()]
    if not missing:
        return
    # The directory is called like its commit, so a branch that moves meanwhile does no harm.
    _download(source.repository, directory.name, missing, progress=True)
    for file in missing:
        if not (directory / file).exists():
            raise PretrainedError(
                f"{source.repository}: has no {file} on the Hugging Face hub; only safetensors are "
                "read, and pickles (*.bin) are not downloaded, as they can run any code"
            )


def _download(
    repository: str, revision: str | None, files: Sequence[str], *, progress: bool
) -> Path:
    """The directory in the cache with those of the files that the repository has."""
    try:
        import huggingface_hub
        from huggingface_hub.utils import tqdm
    except ImportError:
        raise PretrainedError(
            f"{repository}: there is no such directory, and the Hugging Face hub is asked by "
            "huggingface_hub, which is missing: in your clone, pip install -e '.[hf]'"
        ) from None

    class Bar(tqdm):
        """Progress on stderr, or none."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs if progress else {**kwargs, "disable": True})

    patterns = [glob.escape(file) for file in files]
    try:
        directory = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=patterns, tqdm_class=Bar
        )
    except Exception as error:  # of the network, the disk or the name, by many libraries
        name = f"{repository}@{revision}" if revision else repository
        raise PretrainedError(f"{name}: {_reason(error)}") from None
    return Path(directory)


def _reason(error: Exception) -> str:
    """Why a download failed, in a line."""
    from huggingface_hub import constants, errors

    match error:
        case errors.GatedRepoError():
            return (
                "its owner has not let you read it; ask on its page, and log in by: hf auth login"
            )
        case errors.RepositoryNotFoundError():
            return (
                "there is no such directory, and no such model on the Hugging Face hub; if it is a "
                "private one, log in by: hf auth login"
            )
        case errors.RevisionNotFoundError():
            return "the model on the Hugging Face hub has no such branch, tag or commit"
        case errors.HFValidationError():
            return (
                "there is no such directory, and no model on the Hugging Face hub has such a name"
            )
    if constants.HF_HUB_OFFLINE:
        return "not in the cache, and HF_HUB_OFFLINE=1 forbids to download it; unset it"
    return (
        "there is no such directory, and it cannot be fetched from the Hugging Face hub "
        f"({cause_of(error)}); check the network"
    )


def cause_of(error: Exception) -> str:
    """The first line of what an error says that `huggingface_hub` did not expect."""
    cause = error.__cause__ or error
    line, *_ = [*str(cause).strip().splitlines(), ""]
    return f"{type(cause).__name__}: {line}"
