"""What tests of small models share: tokens, a loss and its gradients, and when two are close."""

import jax
import jax.numpy as jnp
from flax import nnx

from tests import seeds
from tests.errors import relative_error

END = 60  # of a document, in a vocabulary of 61


def draw_tokens(*shape):
    return seeds.rng().integers(0, END, shape)


def loss_and_gradients(module, tokens):
    """And the statistics."""

    def loss(module):
        logits, stats = module(tokens)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 3]) + 1e-2 * jnp.mean(stats.l1), stats

    (value, stats), gradients = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(module)
    return value, gradients, stats


def assert_close(a, b, tolerance=1e-5):
    assert relative_error(a, b) <= tolerance
