"""Greedy text in bfloat16, by the kernels of decoding, against that of a dense float32 model."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from tests.back_ends import by_each_that_decodes
from tests.twell_jax import drawn
from twell_jax.config import ModelConfig
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.inference import GREEDY, generate, generation
from twell_jax.models import Transformer, graphdef

MODEL = {
    "vocab_size": 257, "context": 96, "d_model": 1024, "layers": 2, "heads": 4, "head_size": 64,
    "kv_heads": 2, "d_ff": 256, "dtype": "float32", "init_scale": 0.06,
}  # fmt: skip
README = Path(__file__).parents[3] / "README.md"
TEXT = ByteTokenizer().encode([README.read_text(encoding="utf-8")])[0].astype(np.int32)
PASSAGES = TEXT[: 4 * MODEL["context"]].reshape(4, -1)
TOKENS = 32
# The starts of the passages, of different lengths; the last is as long as generation pads them to.
PROMPTS = [row[:n].tolist() for row, n in zip(PASSAGES, (31, 53, 16, 64), strict=True)]


@pytest.fixture(scope="module")
def trained():
    """A dense float32 model that knows the passages by heart."""
    graph, params = nnx.split(drawn.transformer(**MODEL))
    optimizer = optax.adam(1e-3)

    def loss(params):
        logits, _ = nnx.merge(graph, params)(PASSAGES[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, PASSAGES[:, 1:]).mean()

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(40):
        params, state = step(params, state)
    return nnx.merge(graph, params)


@pytest.fixture(autouse=True)
def new_programs(back_end):
    generation._programs.cache_clear()  # they have what served when they were compiled


def by_kernels(model, ffn) -> Transformer:
    """The model in bfloat16, whose decode steps are kernels, sparse ("mosaic") or dense ("xla")."""
    changes = {"dtype": "bfloat16", "param_dtype": "bfloat16", "decode_implementation": "mosaic"}
    state = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), nnx.state(model))
    return nnx.merge(graphdef(ModelConfig(**MODEL | changes, ffn_implementation=ffn)), state)


def continued(model, prompts=PROMPTS):
    """Greedy tokens, int `[steps, prompts]`."""
    return np.array(list(generate(model, prompts, max_tokens=TOKENS, sampling=GREEDY)))


@pytest.mark.slow
@by_each_that_decodes
@pytest.mark.parametrize("ffn", ["mosaic", "xla"])
def test_text_is_that_of_the_dense_model_in_float32(trained, ffn):
    expected = continued(trained)
    learnt = [row[len(prompt) :][:TOKENS] for row, prompt in zip(PASSAGES, PROMPTS, strict=True)]
    np.testing.assert_array_equal(expected, np.transpose(learnt))  # no close calls for rounding
    np.testing.assert_array_equal(continued(by_kernels(trained, ffn)), expected)


@pytest.mark.slow
@by_each_that_decodes
def test_a_text_does_not_depend_on_the_prompts_beside_it(trained):
    model = by_kernels(trained, "mosaic")
    together = continued(model)
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(continued(model, [prompt]), together[:, row : row + 1])
