"""What all sections of a configuration have in common, and the error of one that cannot be run."""

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from twell_jax import untrusted


class ConfigError(ValueError):
    """A configuration that cannot be run; the message, one line, names the key and what to write.

    Line breaks, which a key or a path may hold, become spaces; control characters are spelt out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(untrusted.plain(message))


# Keys of files and directories; in those of tokenizers and datasets a name may stand instead.
_PATHS = {
    "run_dir", "init_from", "paths", "held_out_paths", "cache_dir", "tokenizer", "chat_template",
    "name",
}  # fmt: skip


class Section(BaseModel):
    """A frozen group of keys that refuses unknown keys, infinities and booleans for numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read true as 1
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and field.annotation is not bool:
            raise PydanticCustomError("bool_as_number", "must not be true or false")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _representable(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, tuple):
            return tuple(cls._representable(part, info) for part in value)
        if isinstance(value, int) and abs(value) >= 2**63:
            raise PydanticCustomError("too_large", "must be less than 2^63")
        if not isinstance(value, str):
            return value
        # no path holds a null character, and no file half of a surrogate pair
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            raise PydanticCustomError("broken_text", "must be text without null characters")
        return os.path.expanduser(value) if info.field_name in _PATHS else value
