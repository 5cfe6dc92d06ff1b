"""Which layers' gradients are sparse: the rule, and training with it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from twell_jax.config import ModelConfig
from twell_jax.models.transformer import Transformer, graphdef
from twell_jax.train.gradient_plan import Choice


def test_a_layer_is_tried_when_few_neurons_fire_and_stays_while_it_fits():
    choice = Choice.dense(layers=2, d_ff=1600)
    choice = choice.after(nnz=[700, 90], overflow=[0, 0])
    assert choice.sparse == (False, True)
    choice = choice.after(nnz=[90, 300], overflow=[0, 0])
    assert choice.sparse == (True, True)


def test_after_an_overflow_it_takes_markedly_fewer():
    choice = Choice.dense(layers=1, d_ff=1600).after(nnz=[90], overflow=[0])
    choice = choice.after(nnz=[80], overflow=[0.5])
    assert choice.sparse == (False,)
    for nnz, is_sparse in ((79, False), (57, False), (55, True), (200, True)):
        choice = choice.after(nnz=[nnz], overflow=[0])
        assert choice.sparse == (is_sparse,)
    choice = choice.after(nnz=[1000], overflow=[1])
    assert choice.sparse == (False,) and choice.limits == pytest.approx((56,))


def test_a_choice_survives_json():
    choice = Choice.dense(layers=3, d_ff=512).after(nnz=[1, 99, 2], overflow=[0, 0, 0])
    assert Choice.restore(json.loads(json.dumps(dataclasses.asdict(choice)))) == choice


@pytest.mark.parametrize("remat", ["none", "block"])
def test_layers_of_a_model_may_differ_in_their_implementation(remat, monkeypatch):
    config = ModelConfig(
        vocab_size=257, context=16, d_model=32, layers=4, heads=2, d_ff=64, remat=remat
    )
    model = nnx.merge(graphdef(config), nnx.state(Transformer(config, rngs=nnx.Rngs(0))))
    tokens = jnp.asarray(np.random.default_rng().integers(0, 257, (2, 16)))
    called = []

    def sparse_ffn(*operands, implementation, **options):
        called.append(implementation)
        return original(*operands, implementation="xla", **options)

    from twell_jax.ffn import module as mlp

    original = mlp.sparse_ffn
    monkeypatch.setattr(mlp, "sparse_ffn", sparse_ffn)
    expected, same = model(tokens), called.copy()
    called.clear()
    mixed = model(tokens, ffn_implementations=("mosaic", None, None, "mosaic"))
    assert set(same) == {None} and called[0] == called[-1] == "mosaic" and None in called
    for ours, theirs in zip(*map(jax.tree.leaves, (mixed, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
