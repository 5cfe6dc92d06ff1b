"""Continued token sequences against the forward pass, and text as it is streamed."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from twell_jax.config import ModelConfig
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.inference import ENDED, GREEDY, generate, stream_text
from twell_jax.models import Transformer

MODEL = {
    "vocab_size": 257,
    "context": 32,
    "d_model": 32,
    "layers": 2,
    "heads": 2,
    "d_ff": 64,
    "dtype": "float32",
    "init_scale": 0.3,
}


@pytest.fixture(scope="module")
def model():
    return Transformer(ModelConfig(**MODEL), rngs=nnx.Rngs(0))


# Of different lengths; one is as long as generation pads them to.
PROMPTS = [[5], [7, 250, 3, 99, 4], list(range(64)), [1, 2]]


def test_greedy_tokens_are_those_of_the_whole_forward_pass(model):
    steps = list(generate(model, PROMPTS, max_tokens=9, sampling=GREEDY))
    assert len(steps) == 9 and all(step.shape == (4,) for step in steps)
    forward = nnx.jit(lambda model, tokens: model(tokens)[0])
    for row, prompt in enumerate(PROMPTS):
        sequence = [*prompt, *(step[row] for step in steps)]
        logits = forward(model, jnp.asarray(sequence + [0] * (80 - len(sequence)))[None])[0]
        expected = jnp.argmax(logits[len(prompt) - 1 : len(sequence) - 1], axis=-1)
        np.testing.assert_array_equal(sequence[len(prompt) :], expected)


def test_a_sequence_does_not_depend_on_those_beside_it(model):
    together = np.array(list(generate(model, PROMPTS, max_tokens=9, sampling=GREEDY)))
    for row, prompt in enumerate(PROMPTS):
        alone = list(generate(model, [prompt], max_tokens=9, sampling=GREEDY))
        np.testing.assert_array_equal(np.array(alone)[:, 0], together[:, row])


def test_a_seed_decides(model):
    first, again, other = (
        np.array(list(generate(model, PROMPTS, max_tokens=12, seed=seed))) for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_every_token_is_drawn_for_itself():
    model = Transformer(ModelConfig(**MODEL), rngs=nnx.Rngs(0))
    model.embed.embedding[...] = jnp.zeros_like(model.embed.embedding[...])
    prompts, steps = [[1]] * 4, 20  # all alike, and every token is as likely as any other
    tokens = np.array(list(generate(model, prompts, max_tokens=steps, seed=seeds.integer())))
    others = np.array(list(generate(model, prompts, max_tokens=steps, seed=seeds.integer())))
    drawn = np.concatenate([tokens, others], axis=1)
    for draws in (drawn, drawn.T):  # of each step, of each sequence
        for a, b in itertools.combinations(draws, 2):
            assert np.mean(a == b) < 0.5


def test_stop_tokens_end_each_sequence_by_itself(model):
    free = np.array(list(generate(model, PROMPTS[:2], max_tokens=12, seed=3)))
    stops = [free[7, 0], free[4, 1]]
    ends = [np.isin(free[:, row], stops).argmax() for row in range(2)]
    stopped = np.array(list(generate(model, PROMPTS[:2], max_tokens=12, seed=3, stop_ids=stops)))
    assert len(stopped) == max(ends)
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(stopped[:end, row], free[:end, row])
        assert (stopped[end:, row] == ENDED).all()


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "says"),
    [([], 3, "got \\[\\]"), ([[1], []], 3, "got \\[1, 0\\]"), ([[1]], -1, "max_tokens=-1")],
)
def test_what_cannot_be_continued(model, prompts, max_tokens, says):
    with pytest.raises(ValueError, match=says):
        generate(model, prompts, max_tokens=max_tokens)


def test_no_tokens_are_wanted(model):
    assert list(generate(model, [[1]], max_tokens=0)) == []


def test_text_is_streamed_in_whole_characters():
    tokenizer = ByteTokenizer()
    prompt, text = tokenizer.encode(["d\u00e9f "])[0], "x = '\u6f22' \u00e9!"
    pieces = list(stream_text(tokenizer, prompt, tokenizer.encode([text])[0]))
    assert "".join(pieces) == text and "\u6f22" in pieces and len(pieces) > 8
    cut = tokenizer.encode(["a\u6f22"])[0][:-1]  # ends within a character
    assert "".join(stream_text(tokenizer, prompt, cut)) == "a\ufffd"
