"""Fine-tunes a checkpoint in Hugging Face's format with L1, so that fewer neurons are active.

`python examples/finetune.py DIRECTORY OUT` reads a ReLU Llama or Qwen2 model from DIRECTORY and
writes to OUT. Without arguments it first makes a small random model. It trains on its own source.
"""

import argparse
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from twell_jax.config import ModelConfig
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import from_pretrained, save_pretrained
from twell_jax.models.pretrained import tokenizer as pretrained_tokenizer
from twell_jax.models.transformer import Transformer

CONTEXT, L1_COEFFICIENT = 64, 1e-2


def random_checkpoint() -> Path:
    config = ModelConfig(
        vocab_size=257, context=CONTEXT, d_model=64, layers=2, heads=4, d_ff=256, dtype="float32"
    )
    directory = Path(tempfile.mkdtemp())
    save_pretrained(directory, Transformer(config, rngs=nnx.Rngs(0)), ByteTokenizer())
    return directory


@nnx.jit
def step(model, optimizer, tokens):
    def loss(model):
        logits, stats = model(tokens[:, :-1])  # stats: one value per layer
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean() + L1_COEFFICIENT * stats.l1.mean(), (losses.mean(), stats.nnz.mean())

    grads, aux = nnx.grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return aux


parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [DIRECTORY OUT]")
parser.add_argument("paths", nargs="*", type=Path, help=argparse.SUPPRESS)
paths = parser.parse_args().paths
if len(paths) not in (0, 2):
    parser.error("DIRECTORY and OUT are given together, or neither")
source, out = paths or (random_checkpoint(), Path(tempfile.mkdtemp()))
try:
    model = from_pretrained(source, param_dtype="float32")
    tokenizer = pretrained_tokenizer.load(source)
except (ValueError, OSError) as error:  # what is no such model
    parser.error(str(error))
optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
(text,) = tokenizer.encode([Path(__file__).read_text()])
windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
random = np.random.default_rng(0)
for i in range(61):
    batch = jnp.asarray(windows[random.integers(len(windows), size=16)].astype(np.int32))
    ce, nnz = step(model, optimizer, batch)
    if i % 20 == 0:
        print(f"step {i}: cross-entropy {ce:.2f}, neurons per token: {nnz:.0f}")
save_pretrained(out, model, tokenizer, source=source)
print(f"model: {out}")
