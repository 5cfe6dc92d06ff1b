import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.equations import equations
from twell_jax.config import ModelConfig
from twell_jax.models import Transformer, graphdef

CONFIG = ModelConfig(
    vocab_size=64, context=16, d_model=32, layers=3, heads=2, d_ff=48, dtype="bfloat16"
)


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize("remat", ["none", "dots", "block"])
def test_matrices_are_converted_to_the_compute_dtype_once(remat, unroll):
    """All layers at once, before both passes; the gradients come back likewise."""
    config = CONFIG.model_copy(update={"remat": remat})
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graph, params = graphdef(config), nnx.state(model)

    def loss(params, tokens):
        x, _ = nnx.merge(graph, params).hidden(tokens, unroll=unroll)
        return jnp.sum(x, dtype=jnp.float32)

    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    matrices = [leaf.shape for leaf in jax.tree.leaves(params["blocks"]) if leaf.ndim > 2]
    assert len(matrices) == 7
    of_layers = {shape[1:] for shape in matrices}
    converted = [
        (equation.outvars[0].aval.dtype, equation.outvars[0].aval.shape)
        for equation in equations(jax.grad(loss), params, tokens)
        if equation.primitive.name == "convert_element_type"
    ]
    for dtype in (jnp.bfloat16, jnp.float32):
        assert sorted(s for d, s in converted if d == dtype and s in matrices) == sorted(matrices)
        assert not [s for d, s in converted if d == dtype and s in of_layers]
