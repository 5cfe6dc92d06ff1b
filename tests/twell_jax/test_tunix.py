"""`replace_mlps` on Tunix's Llama3 and Qwen3, and training by its `PeftTrainer` (extra "tunix")."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import seeds
from tests.packages import needed
from twell_jax import SparseMLP, capture_stats
from twell_jax.convert import replace_mlps

needed("tunix")
from tunix.models.llama3 import model as llama3  # noqa: E402
from tunix.models.qwen3 import model as qwen3  # noqa: E402
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig  # noqa: E402

pytestmark = pytest.mark.peers
SHAPE = {
    "num_layers": 2, "vocab_size": 31, "embed_dim": 16, "hidden_dim": 64, "num_heads": 2,
    "head_dim": 8, "num_kv_heads": 1, "rope_theta": 10_000, "norm_eps": 1e-5,
}  # fmt: skip
TOKENS, STEPS = (8, 12), 40
MODELS = {
    "llama3": lambda rngs: llama3.Llama3(llama3.ModelConfig(**SHAPE), rngs=rngs),
    "qwen3": lambda rngs: qwen3.Qwen3(qwen3.ModelConfig(**SHAPE), rngs=rngs),
}


@pytest.fixture(params=MODELS)
def model(request):
    """With random weights, also where Tunix's own are zeros, which a checkpoint replaces."""
    model, rng = nnx.eval_shape(lambda: MODELS[request.param](nnx.Rngs(0))), seeds.rng()
    for _, leaf in nnx.to_flat_state(nnx.state(model)):
        values = 0.3 * rng.standard_normal(leaf.shape) + (leaf.ndim == 1)  # norms are about 1
        leaf.set_value(jnp.asarray(values, leaf.dtype))
    return model


def inputs(tokens):
    """The operands of a model of Tunix: tokens, positions, no cache, a causal mask."""
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    mask = jnp.broadcast_to(jnp.tri(length, dtype=bool), (len(tokens), length, length))
    return tokens, positions, None, mask


@nnx.jit
def logits(model, tokens):
    return model(*inputs(tokens))[0]


@nnx.jit
def nnz(model, tokens):
    """How many neurons are active for a token in each block."""
    _, stats = capture_stats(model)(*inputs(tokens))
    return {path: block.nnz for path, block in stats.modules.items()}


def test_outputs_are_as_before(model):
    tokens = seeds.rng().integers(0, 31, TOKENS)
    before = logits(model, tokens)
    replaced = replace_mlps(model, activation="silu")
    assert list(replaced) == ["layers/0/mlp", "layers/1/mlp"]
    assert all(type(mlp) is SparseMLP for mlp in replaced.values())
    after = logits(model, tokens)
    assert np.std(before) > 0.1
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


def loss(model, tokens):
    (found, _), stats = capture_stats(model)(*inputs(tokens))
    losses = optax.softmax_cross_entropy_with_integer_labels(found[:, :-1], tokens[:, 1:])
    return losses.mean() + 0.1 * stats.l1


def test_its_trainer_closes_gates(model):
    replaced = replace_mlps(model)
    tokens = seeds.rng().integers(0, 31, TOKENS)
    before = nnz(model, tokens)
    settings = TrainingConfig(eval_every_n_steps=STEPS + 1, max_steps=STEPS)
    trainer = PeftTrainer(model, optax.adam(1e-2), settings).with_loss_fn(loss)
    trainer.with_gen_model_input_fn(lambda batch: {"tokens": batch["tokens"]})
    trainer.train([{"tokens": tokens}] * STEPS)
    after = nnz(model, tokens)
    assert set(before) == set(replaced)
    for path in replaced:
        assert 0 < after[path] < 0.7 * before[path]
