"""Which cards have kernels, told by their names."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.quantised import E4M3, Quantised
from tests.devices import H100, abstract_gpu
from tests.equations import kernel_calls
from tests.twell_jax.ffn.shapes import shapes
from twell_jax import CannotServe, explain, sparse_ffn
from twell_jax.ffn import dispatch


def algorithm(tokens, gpu, **options):
    with jax.sharding.use_abstract_mesh(gpu):
        return explain(*shapes(tokens), **options).splitlines()[-1].strip().partition(",")[0]


@pytest.mark.parametrize(
    "name",
    ["H100 80GB HBM3", "H200", "H20", "H800", "GH200 480GB"],
    ids=lambda name: name.split()[0],
)
def test_hopper_gpus_are_known_by_name(name):
    assert algorithm(2048, gpu=abstract_gpu(f"NVIDIA {name}")) == "unions"


@pytest.mark.parametrize(
    ("name", "serves"),
    [
        ("RTX PRO 6000 Blackwell Server Edition", "MMA"),
        ("GeForce RTX 5090", "MMA"),
        ("GeForce RTX 5060 Ti", "MMA"),
        ("GB10", "MMA"),
        ("A100-SXM4-80GB", "Ampere"),
        ("A10G", "Ampere"),
        ("RTX A6000", "Ampere"),
        ("GeForce RTX 3090", "Ampere"),
        ("GeForce RTX 4090", "Ampere"),
        ("RTX 5000 Ada Generation", "Ampere"),
        ("RTX 4000 SFF Ada Generation", "Ampere"),
        ("L40S", "Ampere"),
    ],
)
def test_gpus_that_nobody_measured_are_known_by_name(name, serves):
    gpu = abstract_gpu(f"NVIDIA {name}")
    assert algorithm(2048, gpu=gpu) == "dense"
    assert algorithm(2048, gpu=gpu, implementation="mosaic") == "unions"
    with jax.sharding.use_abstract_mesh(gpu):
        kernels, _ = dispatch.back_end(jax.ShapeDtypeStruct((512, 256), jnp.bfloat16))
        assert kernels.name == serves


@pytest.mark.parametrize(
    ("name", "in_8_bits"),
    [("A100-SXM4-80GB", "dense"), ("GeForce RTX 3090", "dense"), ("L40S", "unions")],
)
def test_kernels_of_cards_that_multiply_no_8_bit_floats_get_none(name, in_8_bits):
    """ptxas would refuse their programs."""
    gpu, (x, gate, up, down) = abstract_gpu(f"NVIDIA {name}"), shapes(2048)
    values = jax.ShapeDtypeStruct(gate.shape, E4M3)
    scale = jax.ShapeDtypeStruct((values.shape[0], 1), "float32")
    says = f"cannot serve: NVIDIA {name} does not multiply 8-bit floats; leave it out$"
    with jax.sharding.use_abstract_mesh(gpu):
        for call in (
            partial(explain, x, Quantised(values, scale), up, down),
            partial(explain, x, gate, up, down, matmul_dtype="float8"),
        ):
            if in_8_bits == "unions":
                assert "unions, by mosaic" in call(implementation="mosaic")
            else:
                with pytest.raises(CannotServe, match=says):
                    call(implementation="mosaic")
                assert "dense, by xla" in call()


@pytest.mark.parametrize("tokens", [4, 2048])
@pytest.mark.parametrize(
    "name",
    ["Tesla T4", "Quadro RTX 5000", "B200", "GB200", "B300 SXM6 AC", "GB300"],
)
def test_other_gpus_get_no_kernels(name, tokens):
    """An abstract device has no compute capability, and Mosaic then takes it for a Hopper GPU."""
    with jax.sharding.use_abstract_mesh(H100):
        assert kernel_calls(sparse_ffn, *shapes(tokens)) > 0
    with jax.sharding.use_abstract_mesh(abstract_gpu(f"NVIDIA {name}")):
        assert kernel_calls(sparse_ffn, *shapes(tokens)) == 0
        with pytest.raises(CannotServe, match=f"it needs an .*, got NVIDIA {name}; leave it out$"):
            explain(*shapes(tokens), implementation="mosaic")
