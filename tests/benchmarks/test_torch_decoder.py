"""The decoder in torch against ours, (extra "peers")."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.packages import needed
from tests.twell_jax import drawn
from twell_jax.models import KVCache

torch = needed("torch")
from benchmarks import torch_decoder  # noqa: E402 (it needs torch)

pytestmark = pytest.mark.peers

SHAPE = {
    "vocab_size": 61, "context": 16, "d_model": 32, "layers": 2, "heads": 4, "d_ff": 48,
    "dtype": "float32", "init_scale": 0.4, "activation": "silu",
}  # fmt: skip
CHANGES = {
    "default": {},
    "multi-query, not gated": {"kv_heads": 1, "gated": False, "layers": 3},
    "grouped, untied, wide heads, biases": {
        "kv_heads": 2, "tie_embeddings": False, "head_size": 12, "attention_bias": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_logits_are_ours(changes):
    model = drawn.transformer(**(SHAPE | changes))
    # Norm scales start at 1, biases at 0; here they must matter.
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("scale", "bias"):
            leaf[...] = jnp.linspace(0.5, 2.0, leaf.size).reshape(leaf.shape)
    tokens = seeds.rng().integers(0, 61, (2, 12))
    weights, ours = torch_decoder.weights_of(model), KVCache.empty(model.config, 2, 14)
    theirs = torch_decoder.copied(ours)
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 12)):
        part = tokens[:, start:stop]
        expected, ours = model.decode(part, ours)
        found = torch_decoder.decode(model.config, weights, torch.from_numpy(part), theirs, start)
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-4, rtol=1e-4)
