"""Models of random weights that NumPy draws, as JAX compiles a program for each shape."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests import seeds
from twell_jax.config import ModelConfig
from twell_jax.ffn import Biases, LiveWidth
from twell_jax.models import Transformer

# A large init_scale, so that attention and positions matter to untrained logits.
SMALL = {
    "vocab_size": 61, "context": 16, "d_model": 32, "layers": 2, "heads": 4, "d_ff": 48,
    "dtype": "float32", "init_scale": 0.4,
}  # fmt: skip


def small(**changes) -> Transformer:
    """A `transformer` of `SMALL` with changes."""
    return transformer(**SMALL | changes)


def transformer(**settings) -> Transformer:
    """As `Transformer` makes it from a `ModelConfig` of these settings."""
    config, rng = ModelConfig(**settings), seeds.rng()
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("scale", "bias"):
            values = np.full(leaf.shape, path[-1] == "scale")
        else:
            residual = path[-1] == "w_down" or path[-2] == "out"
            scale = config.init_scale / np.sqrt(2 * config.layers if residual else 1)
            values = scale * rng.standard_normal(leaf.shape)
        leaf.set_value(jnp.asarray(values, leaf.dtype))
    for _, leaf in nnx.to_flat_state(nnx.state(model, LiveWidth)):
        leaf.set_value(jnp.asarray(rng.integers(1, config.d_ff, leaf.shape), leaf.dtype))
    return model


def arguments(operands: dict) -> dict:
    """Those of `sparse_ffn`, of operands by name among which "b_gate", "b_up", "b_down" may be."""
    weights = {name: value for name, value in operands.items() if not name.startswith("b_")}
    biases = Biases(*(operands.get(f"b_{name}") for name in Biases._fields))
    return {"w_gate": None, **weights, "biases": biases}
