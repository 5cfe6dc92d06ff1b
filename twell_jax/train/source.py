"""What a run keeps of the model that it began with, and of its chat template, for its export.

It is a directory in the run's own, as the source may change or go: the small files of the model in
Hugging Face's format, and a README.md that says whose they are.
"""

import shutil
from pathlib import Path

from twell_jax.config import Config, ConfigError
from twell_jax.data import chats
from twell_jax.data.tokenizers import Tokenizer
from twell_jax.models.pretrained import PretrainedError, card, companions, hub
from twell_jax.models.pretrained import tokenizer as pretrained_tokenizer
from twell_jax.train.durable import TEMPORARY, sync_tree
from twell_jax.train.init_from import is_run
from twell_jax.train.run_directory import RunPaths


def keep(config: Config, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the directory of a run that begins, whole, or none if there is nothing to keep.

    Args:
      config: the run.
      tokenizer: of the run.
      directory: `RunPaths.source` of the run.

    Raises:
      ConfigError: a file of the source cannot be copied.
    """
    new = directory.with_name(f"{directory.name}{TEMPORARY}")
    for path in (new, directory):
        shutil.rmtree(path, ignore_errors=True)  # of an earlier start, without a checkpoint
    new.mkdir()
    if config.init_from is not None:
        try:
            _keep_source(config.init_from, config.data.tokenizer, new)
        except PretrainedError as error:
            raise ConfigError(f"init_from: {error}") from None
    if config.data.format == "messages":
        template = chats.template(config.data)
        if not pretrained_tokenizer.is_in(new):
            pretrained_tokenizer.save(new, tokenizer, config.model.context, template)
        elif config.data.chat_template is not None:
            (new / companions.TEMPLATE).write_text(template.source, encoding="utf-8")
    if any(new.iterdir()):
        sync_tree(new)
        new.replace(directory)
    else:
        new.rmdir()


def _keep_source(name: str, tokenizer: str, directory: Path) -> None:
    """Copies the files of a model, or what a run has kept of its own source.

    Those of the tokenizer only if the new run has it, as one that begins with a run always does.
    """
    of_run = is_run(name)
    source = hub.Source(RunPaths(name).source) if of_run else hub.find(name)
    companions.copy_all(source.directory, companions.SETTINGS, directory)
    if of_run or tokenizer == name:
        companions.copy_all(source.directory, companions.OF_TOKENIZER, directory)
    if known := card.origin(source):
        (directory / companions.CARD).write_text(card.front(known), encoding="utf-8")
