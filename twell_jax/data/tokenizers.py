"""Tokenizers turn text into token ids and back; each is stored as one JSON file."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol, cast

import numpy as np
import tokenizers as hf

from twell_jax import untrusted
from twell_jax.config import ConfigError
from twell_jax.data import marks, tokenizer_json
from twell_jax.data.documents import Answered, Document, text_of

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "</s>", "<eos>", "[EOS]")
_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how a subword is called that stands for a byte
_BATCH_CHARACTERS = 2**18  # encoded at once: enough for all threads, in little memory


class Tokenizer(Protocol):
    """What training and generation need of a tokenizer."""

    @property
    def size(self) -> int:
        """One more than the largest id."""

    @property
    def eot_id(self) -> int:
        """The id that follows every document."""

    def encode(self, texts: Sequence[str], *, special_tokens: bool = False) -> list[np.ndarray]:
        """The ids of each text, 1-D of `token_dtype(size)`, without end-of-text.

        All of it is plain text, even if it looks like a special token; with `special_tokens` that
        is read as the token.
        """

    def encode_with_spans(self, text: str, special_tokens: bool) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text as `encode` makes them, and which characters each of them is of.

        Returns:
          int `[n]`, and int `[n, 2]`: the first character, and that after the last.
        """

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of 1-D ids.

        Undecodable bytes become U+FFFD. Ids without text (end-of-text, and those of `size` or more)
        are skipped.
        """

    def to_json(self) -> str:
        """Everything that `from_json` needs to make this tokenizer again."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Takes UTF-8 bytes as ids 0-255, end-of-text as 256; lossless for any text.

    Its only special token is end-of-text, written <|endoftext|>.
    """

    size: ClassVar[int] = 257
    eot_id: ClassVar[int] = 256

    def encode(self, texts: Sequence[str], *, special_tokens: bool = False) -> list[np.ndarray]:
        if special_tokens:
            return [self._with_ends(text.split(END_OF_TEXT[0])) for text in texts]
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    def _with_ends(self, parts: Sequence[str]) -> np.ndarray:
        first, *others = self.encode(parts)
        end = np.array([self.eot_id], np.uint16)
        return np.concatenate([first, *(a for ids in others for a in (end, ids))])

    def encode_with_spans(self, text: str, special_tokens: bool) -> tuple[np.ndarray, np.ndarray]:
        pieces = text.split(END_OF_TEXT[0]) if special_tokens else [text]
        starts, at = list[int](), 0
        for piece in pieces:
            for character in piece:
                starts += [at] * len(character.encode())
                at += 1
            starts.append(at)
            at += len(END_OF_TEXT[0])
        (ids,) = self.encode([text], special_tokens=special_tokens)
        start = np.array(starts[: len(ids)], np.int64)
        length = np.where(ids == self.eot_id, len(END_OF_TEXT[0]), 1)
        return ids, np.stack([start, start + length], axis=1)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")

    def to_json(self) -> str:
        return json.dumps({"type": "byte"})


@dataclass(frozen=True)
class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library with the token that ends a document."""

    backend: hf.Tokenizer
    eot: str

    def __post_init__(self) -> None:
        # A tokenizer.json may have the length limits of its model; documents must stay whole.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True

    @cached_property
    def size(self) -> int:
        return max(self.backend.get_vocab().values()) + 1

    @cached_property
    def eot_id(self) -> int:
        return cast(int, self.backend.token_to_id(self.eot))  # it is in the vocabulary

    @cached_property
    def _reads_special_tokens(self) -> hf.Tokenizer:
        """A copy of the backend, as whether it reads them is a state of it."""
        backend = hf.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = False
        return backend

    def encode(self, texts: Sequence[str], *, special_tokens: bool = False) -> list[np.ndarray]:
        dtype = token_dtype(self.size)
        backend = self._reads_special_tokens if special_tokens else self.backend
        with tokenizer_json.errors_are_lines():
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype) for encoding in encodings]

    def encode_with_spans(self, text: str, special_tokens: bool) -> tuple[np.ndarray, np.ndarray]:
        backend = self._reads_special_tokens if special_tokens else self.backend
        with tokenizer_json.errors_are_lines():
            encoding = backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, token_dtype(self.size))
        return ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        with tokenizer_json.errors_are_lines():
            return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def to_json(self) -> str:
        backend = json.loads(self.backend.to_str())
        return json.dumps({"type": "tokenizers", "eot": self.eot, "tokenizer": backend})


def is_fallback_byte(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is a byte of a character that the vocabulary lacks.

    Such bytes that follow each other are decoded together: a broken one makes all of them U+FFFD.
    """
    if not isinstance(tokenizer, SubwordTokenizer):
        return False
    return _FALLBACK.fullmatch(tokenizer.backend.id_to_token(int(token)) or "") is not None


def start_of_text(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray, position: int) -> int:
    """The last place, at or before `position`, from where ids decode as they do among all of them.

    That is 0, or where a token with a text stands that is no fallback byte. The text from there may
    lack the space before it, and begin with U+FFFD for the rest of a character.
    """
    for start in range(min(position, len(ids) - 1), 0, -1):
        if tokenizer.decode(ids[start : start + 1]) and not is_fallback_byte(tokenizer, ids[start]):
            return start
    return 0


def count_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """Number of bytes, in UTF-8, of the text of 1-D ids; special tokens have none.

    Of a character at either end that is not whole, only the bytes that are there count.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return int(np.sum(ids < 256))
    text = tokenizer.decode(ids)
    # Each U+FFFD, of three bytes, stands for a part of a character.
    broken = len(text) - len(text.strip("\ufffd"))
    return len(text.encode()) - 2 * broken


def from_json(text: str) -> Tokenizer:
    """The inverse of `Tokenizer.to_json`.

    Raises:
      ConfigError: the text is not what `Tokenizer.to_json` returns.
    """
    try:
        tree = json.loads(text)
        if tree["type"] == "byte":
            return ByteTokenizer()
        backend = tokenizer_json.parse(json.dumps(tree["tokenizer"]))
        if backend.token_to_id(tree["eot"]) is None:
            raise ValueError(f"it has no token {tree['eot']!r}")
    except ConfigError as error:
        raise ConfigError(f"not the tokenizer of a run ({error})") from None
    except Exception as error:  # of a tree that has something else in any place
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"not the tokenizer of a run ({reason})") from None
    return SubwordTokenizer(backend, tree["eot"])


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Writes a tokenizer as one JSON file."""
    path.write_text(tokenizer.to_json(), encoding="utf-8")


def load(path: Path) -> Tokenizer:
    """Reads what `save` wrote.

    Raises:
      ConfigError: the file cannot be read, or holds something else.
    """
    try:
        return from_json(untrusted.read(path, tokenizer_json.MOST_BYTES).decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # also ConfigError
        raise ConfigError(f"{path}: {error}") from None


def named(name: str) -> Tokenizer:
    """Loads a tokenizer by name.

    Args:
      name: "byte", a tokenizer.json, a directory that holds one, or a name on the Hugging Face hub.

    Raises:
      ConfigError: there is no such tokenizer, or it has no known end-of-text token.
    """
    if name == "byte":
        return ByteTokenizer()
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        if path.exists() or Path(name).is_dir():
            backend = tokenizer_json.read(path)
        else:
            backend = tokenizer_json.fetch(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.tokenizer: {name!r} is not byte, bpe, a path to a tokenizer.json or a "
            f"Hugging Face name that can be fetched ({' '.join(str(error).split())})"
        ) from None
    # In some vocabularies another model's end-of-text token is an ordinary token.
    found = [t.content for t in backend.get_added_tokens_decoder().values() if t.special]
    for token in END_OF_TEXT:
        if token in found:
            return SubwordTokenizer(backend, token)
    raise ConfigError(
        f"data.tokenizer: {name!r} has no end-of-text token (one of {', '.join(END_OF_TEXT)}); "
        f"its special tokens are: {', '.join(found) or 'none'}"
    )


def train_bpe(texts: Iterable[str], size: int) -> SubwordTokenizer:
    """Trains a byte-level BPE of exactly `size` ids: end-of-text, 256 bytes, merges. Deterministic.

    Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", here on
    bytes, with GPT-2's splitting into words.

    Raises:
      ConfigError: `size` is below 257, or the texts have too few merges to reach it.
    """
    if size < 257:
        raise ConfigError(f"model.vocab_size: a byte-level bpe needs at least 257, got {size}")
    backend = hf.Tokenizer(hf.models.BPE())
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() != size:
        raise ConfigError(
            f"model.vocab_size: the training documents give a bpe of {backend.get_vocab_size()} "
            f"tokens at most, got {size}"
        )
    return SubwordTokenizer(backend, END_OF_TEXT[0])


def token_dtype(size: int) -> type[np.unsignedinteger]:
    """The smaller of uint16 and uint32 that holds ids below `size`."""
    return np.uint16 if size <= 2**16 else np.uint32


def encode_documents(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[np.ndarray]:
    """Yields 1-D arrays of tokens, each for many documents; end-of-text follows each document.

    Those of texts are of `token_dtype(tokenizer.size)`, those of documents with answers int32, and
    marked (`data.marks`) unless they belong to an answer. The end of an answered document belongs
    to the answer that ends it.
    """
    eot = np.array([tokenizer.eot_id], token_dtype(tokenizer.size))
    for batch in _batches(documents):
        texts = [document for document in batch if isinstance(document, str)]
        plain = iter(tokenizer.encode(texts))
        yield np.concatenate(
            [
                part
                for document in batch
                for part in (
                    (next(plain), eot)
                    if isinstance(document, str)
                    else (_encode_answered(tokenizer, document),)
                )
            ]
        )


def _encode_answered(tokenizer: Tokenizer, document: Answered) -> np.ndarray:
    """The tokens of a document with answers, and its end of text; int32, marked."""
    ids, spans = tokenizer.encode_with_spans(document.text, document.special_tokens)
    size = len(document.text)
    ids, start = np.append(ids, tokenizer.eot_id), np.append(spans[:, 0], size)
    end = np.append(spans[:, 1], size + 1)
    counts = np.zeros(ids.size, bool)
    for first, last in document.answers:
        last += last == size
        # A token with any part of an answer is learnt.
        counts |= (end > first) & (start < last)
    return marks.marked(ids, counts)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, characters = list[Document](), 0
    for document in documents:
        batch.append(document)
        characters += len(text_of(document)) + 1
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
