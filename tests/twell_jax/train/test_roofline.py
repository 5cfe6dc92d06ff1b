"""Costs on paper: counts against the real model, laws that hold for every mesh."""

import math

import jax
import pytest
from flax import nnx

from twell_jax import config
from twell_jax.config import ConfigError
from twell_jax.models.transformer import Transformer
from twell_jax.train import roofline

FILE = "configs/2b.yaml"


@pytest.mark.parametrize(
    "changes", [[], ["model.gated=false"], ["model.tie_embeddings=false", "model.kv_heads=8"]]
)
def test_parameters_are_those_of_the_model(changes):
    model = config.load(FILE, changes).model
    params = jax.eval_shape(lambda: nnx.state(Transformer(model, rngs=nnx.Rngs(0))))
    expected = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert roofline.parameters(model) == expected


def test_flops_are_those_that_xla_counts():
    # One layer: XLA counts the body of a scan once.
    changes = ["model.layers=1", "model.d_model=256", "model.d_ff=1024", "model.heads=4",
               "model.context=64", "model.vocab_size=512", "model.dtype=float32"]  # fmt: skip
    model = config.load(FILE, changes).model
    transformer = Transformer(model, rngs=nnx.Rngs(0))
    graph, params = nnx.split(transformer)
    tokens = jax.ShapeDtypeStruct((1, 64), "int32")

    def loss(params, tokens):
        return nnx.merge(graph, params)(tokens)[0].sum()

    counted = jax.jit(jax.grad(loss)).lower(params, tokens).compile().cost_analysis()["flops"]
    assert 64 * roofline.flops_per_token(model) == pytest.approx(counted, rel=0.15)


def test_one_device_sends_nothing_and_meshes_share_the_work():
    one = roofline.step(config.load(FILE), 1)
    assert one.fsdp == one.data == 0
    for fsdp in (1, 8, 64):
        many = roofline.step(config.load(FILE, [f"mesh.fsdp={fsdp}"]), 64)
        assert many.flops == pytest.approx(one.flops / 64)
        assert many.state == pytest.approx(one.state / fsdp)
        assert (many.fsdp > 0, many.data > 0) == (fsdp > 1, fsdp < 64)


def test_sparsity_saves_compute_and_no_communication():
    run = config.load(FILE, ["mesh.fsdp=8"])
    dense, sparse = (roofline.step(run, 64, ffn_share=share) for share in (1.0, 0.2))
    assert sparse.flops < dense.flops
    assert (sparse.fsdp, sparse.data) == (dense.fsdp, dense.data)


def test_accumulation_repeats_what_goes_over_fsdp_alone():
    once, twice = (
        roofline.step(config.load(FILE, ["mesh.fsdp=8", f"micro_batch={size}"]), 16)
        for size in (8, 4)
    )
    assert (twice.fsdp, twice.data) == (2 * once.fsdp, once.data)


@pytest.mark.parametrize(
    ("data", "devices", "message"),
    [
        (-1, 12, r"mesh.fsdp: 8 does not divide 12 devices"),
        (-1, 0, r"devices: there must be at least one, got 0"),
        (4, 64, r"mesh.data: 4 x fsdp=8 must use all 64 devices"),
    ],
)
def test_a_mesh_that_does_not_fit_is_an_error(data, devices, message):
    with pytest.raises(ConfigError, match=message):
        roofline.step(config.load(FILE, ["mesh.fsdp=8", f"mesh.data={data}"]), devices)
