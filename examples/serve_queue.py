"""Serves a queue of 100 prompts of mixed lengths through 8 slots: python examples/serve_queue.py

A sequence that ends makes room for the next prompt while the others go on, as in a server. With the
directory of a run or of a model in Hugging Face's format as argument, its model writes; without,
one with random weights.
"""

import argparse
import time
from collections import deque

import numpy as np
from flax import nnx

from twell_jax.config import ModelConfig
from twell_jax.inference import GREEDY, SlotDecoder, free, load
from twell_jax.models import Transformer

SLOTS, PROMPTS, LONGEST, MOST_NEW = 8, 100, 100, 30


def random_model() -> Transformer:
    config = ModelConfig(
        vocab_size=257, context=128, d_model=64, layers=2, heads=4, d_ff=256, dtype="float32"
    )
    return Transformer(config, rngs=nnx.Rngs(0))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("directory", metavar="DIRECTORY", nargs="?")
directory = parser.parse_args().directory
try:
    model = load(directory).model if directory else random_model()
except (ValueError, OSError) as error:  # what is no model
    parser.error(str(error))
rng = np.random.default_rng(0)
queue = deque(
    (number, rng.integers(0, model.config.vocab_size, rng.integers(1, LONGEST)), count)
    for number, count in enumerate(rng.integers(1, MOST_NEW + 1, PROMPTS))
)
decoder = SlotDecoder(model, capacity=LONGEST + MOST_NEW, sampling=GREEDY)
slots = decoder.empty(SLOTS)
running: dict[int, tuple[int, int]] = {}  # by slot: the prompt's number, and the tokens it wants
answers: dict[int, list[int]] = {}
start = time.monotonic()
while queue or running:
    for slot in range(SLOTS):
        if slot not in running and queue:
            number, prompt, count = queue.popleft()
            token, slots = decoder.insert(slots, slot, prompt)
            running[slot], answers[number] = (number, count), [int(token)]
    for slot, (number, count) in list(running.items()):
        if len(answers[number]) == count:
            slots = free(slots, slot)
            del running[slot]
    if running:
        tokens, slots = decoder.step(slots)
        for slot, token in enumerate(np.asarray(tokens)):
            if slot in running:
                answers[running[slot][0]].append(int(token))
total = sum(map(len, answers.values()))
print(f"{len(answers)} prompts answered with {total} tokens in {time.monotonic() - start:.1f} s")
