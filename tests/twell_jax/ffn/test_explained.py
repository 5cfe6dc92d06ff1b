"""What `explain` says of blocks and of cards that are not here, and of what to change."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.devices import H100, abstract_gpu
from tests.twell_jax.ffn.shapes import shapes
from twell_jax import Biases, SparseMLP, explain, sparse_ffn
from twell_jax.ffn import measured, remedies
from twell_jax.ffn.measured import Block

H100_NAME = "NVIDIA H100 80GB HBM3"


def remedy(*operands, device=H100_NAME, **options):
    """What `explain` says behind the algorithm; None if it says nothing more."""
    *_, served, last = explain(*operands, device=device, **options).splitlines()
    return last.strip() if served.strip().startswith("dense, by xla") else None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"m": 65}, None),  # a dense call whatever one changes
        ({"dtype": jnp.float32, "gated": False}, None),
        ({"dtype": jnp.float32, "implementation": "xla"}, None),
        ({"dtype": jnp.float32}, "x is float32: bfloat16 would be served, by unions"),
        ({"dtype": jnp.float32, "m": 8}, "x is float32: bfloat16 would be served, by few_tokens"),
        (
            {"d": 100, "h": 200},
            "D is 100, H is 200: D = 128 and H = 256 would be served, by unions",
        ),
        ({"activation": "silu"}, "the activation is silu: relu would be served, by unions"),
        ({"biases": True}, "there are biases: no biases would be served, by unions"),
        ({"d": 9000}, None),
    ],
)
def test_explain_says_what_to_change(change, says):
    options = {name: change[name] for name in ("implementation", "activation") if name in change}
    of_shapes = {name: change[name] for name in ("d", "h", "dtype", "gated") if name in change}
    operands = shapes(change.get("m", 4096), **of_shapes)
    if "biases" in change:
        options["biases"] = Biases(down=jax.ShapeDtypeStruct((2048,), jnp.bfloat16))
    assert remedy(*operands, **options) == says
    assert remedy(*operands, device="NVIDIA A100-SXM4-80GB", **options) is None


def test_explain_answers_for_a_card_that_is_not_here():
    assert "unions, by mosaic" in explain(*shapes(4096), device=H100_NAME)
    assert "unions, by mosaic" in explain(*shapes(4096), device="h200")
    with jax.sharding.use_abstract_mesh(H100):
        assert "unions, by mosaic" in explain(*shapes(4096))
        assert "got NVIDIA B200\n" in explain(*shapes(4096), device="NVIDIA B200")
    assert "not unions: measured for Hopper alone\n" in explain(
        *shapes(4096), device="NVIDIA A100-SXM4-80GB"
    )
    split = abstract_gpu("NVIDIA B200", (2, 1))
    with jax.sharding.use_abstract_mesh(split):  # whose axes stay
        assert explain(*shapes(4096), device=H100_NAME).startswith("2048 tokens on a device")
    for name in (7, " "):
        with pytest.raises(ValueError, match="device must be the name of a GPU, such as"):
            explain(*shapes(4), device=name)


def test_explain_takes_what_sparse_ffn_takes():
    lists, wide = [[1.0, 2.0]], np.ones((6, 2))  # of float64, which JAX makes float32 of
    y, _ = sparse_ffn(lists, wide, wide, nnx.Param(jnp.ones((6, 2))), live=3)
    np.testing.assert_array_equal(y, [[27, 27]])  # 3 of 6 neurons, each of 3 * 3
    assert "dense, by xla" in explain(lists, wide, wide, nnx.Param(jnp.ones((6, 2))), live=3)
    for function in (sparse_ffn, explain):
        with pytest.raises(ValueError, match="live must be from 0 to 6, got 7"):
            function(lists, wide, wide, wide, live=7)


def test_explain_takes_a_module():
    def make(**options):
        return nnx.eval_shape(lambda: SparseMLP(128, 256, rngs=nnx.Rngs(0), **options))

    x = jax.ShapeDtypeStruct((4096, 128), jnp.float32)
    assert remedy(make(), x) == "x is float32: bfloat16 would be served, by unions"
    in_bf16 = explain(make(dtype="bfloat16", live=3), x, device=H100_NAME)
    assert in_bf16.splitlines()[-1].strip().startswith("unions, by mosaic")
    assert "not unions" in explain(make(dtype="bfloat16"), x, gradients="dense", return_stats=True)
    mlp = SparseMLP(4, 6, use_bias=True, rngs=nnx.Rngs(0))
    assert "dense, by xla" in explain(mlp, np.ones((3, 4), np.int32))
    with pytest.raises(
        TypeError, match=r"a SparseMLP and x, .* got Linear; pass one of its blocks"
    ):
        explain(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), x)


@pytest.mark.parametrize(
    ("change", "command"),
    [
        ({}, "python -m twell_jax.measure 3072 8192"),
        ({"gated": False}, "python -m twell_jax.measure 3072 8192 --no-gate"),
        ({"dtype": jnp.float16}, "python -m twell_jax.measure 3072 8192 --dtype float16"),
        ({"d": 2048, "h": 5632, "device": "NVIDIA H20"}, "python -m twell_jax.measure 2048 5632"),
        ({"d": 2048, "h": 5632}, None),  # of which there are records
        ({"device": "NVIDIA A100-SXM4-80GB"}, "python -m twell_jax.measure 3072 8192"),
        ({"device": "NVIDIA B200"}, None),
        ({"dtype": jnp.float32}, None),
        ({"activation": "silu"}, None),
        ({"implementation": "mosaic"}, None),
        ({"live": 7}, None),  # which is not timed
    ],
)
def test_explain_names_the_command_that_measures_a_block_without_a_record(change, command):
    options = {k: change[k] for k in ("activation", "implementation", "live") if k in change}
    of_shapes = {k: change[k] for k in ("d", "h", "dtype", "gated") if k in change}
    operands = shapes(4096, **{"d": 3072, "h": 8192} | of_shapes)
    says = explain(*operands, device=change.get("device", H100_NAME), **options)
    named = re.findall(r"^  not measured: (.*) would decide by measurement$", says, re.MULTILINE)
    assert named == ([command] if command else [])


def test_what_was_measured_here_needs_no_command_and_decides_what_to_change(tmp_path, monkeypatch):
    monkeypatch.setenv("TWELL_JAX_CACHE", str(tmp_path))
    path = measured.keep(H100_NAME, Block(3072, 8192, True, "bfloat16"), {4096: {"dense": 1.0}}, {})
    says = explain(*shapes(4096, 3072, 8192), device=H100_NAME)
    assert f"dense, by xla ({path})" in says and "would" not in says
    # bfloat16 would be no faster
    in_float32 = shapes(4096, 3072, 8192, dtype=jnp.float32)
    assert "would be served" not in explain(*in_float32, device=H100_NAME)
    assert "would be served" in explain(*in_float32, device="NVIDIA H200")


@pytest.mark.parametrize(
    ("change", "warned"),
    [
        ({"dtype": jnp.float32}, "x is float32: bfloat16 would be served, by unions"),
        ({"h": 200}, "H is 200: H = 256 would be served, by unions"),
        ({}, None),
        ({"dtype": jnp.float32, "implementation": "xla"}, None),
        ({"dtype": jnp.float32, "activation": "silu"}, None),  # the dense twin
        ({"dtype": jnp.float32, "gpu": abstract_gpu("NVIDIA A100-SXM4-80GB")}, None),
    ],
)
def test_a_block_that_goes_dense_on_a_hopper_gpu_is_one_warning(change, warned, caplog):
    remedies.warn_once.cache_clear()
    gpu = change.get("gpu", H100)
    operands = shapes(4096, **{k: change[k] for k in ("h", "dtype") if k in change})
    options = {k: change[k] for k in ("implementation", "activation") if k in change}
    with jax.sharding.use_abstract_mesh(gpu):
        for _ in range(2):
            jax.eval_shape(lambda *a: sparse_ffn(*a, **options), *operands)
    assert [message.split(": ", 1)[1].split(";")[0] for message in caplog.messages] == (
        [warned] if warned else []
    )
