"""Puts a written model on the Hugging Face hub, by the token of `hf auth login` or HF_TOKEN."""

import shlex
from pathlib import Path

from twell_jax.models.pretrained import files, hub
from twell_jax.models.pretrained.companions import OF_TOKENIZER, SETTINGS
from twell_jax.models.pretrained.json_file import PretrainedError

# What an earlier push under the same name may have left, and what would be read beside the new
# files or instead of them.
_REPLACED = (files.FILE, "model-*.safetensors", files.INDEX, *SETTINGS, *OF_TOKENIZER)


def require_possible(repository: str) -> None:
    """Finds before any work what would make it vain, as far as that needs no network.

    Raises:
      PretrainedError: this is no name on the hub, huggingface_hub is missing or must not use the
        network, or there is no token.
    """
    if not hub.is_name(repository):
        raise PretrainedError(
            f"{repository!r}: is no name of a model on the Hugging Face hub; write org/name"
        )
    try:
        from huggingface_hub import constants, get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ImportError:
        raise PretrainedError(
            f"{repository}: is pushed by huggingface_hub, which is missing: in your clone, "
            "pip install -e '.[hf]'"
        ) from None
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise PretrainedError(f"{error}") from None
    if constants.HF_HUB_OFFLINE:
        raise PretrainedError(
            f"{repository}: cannot be pushed, as HF_HUB_OFFLINE=1 forbids it; unset it"
        )
    if get_token() is None:
        raise PretrainedError(
            f"{repository}: cannot be pushed without a token of the Hugging Face hub; log in by: "
            "hf auth login"
        )


def push(directory: Path, repository: str, *, private: bool = False) -> str:
    """Uploads a model's directory as one commit; creates the model on the hub if there is none.

    Weights, settings and files of the tokenizer that are there, but not in the directory, are
    deleted.

    Args:
      directory: of a model that was written.
      repository: "org/name", which `require_possible` takes.
      private: whether a new model is private, and an existing one must be so.

    Returns:
      The address of the model's page.

    Raises:
      PretrainedError: the hub refuses it or cannot be reached, or should have been private and is
        not. The directory stays, and the line says how to push it.
    """
    from huggingface_hub import HfApi

    again = f"hf upload {repository} {shlex.quote(str(directory))} . --delete 'model*.safetensors*'"
    when = "when that is mended"
    if private:  # `hf upload` would not look
        again, when = f"{again} --private", f"{when}, and if {repository} is not a public model"
    try:
        api = HfApi()
        page = api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise PretrainedError(
                f"{directory}: is written, but not pushed: {repository} is public; choose another "
                "name, or leave out --private"
            )
        api.upload_folder(
            repo_id=repository,
            folder_path=directory,
            commit_message="Model written by twell-jax",
            delete_patterns=list(_REPLACED),
        )
    except PretrainedError:
        raise
    except Exception as error:  # of the network, the disk or the name, by many libraries
        raise PretrainedError(
            f"{directory}: is written, but not pushed to {repository}: {_reason(error)}; "
            f"{when}: {again}"
        ) from None
    return str(page)


def _reason(error: Exception) -> str:
    """Why a model is not on the hub, in a line."""
    match getattr(getattr(error, "response", None), "status_code", None):
        case 401:
            return "the Hugging Face hub does not take your token; log in by: hf auth login"
        case 403:
            return "your token may not write there; log in with one that may, by: hf auth login"
        case 404:
            return "there is no such user or organisation, or your token does not see it"
    return f"the Hugging Face hub cannot be reached or took no part of it ({hub.cause_of(error)})"
