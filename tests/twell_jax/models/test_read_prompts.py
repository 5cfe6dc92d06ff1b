"""What reads prompts."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.devices import H100
from tests.equations import kernel_calls
from tests.twell_jax.models.decode_steps import abstract
from twell_jax.models import graphdef, read_prompts

MODEL = {"vocab_size": 320, "d_model": 1024, "layers": 2, "heads": 8, "d_ff": 256, "context": 1024}


@pytest.mark.parametrize(
    ("implementation", "tokens", "by_kernels"),
    [(None, 1023, False), (None, 1024, True), ("mosaic", 1023, True), ("mosaic", 3, True)],
)
def test_xla_reads_short_prompts_if_nobody_names_an_implementation(
    implementation, tokens, by_kernels
):
    config, params = abstract(**MODEL | {"ffn_implementation": implementation})
    graph = graphdef(config)

    def read(params, prompt):
        return read_prompts(nnx.merge(graph, params), prompt, 1024)

    prompt = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    with jax.sharding.use_abstract_mesh(H100):
        assert (kernel_calls(read, params, prompt) > 0) == by_kernels
