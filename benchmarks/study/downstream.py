"""Questions with several answers, made of held-out source code: what cross-entropy may hide.

- brackets: which brackets close what was opened. The answers differ in them alone. No kind is right
  in more than a quarter of `ITEMS`, so that none is a good guess.
- names: which of the names that the context has comes next.
- next line: which line follows. The others come from other texts, with the same indentation.

An answer is right if its log-probability is the highest. All answers to a question have the same
number of tokens, as the shortest would win otherwise. The questions follow from the text alone, so
they are the same for all models that are trained on it.
"""

import keyword
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from twell_jax.data.tokenizers import Tokenizer
from twell_jax.inference.likelihood import log_likelihoods
from twell_jax.models import Transformer

ITEMS = 400  # of a task, at most
ANSWERS = 4  # to a question
TOKENS = range(321, 513)  # of a question with its answer; each 64 of them are a program to compile
_CONTEXT_CHARACTERS = 1536  # source code has about three to a token
_BATCH = 64  # rows at a time
_OTHERS = 32  # lines that are tried as wrong answers,
_CHARACTERS = 5  # whose lengths differ by fewer characters

# What they match begins with a token, if the tokenizer splits words from spaces and punctuation.
_CLOSING = re.compile(r"(?<=[A-Za-z0-9])([)\]}]{2,3})(?![)\]}])([^\n]{0,20})$", re.MULTILINE)
_LINE = re.compile(r"^( *)(\S[^\n]{15,79})$", re.MULTILINE)
_NAME = re.compile(r"(?<![\w'])[A-Za-z]\w{4,}")


@dataclass(frozen=True)
class Item:
    """A question: a context, which ends with no space, and answers, the first of which is right."""

    context: str
    answers: tuple[str, ...]


def scores(
    model: Transformer, tokenizer: Tokenizer, sequences: np.ndarray
) -> dict[str, dict[str, Any]]:
    """The share of right answers of a model, `accuracy`, and the number of `items`, by task.

    Args:
      model: the language model.
      tokenizer: that of the model.
      sequences: int [n, T + 1], held-out text, of which the questions are made.

    Returns:
      For each of `TASKS`; no `accuracy` if the text gives no item.
    """
    texts = documents(tokenizer, sequences)
    items = {name: task_items(task, texts, tokenizer) for name, task in TASKS.items()}
    rows = [row for of_task in items.values() for row in rows_of(of_task, tokenizer)]
    scored = iter(log_likelihoods(model, rows, batch=_BATCH))
    found = {}
    for name, of_task in items.items():
        right = [is_right([next(scored)[0] for _ in item.answers]) for item in of_task]
        found[name] = {"items": len(right)} | ({"accuracy": float(np.mean(right))} if right else {})
    return found


def is_right(log_probabilities: list[float]) -> bool:
    """Whether the first answer is the most likely one."""
    right, *wrong = log_probabilities
    return right > max(wrong)


def rows_of(items: Sequence[Item], tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """The rows that `log_likelihoods` takes: all answers to the first question, and so on."""
    contexts = tokenizer.encode([item.context for item in items])
    answers = iter(tokenizer.encode([answer for item in items for answer in item.answers]))
    return [
        ([*context.tolist(), *answer.tolist()], len(answer))
        for item, context in zip(items, contexts, strict=True)
        for answer in (next(answers) for _ in item.answers)
    ]


def documents(tokenizer: Tokenizer, sequences: np.ndarray) -> list[str]:
    """The texts of sequences, cut where documents end and begun at a line; without empty ones."""
    texts = []
    for ids in sequences:
        for part in np.split(ids, np.flatnonzero(ids == tokenizer.eot_id) + 1):
            _, _, text = tokenizer.decode(part).partition("\n")
            texts.append(text.replace("\ufffd", ""))
    return [text for text in texts if text]


def task_items(
    task: Callable[[list[str], random.Random], Iterator[Item]],
    texts: list[str],
    tokenizer: Tokenizer,
) -> list[Item]:
    """The first `ITEMS` questions of a task that have enough answers of one length."""
    found: list[Item] = []
    for item in task(texts, random.Random(0)):
        context, right, *wrong = tokenizer.encode([item.context, *item.answers])
        alike = [
            answer
            for answer, ids in zip(item.answers[1:], wrong, strict=True)
            if len(ids) == len(right)
        ]
        if len(context) + len(right) in TOKENS and len(alike) >= ANSWERS - 1:
            found.append(Item(item.context, (item.answers[0], *alike[: ANSWERS - 1])))
        if len(found) == ITEMS:
            break
    return found


def brackets(texts: list[str], rng: random.Random) -> Iterator[Item]:
    """Runs of closing brackets near the end of a line; of each kind as many, if there are."""
    by_kind: dict[str, list[tuple[str, re.Match]]] = defaultdict(list)
    for text in shuffled(texts, rng):
        for match in _CLOSING.finditer(text):
            by_kind[match[1]].append((text, match))
    for text, match in in_turn([found[: ITEMS // ANSWERS] for found in by_kind.values()]):
        others = [k for k in by_kind if k != match[1] and len(k) == len(match[1])]
        yield question(text, match.start(), match[1], shuffled(others, rng), after=match[2])


def names(texts: list[str], rng: random.Random) -> Iterator[Item]:
    """A name that the context has, among others that it has; one of each text, then more."""
    by_text = [
        [(text, match) for match in shuffled(names_in(text), rng)] for text in shuffled(texts, rng)
    ]
    for text, match in in_turn(by_text):
        context = context_before(text, match.start())
        known = dict.fromkeys(name[0] for name in names_in(context))
        if match[0] in known:
            others = [name for name in known if not match[0].startswith(name)]
            yield question(text, match.start(), match[0], shuffled(others, rng))


def names_in(text: str) -> list[re.Match]:
    """The words of five letters and more that are no keywords."""
    return [match for match in _NAME.finditer(text) if not keyword.iskeyword(match[0])]


def next_line(texts: list[str], rng: random.Random) -> Iterator[Item]:
    """A line, among others as long and as far indented; one of each text, then more."""
    alike: dict[tuple[int, int], list[str]] = defaultdict(list)
    by_text = []
    for text in shuffled(texts, rng):
        matches = [*_LINE.finditer(text)]
        by_text.append([(text, match) for match in shuffled(matches, rng)])
        for match in matches:
            alike[_form(match)].append(match[2])
    for text, match in in_turn(by_text):
        lines = alike[_form(match)]
        others = dict.fromkeys(rng.sample(lines, min(_OTHERS, len(lines))))
        elsewhere = [line for line in others if line not in text]
        yield question(text, match.start(2), match[2], elsewhere)


def _form(line: re.Match) -> tuple[int, int]:
    return len(line[1]), len(line[2]) // _CHARACTERS


TASKS = {"brackets": brackets, "names": names, "next line": next_line}


def question(
    text: str, position: int, right: str, wrong: Sequence[str], *, after: str = ""
) -> Item:
    """What follows in `text` at `position`; the space before it and `after` belong to all answers.

    So no context ends with a space, which would be a part of a token that the answer begins.
    """
    context = context_before(text, position)
    stripped = context.rstrip()
    before = context[len(stripped) :]
    return Item(stripped, tuple(f"{before}{answer}{after}" for answer in (right, *wrong)))


def context_before(text: str, position: int) -> str:
    """The characters before `position`, as many as may fit a context."""
    return text[max(0, position - _CONTEXT_CHARACTERS) : position]


def in_turn[T](lists: Sequence[Sequence[T]]) -> Iterator[T]:
    """The first of each list, then the second of each, and so on."""
    return (value for values in zip_longest(*lists) for value in values if value is not None)


def shuffled[T](values: Sequence[T], rng: random.Random) -> list[T]:
    """The values in another order."""
    return rng.sample(values, len(values))
