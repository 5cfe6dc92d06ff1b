"""What `explain` says of blocks and of cards that are not here, and of what to change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.devices import H100, abstract_gpu
from tests.twell_jax.ffn.shapes import shapes
from twell_jax import Biases, SparseMLP, explain, sparse_ffn
from twell_jax.ffn import remedies

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
        assert "got NVIDIA A100\n" in explain(*shapes(4096), device="NVIDIA A100")
    split = abstract_gpu("NVIDIA B200", (2, 1))
    with jax.sharding.use_abstract_mesh(split):  # whose axes stay
        assert explain(*shapes(4096), device=H100_NAME).startswith("2048 tokens on a device")
    for name in (7, " "):
        with pytest.raises(ValueError, match="device must be the name of a GPU, such as"):
            explain(*shapes(4), device=name)


def test_explain_takes_a_module():
    def make(**options):
        return nnx.eval_shape(lambda: SparseMLP(128, 256, rngs=nnx.Rngs(0), **options))

    x = jax.ShapeDtypeStruct((4096, 128), jnp.float32)
    assert remedy(make(), x) == "x is float32: bfloat16 would be served, by unions"
    in_bf16 = explain(make(dtype="bfloat16", live=3), x, device=H100_NAME)
    assert in_bf16.splitlines()[-1].strip().startswith("unions, by mosaic")
    assert "not unions" in explain(make(dtype="bfloat16"), x, gradients="dense")
    mlp = SparseMLP(4, 6, use_bias=True, rngs=nnx.Rngs(0))
    assert "dense, by xla" in explain(mlp, np.ones((3, 4), np.int32))
    with pytest.raises(
        TypeError, match=r"a SparseMLP and x, .* got Linear; pass one of its blocks"
    ):
        explain(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), x)


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
