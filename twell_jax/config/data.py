"""The section `data` of a training configuration: each key is declared here, with its meaning."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from twell_jax.config.section import Section

# The keys of `data` that not every source uses, and the sources that do.
ONLY_FOR = {
    "paths": ("files", "tokens"),
    "held_out_paths": ("tokens",),
    "name": ("hf",),
    "subset": ("hf",),
}


class DataConfig(Section):
    """Where the text comes from and how it becomes token sequences."""

    source: Literal["stdlib", "files", "hf", "tokens"] = Field(
        "stdlib",
        description="the running Python's standard library; files of text, JSONL or JSON arrays; a "
        "Hugging Face dataset (streamed); token shards (.npy of uint16/uint32)",
    )
    paths: tuple[str, ...] = Field(
        (), description="files or globs (source files and tokens); [a, b] or a single one"
    )
    held_out_paths: tuple[str, ...] = Field(
        (), description="held-out token shards (source tokens); without: the tail of `paths`"
    )
    name: str | None = Field(None, description="dataset name or local directory (source hf)")
    subset: str | None = Field(None, description="configuration of the dataset (source hf)")
    split: str = Field("train", description="split of the dataset (source hf)")
    format: Literal["text", "messages", "completion"] = Field(
        "text",
        description="what a record (of JSONL, a JSON array, hf) holds: a text, all of which is "
        "learnt; messages, a conversation of which the assistant's answers are learnt; or prompt "
        "and completion, of which the completion is learnt",
    )
    chat_template: str | None = Field(
        None,
        description="file with the Jinja template of conversations (format messages); null: that "
        "of the tokenizer",
    )
    text_field: str = Field(
        "text", description="field that holds the text (format text; JSONL, JSON, hf)"
    )
    tokenizer: str = Field(
        "byte",
        description="byte, bpe (trained on the corpus), or a Hugging Face name or path; that of "
        "init_from if that is a Hugging Face model",
    )
    held_out_fraction: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="share of the documents (files) kept for evaluation; if there are too few "
        "documents, of the text, from its end",
    )
    strict: bool = Field(
        False,
        description="end the run at a file that is not UTF-8, or a row of a dataset whose text is "
        "null, instead of leaving it out",
    )
    mask_documents: bool = Field(
        False, description="no attention across documents of a packed sequence"
    )
    cache_dir: str = Field(".cache/tokens", description="where tokenised corpora are kept")

    @field_validator("paths", "held_out_paths", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, sources in ONLY_FOR.items():
            if getattr(self, name) and self.source not in sources:
                empty = "[]" if name.endswith("paths") else "null"
                raise ValueError(
                    f"data.{name}: source={self.source} does not use it; leave it out, or write "
                    f"data.{name}={empty}"
                )
        if self.format != "text" and self.source not in ("files", "hf"):
            raise ValueError(
                f"data.format: source={self.source} has no records, so it must be text, got "
                f"{self.format}"
            )
        if self.chat_template is not None and self.format != "messages":
            raise ValueError(
                f"data.chat_template: format={self.format} does not use it; leave it out, or write "
                "data.format=messages"
            )
        if self.source in ("files", "tokens") and not self.paths:
            raise ValueError(f"data.paths: source={self.source} needs at least one path or glob")
        if self.source == "hf" and not self.name:
            raise ValueError("data.name: source=hf needs the name of a dataset or its directory")
        if self.source == "tokens" and self.tokenizer == "bpe":
            raise ValueError(
                "data.tokenizer: source=tokens has no text to train a bpe on; name the tokenizer "
                "that made the shards (byte, or a Hugging Face name or path)"
            )
        return self
