"""Strings at which text stops, in the end of the tokens as in all of them."""

import numpy as np
import pytest

from tests import seeds
from tests.twell_jax.inference.token_kinds import TEXT, TOKENIZERS
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.inference.stop_texts import StopTexts


def draw_ids(tokenizer):
    """Ids of a text, between them some that are drawn, and end-of-text, which has no text."""
    draw, ids = seeds.rng(), tokenizer.encode([TEXT * 4])[0].tolist()
    for _ in range(6):
        place = draw.integers(len(ids))
        ids[place:place] = draw.integers(0, tokenizer.size, 5).tolist()
        place = draw.integers(len(ids))
        ids[place:place] = [tokenizer.eot_id] * 60
    return ids


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["byte", "bpe", "metaspace"])
@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_a_string_is_found_when_the_whole_text_contains_it(name, length):
    tokenizer = TOKENIZERS[name]()
    ids = draw_ids(tokenizer)
    assert "漢字" in tokenizer.decode(ids) and max(np.unique_counts(ids).counts) >= 360
    texts = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    draw, found_at = seeds.rng(), set()
    for _ in range(12):
        strings = [texts[-1][start:][:length] for start in draw.integers(0, len(texts[-1]), 2)]
        strings = [string for string in strings if string and "\ufffd" not in string]
        stops, expected = StopTexts(tokenizer, [*strings, "absent"]), False
        for count, text in enumerate(texts):
            expected |= any(string in text for string in strings)
            assert stops.found_in(ids[:count]) == expected
            if expected:
                found_at.add(count)
                break
    assert found_at


@pytest.mark.parametrize("name", ["bpe", "prepend", "unstripped"])
def test_a_string_is_found_in_a_long_row_of_characters_that_the_vocabulary_lacks(name):
    """With byte fallback, a part of them that begins inside a character is U+FFFD throughout."""
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(["a" + "中字" * 40 + "文"])[0].tolist()
    stops = StopTexts(tokenizer, ["文"])
    found = [stops.found_in(ids[:count]) for count in range(len(ids) + 1)]
    assert found == [False] * len(ids) + [True]


@pytest.mark.parametrize("first", ["a", "é", "中", "\U0001f600"])  # 1 to 4 bytes each
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_string_is_found_at_any_place_and_as_soon_as_it_is_there(first, length):
    text = "".join(chr(ord(first) + i) for i in range(24))
    for place in range(len(text) - length + 1):
        stops = StopTexts(ByteTokenizer(), [text[place:][:length]])
        end = len(text[: place + length].encode())
        found = [stops.found_in([*text.encode()][:count]) for count in range(end + 1)]
        assert found == [False] * end + [True]


def test_calls_may_leave_out_some_tokens():
    tokenizer, ids = ByteTokenizer(), [*b"x" * 500, *b"stop", *b"x" * 500]
    stops = StopTexts(tokenizer, ["stop"])
    found = [stops.found_in(ids[:count]) for count in (0, 10, 400, 502, 900, 901)]
    assert found == [False, False, False, False, True, True]


def test_without_strings_nothing_is_found_or_decoded():
    assert not StopTexts(None, []).found_in([1, 2])


@pytest.mark.parametrize("character", ["x", "漢", "\U0001f600", "\xff"])
def test_only_the_end_is_decoded(character):
    decoded = []

    class Recording(ByteTokenizer):
        def decode(self, ids):
            decoded.append(len(ids))
            return super().decode(ids)

    byte = character.encode() if character != "\xff" else b"\xff"  # no character at all
    ids = np.tile(np.frombuffer(byte, np.uint8), 2000).tolist()
    stops = StopTexts(Recording(), ["a string that never comes"])
    assert not any(stops.found_in(ids[:count]) for count in range(len(ids)))
    assert max(decoded) < 400 < len(ids)
