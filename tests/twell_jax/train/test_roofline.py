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
    "changes",
    [
        [],
        ["model.gated=false", "model.qk_norm=true", "model.mlp_bias=true"],
        ["model.norm=layer", "model.mlp_bias=true"],
        ["model.tie_embeddings=false", "model.kv_heads=8"],
    ],
)
def test_parameters_are_those_of_the_model(changes):
    model = config.load(FILE, changes).model
    params = jax.eval_shape(lambda: nnx.state(Transformer(model, rngs=nnx.Rngs(0))))
    expected = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert roofline.parameters(model) == expected


def counted_flops(model):
    """FLOPs per token of forward and backward of one sequence, as XLA counts them."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((1, model.context), "int32")

    def loss(params, tokens):
        return (nnx.merge(graph, params)(tokens)[0] ** 2).sum()

    compiled = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
    return compiled.cost_analysis()["flops"] / model.context


def test_flops_are_those_that_xla_counts():
    # One layer: XLA counts the body of a scan once. Without remat nothing is computed twice.
    changes = ["model.layers=1", "model.d_model=256", "model.d_ff=1024", "model.heads=2",
               "model.vocab_size=512", "model.dtype=float32", "model.remat=none",
               "union_target=null"]  # fmt: skip
    short, long = (
        config.load(FILE, [*changes, f"model.context={context}"]).model for context in (64, 512)
    )
    at_short, at_long = counted_flops(short), counted_flops(long)
    # Only attention grows with the context. XLA computes all scores and masks half of them.
    per_position = (at_long - at_short) / (512 - 64)
    ours = (roofline.flops_per_token(long) - roofline.flops_per_token(short)) / (512 - 64)
    assert 2 * ours == pytest.approx(per_position, rel=0.05)
    weights = roofline.flops_per_token(short) - 64 * ours
    assert weights == pytest.approx(at_short - 64 * per_position, rel=0.02)


def test_attention_reads_no_more_than_a_sliding_window():
    model = config.load(FILE, ["model.context=4096"]).model
    of_weights = 6 * roofline.parameters(model)

    def of_attention(window):
        changed = model.model_copy(update={"sliding_window": window})
        return roofline.flops_per_token(changed) - of_weights

    assert of_attention(4096) == of_attention(9999) == of_attention(None)
    # Half of 1024 tokens on average in the first quarter of the sequence, then all of them.
    read = 512 / 4 + 1024 * 3 / 4
    assert of_attention(1024) == pytest.approx(of_attention(None) * read / 2048, rel=1e-6)


def test_costs_are_those_computed_by_hand():
    # A layer has 4 x 8 x 8 weights of attention, 3 x 8 x 32 of the feed-forward block, 2 x 8 of
    # norms; with 100 x 8 of the embedding and 8 of the last norm the model has 3928. Four copies
    # of it, each on two devices, take steps of two micro-batches of 2 x 16 tokens a device.
    run = config.load(
        FILE,
        ["model.layers=3", "model.d_model=8", "model.heads=2", "model.d_ff=32", "mesh.fsdp=2",
         "model.vocab_size=100", "model.context=16", "batch_tokens=512", "micro_batch=2",
         "union_target=null"],
    )  # fmt: skip
    assert roofline.parameters(run.model) == 3 * (256 + 768 + 16) + 808 == 3928
    # Forward and backward: 2 + 4 for each weight and token; 3 layers x 8 features x 8 tokens on
    # average, twice (for scores and values).
    per_token = 6 * 3928 + 6 * (3 * 8 * 8) * 2
    assert roofline.flops_per_token(run.model) == per_token == 25872
    # Without four of five neurons: their share of the gate's partner and of the last projection.
    sparse = per_token - 6 * 0.8 * 3 * 2 * 8 * 32
    assert roofline.flops_per_token(run.model, ffn_share=0.2) == pytest.approx(sparse)

    hardware = roofline.Hardware(flops=1000, memory=1, hbm=100, nvlink=10, network=1, per_host=4)
    cost = roofline.step(run, 8, hardware)
    assert cost.flops == 64 * 25872
    # In each of two micro-batches the other device's half of the weights, in 16 bits, comes twice,
    # and half of a gradient goes.
    assert cost.fsdp == 2 * 3 * 2 * 3928 / 2
    # A ring of four sends 3/4 of the half gradient, in 32 bits, twice.
    assert cost.data == 2 * 3 / 4 * 4 * 3928 / 2
    # Adam reads a gradient, a weight and two moments and writes the last three; a micro-batch
    # reads all weights in 16 bits twice, and reads two gradients and writes their sum.
    assert cost.hbm == 4 * 1964 * 7 + 2 * (2 * 2 * 3928 + 4 * 1964 * 3)
    # A weight, two moments, a gradient and the sum of gradients, in 32 bits.
    assert cost.state == 5 * 4 * 1964
    assert cost.seconds == pytest.approx(
        {
            "compute": 64 * 25.872,
            "memory": cost.hbm / 100,
            "fsdp collectives": cost.fsdp / 10,  # two devices of a host
            "data collectives": cost.data / 1,  # eight devices are two hosts
        }
    )


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
