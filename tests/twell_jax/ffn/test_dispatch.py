"""Who serves: the table at each of its boundaries, without a GPU, and what it says."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from benchmarks.record import RESULTS
from pallas_kernels.kernels import REFERENCE
from tests.equations import kernel_calls
from twell_jax import Biases, CannotServe, explain, sparse_ffn
from twell_jax.ffn import dispatch
from twell_jax.ffn.algorithms import Case, Request
from twell_jax.ffn.dispatch import RULES, select

H = 1408


def abstract_gpu(name, shape=(1, 1), axes=("data", "fsdp")):
    device = AbstractDevice(device_kind=name, num_cores=132, platform="gpu")
    return AbstractMesh(shape, axes, 2 * (AxisType.Auto,), abstract_device=device)


H100 = abstract_gpu("NVIDIA H100 80GB HBM3")


def algorithm(case, **named):
    return select(case, Request(**named)).rule.algorithm


def case(tokens, gated=True, back_end="Hopper", **facts):
    return Case(tokens, 512, H, gated, back_end=back_end, **facts)


def by_hand(tokens, gated):
    """What `implementation=None` takes, written without the table."""
    if tokens <= 64:
        return "few_tokens"
    if tokens < 1024:
        return "dense_block"
    return "unions" if gated else "dense"


@pytest.mark.parametrize("gated", [True, False])
def test_what_the_default_takes(gated):
    for m in (1, 2, 15, 16, 17, 31, 32, 33, 34, 63, 64, 65, 66, 1023, 1024, 1025, 16384):
        assert algorithm(case(m, gated)) == by_hand(m, gated), m
        assert algorithm(case(m, gated, None, no_back_end="no GPU")) == "dense"


@pytest.mark.parametrize(
    ("tokens", "named", "expected"),
    [
        (1, {"implementation": "mosaic"}, "few_tokens"),
        (64, {"implementation": "mosaic"}, "few_tokens"),
        (65, {"implementation": "mosaic"}, "dense_block"),
        (1023, {"implementation": "mosaic"}, "dense_block"),
        (1024, {"implementation": "mosaic"}, "unions"),
        (64, {"packing": "twell"}, "few_tokens"),
        (65, {"packing": "twell"}, "twell"),
        (16384, {"packing": "twell"}, "twell"),
        (64, {"packing": "unions"}, "few_tokens"),
        (65, {"packing": "unions"}, "unions"),
        (64, {"gradients": "sparse"}, "few_tokens"),
        (65, {"gradients": "sparse"}, "unions"),
        (1024, {"gradients": "sparse"}, "unions"),
        (16384, {"gradients": "dense"}, "unions"),
        (16384, {"implementation": "xla"}, "dense"),
        (65, {"gradients": "dense"}, "dense_block"),
    ],
)
def test_what_a_caller_names(tokens, named, expected):
    assert algorithm(case(tokens), **named) == expected
    if named.get("gradients") == "sparse":
        assert algorithm(case(tokens), gradients=0.5) == expected


def test_what_was_not_measured_takes_kernels_only_if_they_are_asked_for():
    for tokens, text in (
        (8, "not few_tokens: not measured with live neurons\n"),
        (1023, "not dense_block: its kernels compute all neurons: leave out live, or write"),
    ):
        live = case(tokens, live=True)
        assert algorithm(live) == "dense"
        assert algorithm(live, implementation="mosaic") != "dense"
        assert text in str(select(live, Request()))
    assert algorithm(case(1024, live=True)) == "unions"


def test_quantised_weights_take_kernels():
    for tokens, expected in ((8, "few_tokens"), (512, "dense"), (16384, "unions")):
        assert algorithm(case(tokens, quantised=("gate",))) == expected
    assert algorithm(case(512, quantised=("up",)), packing="twell") == "twell"


def test_rules_measured_on_one_back_end_do_not_hold_for_another():
    assert algorithm(case(16384, back_end="another")) == "dense"
    assert algorithm(case(16384, back_end="another"), implementation="mosaic") == "unions"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"implementation": "xla", "packing": "unions"}, "'xla' cannot serve packing='unions'"),
        ({"implementation": "xla", "gradients": "sparse"}, "'xla' cannot serve gradients='sparse'"),
        ({"implementation": "xla", "gradients": 0.5}, "'xla' cannot serve gradients=0.5"),
        ({"packing": "twell", "gradients": "sparse"}, "write packing='unions'"),
    ],
)
def test_what_contradicts_itself_is_named(named, message):
    with pytest.raises(CannotServe, match=message):
        select(case(2048), Request(**named))


@pytest.mark.parametrize(
    "named", ["implementation='mosaic'", "packing='twell'", "gradients='sparse'"]
)
def test_what_cannot_be_had_says_what_was_named_and_why(named):
    request = Request(**{named.split("=")[0]: named.split("'")[1]})
    with pytest.raises(CannotServe, match=f"^{named} cannot serve: no GPU$"):
        select(case(2048, back_end=None, no_back_end="no GPU"), request)


def test_each_rule_of_the_default_cites_a_record_that_is_there():
    default = RULES[: 1 + [rule.algorithm for rule in RULES].index("dense")]
    assert all((Path(RESULTS) / rule.record).exists() for rule in default)


def shapes(m, d=128, h=256, dtype=jnp.bfloat16):
    x, w = (jax.ShapeDtypeStruct((n, d), dtype) for n in (m, h))
    return x, w, w, w


def test_explain_says_which_rule_serves_and_why_not_those_before():
    with jax.sharding.use_abstract_mesh(H100):
        text = explain(*shapes(4096))
    first, *passed_over, last = text.splitlines()
    assert first == "4096 tokens on a device, 256 neurons, gated:"
    assert len(passed_over) == 2 and all("4096 tokens" in line for line in passed_over)
    assert last.strip().startswith("unions, by mosaic") and "ffn-goals" in last
    with pytest.raises(CannotServe, match="needs a Hopper GPU"):
        explain(*shapes(4096), implementation="mosaic")
    with pytest.raises(ValueError, match="w_up must be"):
        explain(shapes(4)[0], None, shapes(4)[0], shapes(4)[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "silu"}, "must be zero for most neurons, got silu"),
        ({"biases": Biases(down=jax.ShapeDtypeStruct((128,), jnp.bfloat16))}, "no biases"),
        ({"dtype": jnp.float32}, "bfloat16 or float16"),
        ({"d": 96}, "D a multiple of 64"),
        ({"h": 200}, "H a multiple of 128"),
    ],
)
def test_says_why_the_kernels_cannot_serve(change, reason):
    operands = shapes(4, **{k: change.pop(k) for k in ("d", "h", "dtype") if k in change})
    with jax.sharding.use_abstract_mesh(H100):
        with pytest.raises(CannotServe, match=reason):
            explain(*operands, implementation="mosaic", **change)
        assert "dense, by xla" in explain(*operands, **change)  # the default serves


def test_says_that_tokens_or_neurons_do_not_divide(reference_kernels):
    for axes, shape, m, h, reason in (
        (("data", "fsdp"), (4, 2), 801, 256, "801 tokens do not divide over 8 devices"),
        (("data", "tensor"), (2, 4), 100, 768, "768 neurons are no multiple of 128 on each of 4"),
    ):
        with (
            jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA H100", shape, axes)),
            pytest.raises(CannotServe, match=reason),
        ):
            explain(*shapes(m, h=h), implementation="mosaic")


def test_axes_may_be_explicit_but_not_beside_manual_ones(reference_kernels):
    def asked(*types):
        with jax.sharding.use_abstract_mesh(AbstractMesh((2, 4), ("data", "tensor"), types)):
            return explain(*shapes(4096, h=512), implementation="mosaic")

    assert "unions, by mosaic" in asked(AxisType.Explicit, AxisType.Explicit)
    with pytest.raises(CannotServe, match="inside shard_map the kernels cannot be split"):
        asked(AxisType.Manual, AxisType.Explicit)


@pytest.mark.parametrize(
    ("name", "serves"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H200", True),
        ("NVIDIA H20", True),
        ("NVIDIA H800", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA B200", False),
        ("NVIDIA GB200", False),
        ("NVIDIA B300 SXM6 AC", False),
        ("NVIDIA GB300", False),
    ],
)
def test_hopper_gpus_are_known_by_name(name, serves):
    with jax.sharding.use_abstract_mesh(abstract_gpu(name)):
        assert ("unions, by mosaic" in explain(*shapes(2048))) == serves


@pytest.mark.parametrize("tokens", [4, 2048])
@pytest.mark.parametrize("name", ["NVIDIA B200", "NVIDIA GB200", "NVIDIA B300 SXM6 AC"])
def test_blackwell_gpus_get_no_kernels(name, tokens):
    """An abstract device has no compute capability, and Mosaic then takes it for a Hopper GPU."""
    with jax.sharding.use_abstract_mesh(H100):
        assert kernel_calls(sparse_ffn, *shapes(tokens)) > 0
    with jax.sharding.use_abstract_mesh(abstract_gpu(name)):
        assert kernel_calls(sparse_ffn, *shapes(tokens)) == 0
        with pytest.raises(CannotServe, match=f"it needs a Hopper GPU, got {name}$"):
            explain(*shapes(tokens), implementation="mosaic")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a Hopper GPU can serve it")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])  # the latter suits no kernel
def test_says_that_there_is_no_gpu(dtype):
    with pytest.raises(CannotServe, match="'mosaic' cannot serve: it needs a Hopper GPU, got cpu"):
        explain(*shapes(4, dtype=dtype), implementation="mosaic")


def test_the_environment_names_an_implementation(monkeypatch):
    operands = [jnp.ones(a.shape, a.dtype) for a in shapes(4, h=200)]
    monkeypatch.setenv("TWELL_JAX_IMPLEMENTATION", "mosaic")
    with pytest.raises(CannotServe, match=r"TWELL_JAX_IMPLEMENTATION='mosaic' cannot serve"):
        sparse_ffn(*operands)
    sparse_ffn(*operands, implementation="xla")  # what the caller names is not overridden
    monkeypatch.setenv("TWELL_JAX_IMPLEMENTATION", "fast")
    with pytest.raises(ValueError, match=r"TWELL_JAX_IMPLEMENTATION must be .*'fast'"):
        sparse_ffn(*operands)


def test_the_first_back_end_that_can_serve_does(monkeypatch):
    cannot = REFERENCE._replace(name="cannot", unsupported=lambda w: "it is broken")
    w = jnp.ones((256, 128), jnp.bfloat16)
    monkeypatch.setattr(dispatch, "BACK_ENDS", (cannot, REFERENCE))
    assert dispatch.back_end(w) == (REFERENCE, None)
    monkeypatch.setattr(dispatch, "BACK_ENDS", (cannot, cannot))
    assert dispatch.back_end(w) == (None, "it is broken; it is broken")
