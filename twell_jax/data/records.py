"""Makes documents of records: lines of JSON Lines, objects of a JSON file, rows of a dataset."""

from dataclasses import dataclass
from typing import Any

from twell_jax.config import DataConfig
from twell_jax.data import chats
from twell_jax.data.documents import Answered, Document


@dataclass(frozen=True)
class Reader:
    """Makes a document of a record, as `data.format` says.

    Attributes:
      fields: of a record, which hold what it is made of.
      reason: what decides them.
      template: of conversations; None for other records.
    """

    fields: tuple[str, ...]
    reason: str
    template: chats.Template | None

    @property
    def key(self) -> dict[str, Any]:
        """What decides the documents beside the records, for the key of a cache."""
        return {"fields": self.fields, "template": self.template and vars(self.template)}

    def document(self, record: Any) -> Document:
        """The document of a record.

        Raises:
          ValueError: the record has none; the message says why.
        """
        if not isinstance(record, dict):
            raise ValueError(f"must be an object with the field {self.fields[0]!r} ({self.reason})")
        for field in self.fields:
            if field not in record:
                found = ", ".join(record)
                raise ValueError(f"no field {field!r} ({self.reason}); there are: {found}")
        if self.template:
            if record.get("tools"):
                raise ValueError("field 'tools': conversations with tools are not supported")
            return chats.conversation(self.template, record["messages"])
        texts = [record[field] for field in self.fields]
        for field, text in zip(self.fields, texts, strict=True):
            if not isinstance(text, str):
                raise ValueError(f"field {field!r} must hold text, not {type(text).__name__}")
        if len(texts) == 1:
            return texts[0]
        prompt, completion = texts
        if not completion:
            raise ValueError("field 'completion' is empty, so there is nothing to learn")
        return Answered(prompt + completion, ((len(prompt), len(prompt + completion)),))

    def lacks(self, record: dict[str, Any]) -> bool:
        """Whether a field is there, but null."""
        return any(field in record and record[field] is None for field in self.fields)


def reader(data: DataConfig) -> Reader:
    """The reader of the records that `data` describes.

    Raises:
      ConfigError: the chat template cannot be read.
    """
    reason = f"data.format={data.format}"
    match data.format:
        case "messages":
            return Reader(("messages",), reason, chats.template(data))
        case "completion":
            return Reader(("prompt", "completion"), reason, None)
        case _:
            return Reader((data.text_field,), "data.text_field", None)
