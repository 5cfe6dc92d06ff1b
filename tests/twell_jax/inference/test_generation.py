"""Continued token sequences against the forward pass, and text as it is streamed."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.twell_jax import drawn
from tests.twell_jax.inference.token_kinds import TEXT, TOKENIZERS
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.inference import ENDED, GREEDY, Sampling, generate, generation, stream_text

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


def test_draws_do_not_depend_on_the_default_random_numbers(model):
    together = continued(model)
    with jax.default_prng_impl("rbg"):  # whose draws depend on how many are drawn together
        np.testing.assert_array_equal(continued(model), together)
        np.testing.assert_array_equal(continued(model, PROMPTS[:1]), together[:, :1])


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
    stopped = continued(model, seed=3, stop_ids={*stops.tolist()})
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
        (np.ones((2, 1, 3), int), 3, r"prompts\[0\] must be a sequence of .* an array \[1, 3\]"),
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


def shape_of(a):
    place = a.sharding if a.committed else None
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place)


# Kernels decode it in one launch, for which matrices have a layout of their own.
LAID_OUT = {
    "d_model": 512, "heads": 8, "d_ff": 2176, "dtype": "bfloat16", "param_dtype": "bfloat16",
    "decode_implementation": "mosaic",
}  # fmt: skip


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("form", ["unbound", "bound", "laid out"])
def test_each_program_is_compiled_once(caplog, request, reference_kernels, form, is_prepared):
    """Beside each other; one that the next call does not find would be compiled again."""
    model = make(**LAID_OUT if form == "laid out" else {})
    if form == "bound":
        nnx.update(model, jax.device_put(nnx.state(model), jax.devices()[0]))
    before = jax.config.jax_log_compiles
    request.addfinalizer(lambda: jax.config.update("jax_log_compiles", before))
    jax.config.update("jax_log_compiles", True)
    # programs of its own
    sampling = Sampling(temperature=0.5 + 0.1 * is_prepared + 0.01 * len(form))
    prompts, how = [[1, 2, 3]], {"max_tokens": 6, "sampling": sampling}
    if is_prepared:
        shapes = nnx.clone(model)
        nnx.update(shapes, jax.tree.map(shape_of, nnx.state(model)))
        generation.prepare(shapes, prompts, **how)
    for _ in range(2):
        assert len(list(generate(model, prompts, **how))) == 6
    compiled = re.findall(r"Finished XLA compilation of jit\((prefill|extend)\)", caplog.text)
    assert sorted(compiled) == ["extend", "prefill"]


def test_no_tokens_are_wanted(model):
    assert list(generate(model, [[1]], max_tokens=0, sampling=GREEDY)) == []


def test_new_tokens_decode_as_after_the_end_of_a_long_prompt():
    tokenizer = ByteTokenizer()
    one, two, three = tokenizer.encode(["\u6f22"])[0]
    for prompt, new, text in (
        ([*15 * b"a", one, *20 * b"a"], [two, three, *b"x"], "\ufffd\ufffdx"),
        ([*20 * b"a", one, two], [three, *b"x"], "x"),
    ):
        found = "".join(stream_text(tokenizer, prompt, new))
        assert found.removeprefix("\u6f22") == text  # which the prompt began, and they complete


def test_text_is_streamed_in_whole_characters():
    tokenizer = ByteTokenizer()
    prompt, text = tokenizer.encode(["d\u00e9f "])[0], "x = '\u6f22' \u00e9!"
    pieces = list(stream_text(tokenizer, prompt, tokenizer.encode([text])[0]))
    assert "".join(pieces) == text and "\u6f22" in pieces and len(pieces) > 8
    cut = tokenizer.encode(["a\u6f22"])[0][:-1]  # ends within a character
    assert "".join(stream_text(tokenizer, prompt, cut)) == "a\ufffd"


def draw_ids(draw, tokenizer):
    """Ids of a text of which some are missing, and among them drawn ones and ends of text."""
    ids = tokenizer.encode([TEXT])[0].tolist()
    for extra in (draw.integers(0, tokenizer.size + 1, 5).tolist(), [tokenizer.eot_id] * 40):
        if draw.integers(2):
            place = draw.integers(len(ids) + 1)
            ids[place:place] = extra
    return [token for token in ids if draw.integers(40)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_streamed_text_is_that_of_all_tokens_together(name):
    tokenizer, draw = TOKENIZERS[name](), seeds.rng()
    for _ in range(12):
        ids = draw_ids(draw, tokenizer)
        for cut in (0, *draw.integers(0, len(ids) + 1, 3)):
            before, whole = tokenizer.decode(ids[:cut]), tokenizer.decode(ids)
            while not whole.startswith(before):  # the prompt ends inside of a character
                before = before[:-1]
            assert before + "".join(stream_text(tokenizer, ids[:cut], ids[cut:])) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_that_no_later_token_changes_does_not_wait(name):
    """A word comes before the one after the next has begun."""
    tokenizer, words = TOKENIZERS[name](), ["don", "now", "don", "now", "don"]
    if name == "undecoded":
        words = ["a"] * 5
    taken, ids = [], [tokenizer.encode([" " + word])[0].tolist() for word in words]
    text = ""
    for piece in stream_text(tokenizer, [], (taken.append(i) or i for row in ids for i in row)):
        text += piece
        begun = int(np.searchsorted(np.cumsum([len(row) for row in ids]), len(taken))) + 1
        assert len(text.split()) >= begun - 1
    assert text.split() == words


def test_characters_after_a_prompt_that_ends_in_characters_that_the_vocabulary_lacks():
    tokenizer = TOKENIZERS["prepend"]()
    prompt = tokenizer.encode(["a " + "中" * 6])[0].tolist()  # 16 tokens begin inside one
    new = tokenizer.encode(["中文 b"])[0].tolist()[1:]
    assert "".join(stream_text(tokenizer, prompt, new)) == "中文 b"


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
