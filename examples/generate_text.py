"""Continues two prompts at once: python examples/generate_text.py [DIRECTORY]

DIRECTORY is a run of train.py or a model in Hugging Face's format. Without it, a small model with
random weights writes random bytes.
"""

import argparse

from flax import nnx

from twell_jax.config import ModelConfig
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.inference import language_model
from twell_jax.inference.generation import ENDED, generate
from twell_jax.inference.language_model import LanguageModel
from twell_jax.inference.sampling import Sampling
from twell_jax.models.transformer import Transformer

PROMPTS = ["def add(a, b):", "import "]


def random_model() -> LanguageModel:
    config = ModelConfig(
        vocab_size=257, context=128, d_model=64, layers=2, heads=4, d_ff=256, dtype="float32"
    )
    tokenizer = ByteTokenizer()
    model = Transformer(config, rngs=nnx.Rngs(0))
    return LanguageModel(model, tokenizer, prefix=(), stop_ids=(tokenizer.eot_id,))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("directory", metavar="DIRECTORY", nargs="?")
directory = parser.parse_args().directory
try:
    lm = language_model.load(directory) if directory else random_model()
except (ValueError, OSError) as error:  # what is no model
    parser.error(str(error))
steps = generate(
    lm.model,
    [lm.encode(prompt) for prompt in PROMPTS],
    max_tokens=40,
    sampling=Sampling(temperature=0.8, top_p=0.95),
    stop_ids=lm.stop_ids,
    seed=0,
)
continuations: list[list[int]] = [[] for _ in PROMPTS]
for ids in steps:  # the next token of each sequence, as soon as it is computed
    for continuation, token in zip(continuations, ids, strict=True):
        if token != ENDED:
            continuation.append(int(token))
for prompt, continuation in zip(PROMPTS, continuations, strict=True):
    print(repr(prompt + lm.tokenizer.decode(continuation)))
