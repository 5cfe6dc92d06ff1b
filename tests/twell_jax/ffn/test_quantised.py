"""Blocks with 8-bit weights: against the products of quantised operands in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.errors import ROUNDING, in_e4m3, relative_error
from twell_jax import Biases, CannotServe, Quantised, SparseMLP, explain, sparse_ffn
from twell_jax.ffn import quantise, quantise_mlps, quantised

D, H = 40, 72
NAMES = ("gate", "up", "down")
SUBSETS = [("gate",), ("gate", "up"), ("down",), NAMES]


def operands(m=23):
    """x with a zero and a large token, and weights with a dead neuron."""
    rng = seeds.rng()
    x, *weights = (rng.standard_normal((n, D)).astype(np.float32) for n in (m, H, H, H))
    x[3], x[4] = 0, 100 * x[4]
    weights[0][5] = 0
    return x, dict(zip(NAMES, weights, strict=True))


def in_8_bits(weights, chosen=NAMES):
    """The weights in the order of `NAMES`, the chosen ones quantised."""
    return [
        quantise(weights[name], quantised.AXES[name]) if name in chosen else weights[name]
        for name in NAMES
    ]


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("chosen", SUBSETS, ids="+".join)
def test_the_block_is_that_of_the_quantised_operands(chosen, gated):
    x, weights = operands()
    gate, *others = in_8_bits(weights, chosen)
    y, stats = jax.jit(sparse_ffn)(x, gate if gated else None, *others)
    h, exact = reference(x, weights, chosen, gated)
    # An h in float32 that lies at the middle of two 8-bit floats may go to the other one.
    assert relative_error(y, exact) < (0.01 if "down" in chosen else 1e-5)
    assert y.dtype == jnp.float32 and np.all(y[3] == 0)
    assert stats.l1 == pytest.approx(np.abs(h).sum(1).mean(), rel=1e-5)
    assert stats.nnz == pytest.approx(np.count_nonzero(h, axis=1).mean(), rel=1e-6)


def test_8_bit_operands_cost_what_their_rounding_does():
    x, weights = operands(200)
    exact = reference(x, weights, (), gated=True)[1]
    made = in_8_bits(weights)
    error = relative_error(jax.jit(sparse_ffn)(x, *made)[0], exact)
    assert 0.005 < error < 0.1
    sixteen = jax.jit(sparse_ffn)(x.astype(jnp.bfloat16), *made)[0]
    assert sixteen.dtype == jnp.bfloat16 and relative_error(sixteen, exact) < error + 3 * ROUNDING


def test_leading_axes_and_vmap_change_nothing():
    x, weights = operands(24)
    made = in_8_bits(weights)
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
    def shape(rows, d=128):
        return jax.ShapeDtypeStruct((rows, d), jnp.bfloat16)

    x, w = shape(2000), shape(256)
    gate = jax.eval_shape(quantise, w)
    for operands, options, served in (
        ((x, gate, w, w), {"implementation": "mosaic"}, "unions"),
        ((x, gate, w, w), {"packing": "unions"}, "unions"),
        ((x, gate, w, w), {"packing": "twell"}, "twell"),
        ((shape(3), w, gate, w), {"implementation": "mosaic"}, "few_tokens"),
    ):
        assert explain(*operands, **options).splitlines()[-1].startswith(f"  {served}, by mosaic")
    with pytest.raises(CannotServe, match=r"Quantised weights have no gradients; leave it out$"):
        explain(x, gate, w, w, gradients="sparse")
    down = jax.eval_shape(lambda w: quantise(w, axis=-2), w)
    with pytest.raises(CannotServe, match="the kernels take no Quantised w_down"):
        explain(x, gate, w, down, packing="unions")
    x, w = shape(2000, d=192), shape(256, d=192)
    with pytest.raises(CannotServe, match="only with D a multiple of 128"):
        explain(x, jax.eval_shape(quantise, w), w, w, packing="unions")


def test_gradients_are_refused_in_one_line():
    x, weights = operands()
    gate = quantise(weights["gate"])

    def loss(x, scale):
        made = Quantised(gate.values, scale)
        return sparse_ffn(x, made, weights["up"], weights["down"])[0].sum()

    for argument in (0, 1):
        with pytest.raises(ValueError, match="no gradients; train arrays, and quantise them then"):
            jax.grad(loss, argument)(x, gate.scale)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chosen", SUBSETS, ids="+".join)
def test_a_module_computes_with_quantised_weights(chosen):
    mlp = SparseMLP(D, H, use_bias=True, dtype=jnp.float32, rngs=nnx.Rngs(seeds.integer()))
    mlp.b_up[...] = jnp.linspace(-1, 1, H)
    x = jnp.asarray(operands()[0])
    weights = in_8_bits({name: getattr(mlp, f"w_{name}")[...] for name in NAMES}, chosen)
    expected = sparse_ffn(x, *weights, biases=Biases(mlp.b_gate, mlp.b_up, mlp.b_down))[0]
    quantise_mlps(mlp, chosen)
    assert quantised.quantised_projections(mlp) == list(chosen)
    np.testing.assert_array_equal(mlp(x), expected)
    quantise_mlps(mlp, chosen)  # what is quantised stays
    np.testing.assert_array_equal(mlp(x), expected)


@pytest.mark.parametrize(
    ("axes", "of_up", "of_down"),
    [
        (("mlp",), ("mlp", None), (None, None)),  # whatever follows is not split
        (("mlp", "embed"), ("mlp", None), (None, "embed")),
        (("layers", "mlp", "embed"), ("layers", "mlp", None), ("layers", None, "embed")),
    ],
)
def test_a_scale_is_split_as_its_weight_but_for_the_axis_of_the_sum(axes, of_up, of_down):
    weight = nnx.Param(np.ones((3, 4, 5)[-len(of_up) :], np.float32))
    weight.set_metadata(out_sharding=axes)
    for name, expected in (("up", of_up), ("down", of_down)):
        axis = quantised.AXES[name]
        made = nnx.eval_shape(lambda axis=axis: quantised.QuantisedParam(weight, axis))
        assert made.values.get_metadata()["out_sharding"] == axes
        assert made.scale.get_metadata()["out_sharding"] == expected


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
