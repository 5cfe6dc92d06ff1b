"""Makes texts of conversations by a chat template, in Hugging Face's form: a Jinja template."""

import functools
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from twell_jax import untrusted
from twell_jax.config import ConfigError, DataConfig
from twell_jax.data import tokenizers
from twell_jax.data.documents import Answered
from twell_jax.data.tokenizers import END_OF_TEXT

_SETTINGS = "tokenizer_config.json"
_MOST_BYTES = 2**26  # of a file
_NO_TEMPLATE = (
    "data.chat_template: {} has no chat template; name a file that holds one, such as "
    "template.jinja"
)


@dataclass(frozen=True)
class Template:
    """A chat template, and the texts of the special tokens that it may put into a conversation."""

    source: str
    bos_token: str
    eos_token: str


def template(data: DataConfig) -> Template:
    """The template that `data.chat_template` names; without it, that of `data.tokenizer`.

    Raises:
      ConfigError: it cannot be read, or there is none.
    """
    settings: dict[str, Any] = {}
    source = None
    if data.tokenizer not in ("byte", "bpe"):
        settings = _settings(data.tokenizer)
        source = _file_of(data.tokenizer, "chat_template.jinja") or _in_settings(settings)
    if data.chat_template is not None:
        try:
            source = untrusted.read(Path(data.chat_template), _MOST_BYTES).decode()
        except OSError as error:
            reason = error.strerror
            raise ConfigError(
                f"data.chat_template: {data.chat_template}: cannot be read ({reason})"
            ) from None
        except ValueError as error:
            raise ConfigError(f"data.chat_template: {data.chat_template}: {error}") from None
    if source is None:
        raise ConfigError(_NO_TEMPLATE.format(f"data.tokenizer={data.tokenizer}"))
    bos, eos = (_text(settings.get(name)) for name in ("bos_token", "eos_token"))
    found = Template(source, bos, eos or ("" if settings else _end_of_text(data.tokenizer)))
    _compiled(found)  # an error of the template comes before any of a record
    return found


def _end_of_text(name: str) -> str:
    """What ends a text by a tokenizer of this name, which may be a run's."""
    if name in ("byte", "bpe"):
        return END_OF_TEXT[0]
    try:
        tokenizer = tokenizers.load(Path(name) / "tokenizer.json")
    except ConfigError:
        tokenizer = tokenizers.named(name)
    return getattr(tokenizer, "eot", END_OF_TEXT[0])


def _settings(name: str) -> dict[str, Any]:
    """What the tokenizer_config.json of a tokenizer holds."""
    try:
        settings = json.loads(_file_of(name, _SETTINGS) or "{}")
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(f"data.tokenizer: {name}: {_SETTINGS} must hold an object of JSON")
    return settings


def _file_of(name: str, file: str) -> str | None:
    """The text of a file of a tokenizer: beside its tokenizer.json, of its run, or on the hub."""
    local = Path(name)
    directory = local if local.is_dir() else local.parent
    try:
        if local.exists():
            for path in (directory / file, directory / "source" / file):
                if path.exists():
                    return untrusted.read(path, _MOST_BYTES).decode()
            return None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        repository, _, revision = name.partition("@")
        try:
            path = Path(hf_hub_download(repository, file, revision=revision or None))
        except EntryNotFoundError as error:
            # Without a network, a file that no cache has need not be missing on the hub.
            if isinstance(error, LocalEntryNotFoundError) and file == _SETTINGS:
                raise
            return None
        return untrusted.read(path, _MOST_BYTES).decode()
    except ImportError:
        raise ConfigError(_needs("huggingface_hub")) from None
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"data.tokenizer: {name}: {file} cannot be read ({reason})") from None


def _needs(package: str) -> str:
    return f"data.format: messages needs {package}: in your clone, pip install -e '.[hf]'"


def _in_settings(settings: dict[str, Any]) -> str | None:
    """The template in tokenizer_config.json: a text, or of a list the one called default."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {part.get("name"): part.get("template") for part in found if isinstance(part, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _text(token: Any) -> str:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def conversation(template: Template, messages: Any) -> Answered:
    """A conversation as the template writes it; the messages of the assistant are its answers.

    An answer begins where the prompt for it ends, and ends with what the template puts after it.

    Args:
      template: the template.
      messages: objects with a "role" and a "content"; at least one is of the role "assistant".

    Raises:
      ValueError: it is no such list, or the template does not serve it; the message says why.
    """
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("field 'messages' must hold a list of objects with role and content")
    for number, message in enumerate(messages, start=1):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = type(message.get(key)).__name__
                raise ValueError(f"message {number}: {key!r} must hold text, not {found}")
    whole, answers = _rendered(template, messages, prompts=False), []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _rendered(template, messages[:index], prompts=True)
            after = _rendered(template, messages[: index + 1], prompts=False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"message {index + 1}: the chat template writes what comes before the end of "
                    "this answer otherwise if more follows, so the answer cannot be found; divide "
                    "the conversation, or name another template by data.chat_template"
                )
            answers.append((len(before), len(after)))
    if not answers:
        raise ValueError("no message is of the role 'assistant', so there is nothing to learn")
    return Answered(whole, tuple(answers), special_tokens=True)


def _rendered(template: Template, messages: list[dict[str, Any]], *, prompts: bool) -> str:
    """The text of messages, with `prompts` up to where the next answer begins."""
    try:
        return _compiled(template).render(
            messages=messages,
            add_generation_prompt=prompts,
            bos_token=template.bos_token,
            eos_token=template.eos_token,
        )
    except Exception as error:  # whatever a template may do, or ask for by raise_exception
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the chat template does not serve this conversation ({reason})") from None


@functools.cache
def _compiled(template: Template) -> Any:
    """The template for Jinja, which confines it: it reads its arguments and nothing else.

    There is no clock, so that the same messages always become the same text.
    """
    try:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError(_needs("jinja2")) from None

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    # What transformers gives to templates, but for HTML's escapes.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    # Some templates mark answers for transformers; here they are found without that.
    source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", _without_mark, template.source)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"data.chat_template: no template of Jinja ({error})") from None


def _without_mark(mark: re.Match[str]) -> str:
    """A comment in place of a block's mark, which strips the same spaces."""
    return mark[0].replace("{%", "{#").replace("%}", "#}")


def _refuse(message: str) -> None:
    raise ValueError(message)
