"""Sequences that come and go in slots, against `generate` of each alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import seeds
from tests.twell_jax import drawn
from twell_jax.inference import ENDED, GREEDY, Sampling, generate
from twell_jax.inference.slots import SlotDecoder, free


@pytest.fixture(scope="module")
def model():
    return drawn.small(vocab_size=257, context=32)


def alone(model, prompt, count, sampling, seed):
    steps = generate(model, [prompt], max_tokens=count, sampling=sampling, seed=seed)
    return [int(token) for (token,) in steps]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sampling", "kv_cache_dtype"),
    [(GREEDY, None), (Sampling(temperature=0.8, top_k=20), None), (GREEDY, "float8")],
)
def test_a_sequence_is_as_if_alone_whenever_it_comes(sampling, kv_cache_dtype):
    """Two slots, five prompts: a free slot takes the next one while the other goes on."""
    model = drawn.small(vocab_size=257, context=32, kv_cache_dtype=kv_cache_dtype)
    rng = seeds.rng()
    wanted = [3, 9, 1, 6, 4]
    prompts = [rng.integers(0, 257, length).tolist() for length in (5, 63, 64, 1, 70)]
    decoder = SlotDecoder(model, capacity=120, sampling=sampling)
    slots, queue, held = decoder.empty(2), list(range(5)), {}
    texts = {number: [] for number in queue}
    while queue or held:
        for slot in {0, 1} - held.keys():
            if queue:
                held[slot] = number = queue.pop(0)
                token, slots = decoder.insert(slots, slot, prompts[number], seed=number)
                texts[number].append(int(token))
        for slot, number in list(held.items()):
            if len(texts[number]) == wanted[number]:
                slots = free(slots, slot)
                del held[slot]
        if held:
            tokens, slots = decoder.step(slots)
            for slot, number in held.items():
                texts[number].append(int(tokens[slot]))
    for number, prompt in enumerate(prompts):
        assert texts[number] == alone(model, prompt, wanted[number], sampling, number)


def test_seeds_are_those_of_generate(model):
    decoder = SlotDecoder(model, capacity=64, sampling=Sampling(temperature=0.8))
    token, _ = decoder.insert(decoder.empty(1), 0, [1, 2], seed=2**32 - 1)
    assert [int(token)] == alone(model, [1, 2], 1, Sampling(temperature=0.8), 2**32 - 1)
    for seed in (-1, 2**32, 1.5):
        with pytest.raises(ValueError, match="seed must be an integer from 0 to"):
            decoder.insert(decoder.empty(1), 0, [1, 2], seed=seed)


def test_jax_may_compute_in_64_bits(model):
    expected = alone(model, [1, 2], 3, GREEDY, 0)
    with jax.enable_x64(True):
        decoder = SlotDecoder(model, capacity=64, sampling=GREEDY)
        token, slots = decoder.insert(decoder.empty(2), 1, [1, 2])
        tokens = [int(token)]
        for _ in range(2):
            new, slots = decoder.step(slots)
            tokens.append(int(new[1]))
    assert tokens == expected


def test_free_slots_do_not_fill_up(model):
    decoder = SlotDecoder(model, capacity=64, sampling=GREEDY)
    slots = decoder.empty(2)
    _, slots = decoder.insert(slots, 1, [1, 2, 3])
    for _ in range(3):
        _, slots = decoder.step(slots)
    assert slots.cache.lengths.max() < 64
    tokens, slots = decoder.step(free(slots, 1))
    np.testing.assert_array_equal(tokens, [ENDED, ENDED])
    for _ in range(64):
        _, slots = decoder.step(slots)
    assert slots.cache.lengths.max() < 64


def test_a_sequence_that_has_filled_its_slot_ends_and_changes_no_other(model):
    decoder, prompts = SlotDecoder(model, capacity=64, sampling=GREEDY), ([5] * 61, [7, 8, 9])
    slots, texts = decoder.empty(2), [[], []]
    for slot, prompt in enumerate(prompts):
        token, slots = decoder.insert(slots, slot, prompt)
        texts[slot].append(int(token))
    for _ in range(9):
        tokens, slots = decoder.step(slots)
        for slot in range(2):
            texts[slot].append(int(tokens[slot]))
    assert texts[0][4:] == 6 * [ENDED]  # 61 tokens and three more are stored
    assert texts[0][:4] == alone(model, prompts[0], 4, GREEDY, 0)
    assert texts[1] == alone(model, prompts[1], 10, GREEDY, 0)
    np.testing.assert_array_equal(slots.is_taken, [False, True])


def test_only_a_slot_that_is_there_can_be_freed(model):
    slots = SlotDecoder(model, capacity=64).empty(2)
    for slot in (-1, 1.0, True):
        with pytest.raises(ValueError, match=f"slot must be an integer from 0 to 1, got {slot}"):
            free(slots, slot)
    for slot in (1, np.int64(1), jnp.argmax(jnp.array([0, 1]))):
        free(slots, slot)


@pytest.mark.parametrize("number", [0, -100, 64.0, True])
def test_slots_and_their_capacity_are_counted(model, number):
    says = f"must be an integer of at least 1, got {number}"
    with pytest.raises(ValueError, match=f"capacity {says}"):
        SlotDecoder(model, capacity=number)
    with pytest.raises(ValueError, match=f"count {says}"):
        SlotDecoder(model, capacity=64).empty(number)


@pytest.mark.parametrize(
    ("slot", "prompt", "says"),
    [
        (2, [1], "slot must be an integer from 0 to 1, got 2"),
        (0.5, [1], "slot must be an integer from 0 to 1, got 0.5"),
        (0, [], "prompt must hold token ids, got none"),
        (0, [[1, 2]], r"prompt must be a sequence of token ids, got an array \[1, 2\]"),
        (0, np.array(5), r"prompt must be a sequence of token ids, got an array \[\]"),
        (0, [300], "prompt holds token 300, but the model's vocabulary is 0 to 256"),
        (0, [1] * 64, "prompt has 64 tokens; a slot has room for 63"),
    ],
)
def test_what_fits_no_slot_is_named(model, slot, prompt, says):
    decoder = SlotDecoder(model, capacity=64)
    with pytest.raises(ValueError, match=says):
        decoder.insert(decoder.empty(2), slot, prompt)
