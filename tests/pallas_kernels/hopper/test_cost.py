"""What kernels tell XLA of their cost, where JAX takes it."""

import inspect
import json
import re

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode import active_counts, token_gate
from pallas_kernels.kernels import HOPPER
from pallas_kernels.weights import Weights

TAKEN = "cost_estimate" in inspect.signature(plgpu.kernel).parameters


def costs(text):
    """The costs that a lowered program names, in order."""
    found = re.findall(r'cost_estimate_json = "((?:[^"\\]|\\.)*)"', text)
    return [json.loads(escaped.replace("\\22", '"')) for escaped in found]


def test_a_gate_reads_its_operands_and_writes_its_format(lower):
    x = jax.ShapeDtypeStruct((1000, 256), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((384, 256), jnp.bfloat16)
    found = costs(lower(HOPPER.gate_pack, x, w))
    assert len(found) == TAKEN
    for cost in found:
        assert cost["flops"] == 2 * 1000 * 256 * 384
        assert cost["bytes_accessed"] == 2 * 256 * (1000 + 384) + 4 * 1000 * 2 * 32


def test_a_product_of_few_tokens_reads_the_matrix_of_one_layer(lower):
    def gate(x, w, layer):
        counts = jax.new_ref(active_counts.zeros(7, 8, 384))
        return token_gate.gate(x, Weights(None, w, w), layer, counts, batch=8)

    x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((7, 384, 256), jnp.bfloat16)
    found = costs(lower(gate, x, w, jax.ShapeDtypeStruct((1,), jnp.int32)))
    assert len(found) == TAKEN
    for cost in found:
        assert cost["flops"] == 2 * 8 * 256 * 384
        assert cost["bytes_accessed"] == 2 * (8 * 256 + 384 * 256 + 8 * 384)
