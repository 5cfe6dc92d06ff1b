"""A step of decoding with a model of which only the shapes exist."""

import jax
import jax.numpy as jnp
from flax import nnx

from twell_jax.config import ModelConfig
from twell_jax.models import KVCache, Transformer, decode, graphdef


def abstract(quantise=(), **settings):
    """A config, and abstract parameters of its model."""
    config = ModelConfig(**settings)
    return config, nnx.state(nnx.eval_shape(lambda: made(config, quantise)))


def made(config, quantise):
    model = Transformer(config, rngs=nnx.Rngs(0))
    model.quantise(quantise)
    return model


def one_step(config, batch, capacity, quantise=()):
    """A function that decodes a token of each sequence, of parameters and a cache; such a cache."""

    def step(params, cache):
        tokens = jnp.zeros((batch, 1), jnp.int32)
        return decode(nnx.merge(graphdef(config, quantise), params), tokens, cache)

    return step, jax.eval_shape(lambda: KVCache.empty(config, batch, capacity))
