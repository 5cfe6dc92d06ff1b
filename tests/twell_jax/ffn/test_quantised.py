"""Blocks with 8-bit weights: against the products of quantised operands in float64."""

import doctest

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from pallas_kernels import quantised as layout
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.twell_jax import drawn
from twell_jax import Biases, CannotServe, Quantised, SparseMLP, explain, sparse_ffn
from twell_jax.ffn import quantise, quantise_mlps, quantised
from twell_jax.models import KVCache, decode, sharding

D, H = 40, 72
NAMES = ("gate", "up", "down")
SUBSETS = [("gate",), ("gate", "up"), ("down",), NAMES]
MODEL = {
    "vocab_size": 61, "context": 16, "d_model": 32, "layers": 3, "heads": 4, "d_ff": 48,
    "dtype": "float32", "init_scale": 0.4,
}  # fmt: skip


def in_e4m3(a, axis):
    """`a` in float64, rounded to e4m3 with scales along an axis."""
    a = np.asarray(a, np.float64)
    largest = np.abs(a).max(axis, keepdims=True)
    scale = np.where(largest > 0, largest / 448, 1)
    return (a / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(float) * scale


def operands(m=23):
    """x with a zero and a large token, and weights with a dead neuron."""
    rng = seeds.rng()
    x, *weights = (rng.standard_normal((n, D)).astype(np.float32) for n in (m, H, H, H))
    x[3], x[4] = 0, 100 * x[4]
    weights[0][5] = 0
    return x, dict(zip(NAMES, weights, strict=True))


def reference(x, weights, chosen, gated):
    """h before it is quantised, and y of that h, with the chosen operands rounded to e4m3."""

    def times(a, name, axis):
        w = np.asarray(weights[name], np.float64)
        if name in chosen:
            a, w = in_e4m3(a, -1), in_e4m3(w, axis)
        return a @ (w.T if axis == -1 else w)

    up = times(np.asarray(x, np.float64), "up", -1)
    h = np.maximum(times(x, "gate", -1), 0) * up if gated else np.maximum(up, 0)
    return h, times(h, "down", -2)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("chosen", SUBSETS, ids="+".join)
def test_the_block_is_that_of_the_quantised_operands(chosen, gated):
    x, weights = operands()
    given = {
        f"w_{name}": quantise(w, axis=-2 if name == "down" else -1) if name in chosen else w
        for name, w in weights.items()
    }
    if not gated:
        given["w_gate"] = None
    y, stats = jax.jit(sparse_ffn)(x, **given)
    h, exact = reference(x, weights, chosen, gated)
    # An h in float32 that lies at the middle of two 8-bit floats may go to the other one.
    assert relative_error(y, exact) < (0.01 if "down" in chosen else 1e-5)
    assert y.dtype == jnp.float32 and np.all(y[3] == 0)
    assert stats.l1 == pytest.approx(np.abs(h).sum(1).mean(), rel=1e-5)
    assert stats.nnz == pytest.approx(np.count_nonzero(h, axis=1).mean(), rel=1e-6)


def test_8_bit_operands_cost_what_their_rounding_does():
    x, weights = operands(200)
    exact = reference(x, weights, (), gated=True)[1]
    made = [quantise(w, axis=-2 if name == "down" else -1) for name, w in weights.items()]
    error = relative_error(jax.jit(sparse_ffn)(x, *made)[0], exact)
    assert 0.005 < error < 0.1
    sixteen = jax.jit(sparse_ffn)(x.astype(jnp.bfloat16), *made)[0]
    assert sixteen.dtype == jnp.bfloat16 and relative_error(sixteen, exact) < error + 3 * ROUNDING


def test_leading_axes_and_vmap_change_nothing():
    x, weights = operands(24)
    made = [quantise(w, axis=-2 if name == "down" else -1) for name, w in weights.items()]
    expected = np.asarray(jax.jit(sparse_ffn)(x, *made)[0])
    y = jax.jit(sparse_ffn)(x.reshape(2, 3, 4, D), *made)[0]
    np.testing.assert_allclose(y.reshape(-1, D), expected, rtol=1e-5, atol=1e-5)
    mapped = jax.jit(jax.vmap(lambda x: sparse_ffn(x, *made)[0]))(x)
    np.testing.assert_allclose(mapped, expected, rtol=1e-5, atol=1e-5)


def test_bad_weights_are_refused_in_one_line():
    x, weights = operands()
    gate, up, down = (quantise(w) for w in weights.values())
    with pytest.raises(
        ValueError, match=r"w_down must .* \[1, 40\], as quantise\(w_down, axis=-2\)"
    ):
        sparse_ffn(x, gate, up, down)
    with pytest.raises(ValueError, match=r"w_up must .* \[72, 1\], as quantise\(w_up\) makes"):
        sparse_ffn(x, gate, quantise(weights["up"], axis=-2), weights["down"])
    with pytest.raises(ValueError, match=r"w_gate must be \[72, 40\]"):
        sparse_ffn(x, quantise(weights["gate"][:-1]), up, weights["down"])
    with pytest.raises(ValueError, match=r"w_up must have .*, got float8_e5m2"):
        wrong = Quantised(up.values.astype(jnp.float8_e5m2), up.scale)
        sparse_ffn(x, gate, wrong, weights["down"])


def test_kernels_take_them(reference_kernels):
    x = jax.ShapeDtypeStruct((2000, 128), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    gate = jax.eval_shape(quantise, w)
    for options, served in (
        ({"implementation": "mosaic"}, "  unions"),
        ({"packing": "unions"}, "  unions"),
        ({"packing": "twell"}, "  twell"),
    ):
        assert explain(x, gate, w, w, **options).splitlines()[-1].startswith(served)
    few = jax.ShapeDtypeStruct((3, 128), jnp.bfloat16)
    served = explain(few, w, gate, w, implementation="mosaic").splitlines()[-1]
    assert served.startswith("  few_tokens")
    with pytest.raises(CannotServe, match="Quantised weights have no gradients: leave"):
        explain(x, gate, w, w, gradients="sparse")
    down = jax.eval_shape(lambda w: quantise(w, axis=-2), w)
    with pytest.raises(CannotServe, match="the kernels take no Quantised w_down"):
        explain(x, gate, w, down, packing="unions")
    narrow = jax.ShapeDtypeStruct((256, 192), jnp.bfloat16)
    with pytest.raises(CannotServe, match="only with D a multiple of 128"):
        explain(
            jax.ShapeDtypeStruct((2000, 192), jnp.bfloat16),
            jax.eval_shape(quantise, narrow),
            narrow,
            narrow,
            packing="unions",
        )


def test_gradients_are_refused_in_one_line():
    x, weights = operands()
    gate = quantise(weights["gate"])

    def loss(x, scale):
        made = Quantised(gate.values, scale)
        return sparse_ffn(x, made, weights["up"], weights["down"])[0].sum()

    for argument in (0, 1):
        with pytest.raises(ValueError, match="no gradients; train arrays, and quantise them then"):
            jax.grad(loss, argument)(x, gate.scale)


@pytest.mark.parametrize("chosen", SUBSETS, ids="+".join)
def test_a_module_computes_with_quantised_weights(chosen):
    mlp = SparseMLP(D, H, use_bias=True, dtype=jnp.float32, rngs=nnx.Rngs(seeds.integer()))
    mlp.b_up[...] = jnp.linspace(-1, 1, H)
    x = jnp.asarray(operands()[0])
    made = {name: quantise(getattr(mlp, f"w_{name}")[...], quantised.AXES[name]) for name in chosen}
    weights = [made.get(name, getattr(mlp, f"w_{name}")) for name in NAMES]
    expected = sparse_ffn(x, *weights, biases=Biases(mlp.b_gate, mlp.b_up, mlp.b_down))[0]
    quantise_mlps(mlp, chosen)
    assert quantised.quantised_projections(mlp) == list(chosen)
    np.testing.assert_array_equal(mlp(x), expected)
    quantise_mlps(mlp, chosen)  # what is quantised stays
    np.testing.assert_array_equal(mlp(x), expected)


call = nnx.jit(lambda model, tokens: model(tokens))


def test_a_transformer_computes_layer_by_layer_with_them():
    model = drawn.transformer(**MODEL)
    tokens = seeds.rng().integers(0, 61, (2, 12))
    exact, _ = call(model, tokens)
    w_up = model.blocks.mlp.w_up[...]
    quantise_mlps(model)
    assert model.blocks.mlp.w_up[...].scale.shape == (3, 48, 1)
    for layer in range(3):
        expected = jax.jit(quantise)(w_up[layer])
        np.testing.assert_array_equal(model.blocks.mlp.w_up[...].values[layer], expected.values)
    logits, stats = call(model, tokens)
    assert 1e-4 < relative_error(logits, exact) < 0.2
    assert np.all(stats.nnz > 0)
    # Prompt and decoding take the same products, token by token.
    cache = KVCache.empty(model.config, 2, 12)
    extend = nnx.jit(lambda model, part, cache: model.decode(part, cache))
    for part in np.split(tokens, [6], axis=1):
        last, cache = extend(model, part, cache)
    np.testing.assert_allclose(last, logits[:, -1], rtol=2e-3, atol=2e-3)


def test_decoding_kernels_pass_quantised_weights_over():
    model = drawn.transformer(**MODEL)
    quantise_mlps(model, ["up"])
    cache = KVCache.empty(model.config, 2, 8)
    decode(model, np.zeros((2, 1), int), cache)
    model.config = model.config.model_copy(update={"decode_implementation": "mosaic"})
    with pytest.raises(CannotServe, match="decode_implementation='mosaic' cannot serve"):
        decode(model, np.zeros((2, 1), int), cache)


def test_scales_are_where_the_parts_of_their_rows_are():
    model = drawn.transformer(**MODEL)
    quantise_mlps(model, NAMES)
    mesh = sharding.make_mesh((2, 4))
    state = nnx.state(model)
    placed = jax.device_put(state, sharding.of_params(state, mesh))
    mlp = placed["blocks"]["mlp"]
    assert mlp["w_gate"]["values"][...].sharding.spec == P(None, None, "fsdp")
    assert mlp["w_gate"]["scale"][...].sharding.spec == P(None, None, None)
    assert mlp["w_down"]["scale"][...].sharding.spec == P(None, None, "fsdp")
    tokens = seeds.rng().integers(0, 61, (8, 12))
    expected, _ = call(model, tokens)
    nnx.update(model, placed)
    with jax.set_mesh(mesh):
        found, _ = call(model, tokens)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_what_has_no_blocks_or_projections_is_refused():
    with pytest.raises(ValueError, match="no SparseMLP"):
        quantise_mlps(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    mlp = SparseMLP(D, H, gated=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"must be of \['gate', 'up', 'down'\], got \['head'\]"):
        quantise_mlps(mlp, ["up", "head"])
    quantise_mlps(mlp)
    assert quantised.quantised_projections(mlp) == ["up"] and mlp.w_gate is None
    mlp = SparseMLP(D, H, rngs=nnx.Rngs(0))
    mlp.w_up[...] = mlp.w_up[...].at[3, 3].set(jnp.nan)
    with pytest.raises(ValueError, match="1 elements that are inf or NaN"):
        quantise_mlps(mlp)


def test_examples_in_docstrings():
    for module in (layout, quantised):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed
