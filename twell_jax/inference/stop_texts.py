"""Notices where the text of new tokens contains a string at which it is to stop."""

from collections.abc import Sequence

from twell_jax.data.tokenizers import Tokenizer, start_of_text

# Characters that are decoded beside those of the longest string: where tokens begin inside a
# character or after a space, or end inside a character, their text differs from the whole text's.
_MARGIN = 8


class StopTexts:
    """Says of growing token ids whether their text contains one of some strings.

    Only their end is decoded, so that a call takes the same time however many there are.

    Args:
      tokenizer: that of the ids.
      strings: none of them is empty.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]):
        self._tokenizer, self._strings = tokenizer, strings
        self._characters = max(map(len, strings), default=0) + _MARGIN
        self._start = 0  # of the ids that are decoded
        self._limit = 2 * self._characters  # of their number, where half of them may be enough
        self._found = False

    def found_in(self, ids: Sequence[int]) -> bool:
        """Whether the text of `ids`, which begin with those of the call before, contains a string.

        Once it does, it does for good.
        """
        if self._found or not self._strings:
            return self._found
        text = self._tokenizer.decode(ids[self._start :])
        self._found = any(string in text for string in self._strings)
        if len(ids) - self._start >= self._limit:
            start = start_of_text(self._tokenizer, ids, len(ids) - self._limit // 2)
            shorter = start - self._start >= self._limit // 4
            if shorter and len(self._tokenizer.decode(ids[start:])) >= self._characters:
                self._start = start
            else:
                # Tokens may have less than a character or no text at all, or be bytes that are
                # decoded together.
                self._limit *= 2
        return self._found
