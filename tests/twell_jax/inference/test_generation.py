"""Continued token sequences against the forward pass, and text as it is streamed."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as hf
from flax import nnx

from tests import seeds
from tests.twell_jax import drawn
from twell_jax.data.tokenizers import ByteTokenizer, SubwordTokenizer, train_bpe
from twell_jax.inference import ENDED, GREEDY, generate, stream_text

make = functools.partial(drawn.small, vocab_size=257, context=32)


@pytest.fixture(scope="module")
def model():
    return make()


# Of different lengths; one is as long as generation pads them to.
PROMPTS = [[5], [7, 250, 3, 99, 4], list(range(64)), [1, 2]]
TOKENS = 12


def continued(model, prompts=PROMPTS, **options):
    """`TOKENS` new tokens, [steps, prompts]: four prompts at a time share compiled programs."""
    return np.array(list(generate(model, prompts, max_tokens=TOKENS, **options)))


def test_greedy_tokens_are_those_of_the_whole_forward_pass(model):
    found = continued(model, sampling=GREEDY)
    assert found.shape == (TOKENS, 4)
    sequences = np.zeros((4, 64 + TOKENS), int)  # nothing depends on the zeros at an end
    for row, prompt in enumerate(PROMPTS):
        sequences[row, : len(prompt) + TOKENS] = [*prompt, *found[:, row]]
    forward = nnx.jit(lambda model, tokens: model(tokens)[0].argmax(-1))
    likeliest = np.asarray(forward(model, sequences))
    for row, prompt in enumerate(PROMPTS):
        expected = likeliest[row, len(prompt) - 1 : len(prompt) - 1 + TOKENS]
        np.testing.assert_array_equal(found[:, row], expected)


def test_tokens_do_not_depend_on_how_many_are_wanted(model):
    """Programs append several; 64 after a prompt of 64 fill the cache to its last slot."""
    many = np.array(list(generate(model, PROMPTS, max_tokens=67, sampling=GREEDY)))
    assert many.shape == (67, 4)
    for count in (1, 2, 5, 6, 64):
        found = list(generate(model, PROMPTS, max_tokens=count, sampling=GREEDY))
        np.testing.assert_array_equal(found, many[:count])


def test_a_sequence_does_not_depend_on_those_beside_it(model):
    together = continued(model, sampling=GREEDY)
    for row, prompt in enumerate(PROMPTS):
        alike = continued(model, [prompt] * 4, sampling=GREEDY)
        np.testing.assert_array_equal(alike, together[:, [row] * 4])
        alone = continued(model, [prompt], sampling=GREEDY)
        np.testing.assert_array_equal(alone, together[:, [row]])


def test_a_seed_decides(model):
    first, again, other = (continued(model, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_every_token_is_drawn_for_itself():
    model = make()
    model.embed.embedding.set_value(jnp.asarray(np.zeros((257, 32), np.float32)))
    prompts = [[1]] * 4  # all alike, and every token is as likely as any other
    tokens = [continued(model, prompts, seed=seeds.integer()) for _ in range(3)]
    tokens = np.concatenate(tokens, axis=1)
    for draws in (tokens, tokens.T):  # of each step, of each sequence
        for a, b in itertools.combinations(draws, 2):
            assert np.mean(a == b) < 0.5


def test_stop_tokens_end_each_sequence_by_itself(model):
    free = continued(model, seed=3)
    stops = free[[7, 4, 5, 2], range(4)]
    ends = [np.isin(free[:, row], stops).argmax() for row in range(4)]
    stopped = continued(model, seed=3, stop_ids=stops)
    assert len(stopped) == max(ends)
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(stopped[:end, row], free[:end, row])
        assert (stopped[end:, row] == ENDED).all()


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "says"),
    [
        ([], 3, "got \\[\\]"),
        ([[1], []], 3, "got \\[1, 0\\]"),
        ([[1]], -1, "max_tokens=-1"),
        ([[1]], 2.5, "max_tokens must be an integer, got 2.5"),
        ([[1.0]], 3, r"prompts\[0\] must hold token ids, got float64"),
        ([[1], [0, 257]], 3, r"prompts\[1\] holds token 257, .* 0 to 256"),
        ([np.array([2, -1])], 3, r"prompts\[0\] holds token -1"),
    ],
)
def test_what_cannot_be_continued(model, prompts, max_tokens, says):
    with pytest.raises(ValueError, match=says):
        generate(model, prompts, max_tokens=max_tokens)


@pytest.mark.parametrize("seed", [True, 1.5, -1, 2**32])
def test_a_seed_is_an_integer_of_32_bits(model, seed):
    with pytest.raises(ValueError, match=f"seed must be an integer from 0 to .*, got {seed}$"):
        generate(model, [[1]], max_tokens=1, seed=seed)


def test_no_tokens_are_wanted(model):
    assert list(generate(model, [[1]], max_tokens=0, sampling=GREEDY)) == []


def test_text_is_streamed_in_whole_characters():
    tokenizer = ByteTokenizer()
    prompt, text = tokenizer.encode(["d\u00e9f "])[0], "x = '\u6f22' \u00e9!"
    pieces = list(stream_text(tokenizer, prompt, tokenizer.encode([text])[0]))
    assert "".join(pieces) == text and "\u6f22" in pieces and len(pieces) > 8
    cut = tokenizer.encode(["a\u6f22"])[0][:-1]  # ends within a character
    assert "".join(stream_text(tokenizer, prompt, cut)) == "a\ufffd"


def with_spaces_in_words():
    """A tokenizer that, as SentencePiece's, marks spaces in tokens and drops a text's first."""
    vocabulary = {"</s>": 0, "\u2581": 1, "\u2581a": 2, "b": 3, "\u2581c\u00e9": 4}
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocabulary, merges=[]))
    backend.add_special_tokens(["</s>"])
    backend.decoder = hf.decoders.Metaspace()
    return SubwordTokenizer(backend, "</s>")


@pytest.mark.parametrize(
    "tokenizer",
    [
        ByteTokenizer(),
        train_bpe(["d\u00e9f \u6f22 = '\u6f22\u5b57' + \u00e9\u00e9 \u6f22\u5b57"] * 3, 262),
        with_spaces_in_words(),
    ],
    ids=["bytes", "bpe", "spaces in words"],
)
def test_streamed_text_is_that_of_all_tokens_together(tokenizer):
    for count in (0, 1, 40, 300):
        ids = seeds.rng().integers(0, tokenizer.size, 2 + count).tolist()
        prompt, new = [*ids[: -count or None], 1, 2], ids[len(ids) - count :]
        whole = tokenizer.decode([*prompt, *new])
        assert (
            "".join(stream_text(tokenizer, prompt, new)) == whole[len(tokenizer.decode(prompt)) :]
        )


class Counting(ByteTokenizer):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, ids):
        type(self).decoded += len(ids)
        return super().decode(ids)


def test_a_token_of_a_long_text_costs_no_more_than_that_of_a_short_one():
    prompt, new = [97] * 5000, [98] * 1000
    assert "".join(stream_text(Counting(), prompt, new)) == "b" * 1000
    assert Counting.decoded < 10 * len(new)
