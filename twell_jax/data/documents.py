"""Documents: texts, and texts of which only some parts are learnt."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answered:
    """A conversation or instruction as a text, of which answers are learnt and the rest is read.

    Attributes:
      text: all of it.
      answers: the first character of each answer, and that after its last, in order.
      special_tokens: whether special tokens that are written in the text are read as such.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    special_tokens: bool = False


type Document = str | Answered


def text_of(document: Document) -> str:
    """All of a document's text."""
    return document if isinstance(document, str) else document.text


def divided(document: Document, position: int) -> tuple[Document, Document]:
    """The parts of a document before a character and from it on; either may be empty."""
    if isinstance(document, str):
        return document[:position], document[position:]
    size = len(document.text)
    position = min(position, size)
    return _part(document, 0, position), _part(document, position, size)


def _part(document: Answered, start: int, stop: int) -> Answered:
    clipped = [(max(first, start), min(last, stop)) for first, last in document.answers]
    answers = tuple((first - start, last - start) for first, last in clipped if first < last)
    return Answered(document.text[start:stop], answers, document.special_tokens)
