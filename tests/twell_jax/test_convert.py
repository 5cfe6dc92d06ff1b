"""`replace_mlps` on models as other people write them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from tests.devices import make_mesh
from tests.nnx_models import MLP, D, H, Model, call, draw
from twell_jax import Rectifier, SparseMLP, capture_stats
from twell_jax.convert import FORMS, replace_mlps


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form.values()))
def test_outputs_are_as_before(form):
    model, x = Model(MLP(form), MLP(form)), draw(3, 5, D)
    before = call(model, x)
    replaced = replace_mlps(model, activation="silu")
    assert list(replaced) == ["first", "others/0/mlp"]
    assert replaced["first"] is model.first
    assert replaced["others/0/mlp"] is model.others[0]["mlp"]
    assert all(type(mlp) is SparseMLP for mlp in replaced.values())
    np.testing.assert_allclose(call(model, x), before, rtol=1e-5, atol=1e-5)


def test_names_say_what_this_model_calls_its_layers():
    names = {"gate": "wg", "up": "wu", "down": "wd"}
    model, x = Model(MLP(names), MLP()), draw(3, D)
    before = call(model, x)
    assert list(replace_mlps(model, activation="silu", names=names)) == ["first"]
    np.testing.assert_allclose(call(model, x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "param_dtype", "input_dtype"),
    [
        (None, "float32", "bfloat16"),
        (None, "bfloat16", "float32"),
        (None, "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_dtypes_are_as_before(dtype, param_dtype, input_dtype):
    model = nnx.Sequential(MLP(dtype=dtype, param_dtype=param_dtype))
    x = draw(3, D).astype(input_dtype)
    before = call(model, x)
    (mlp,) = replace_mlps(model, activation="silu").values()
    after = call(model, x)
    assert after.dtype == before.dtype
    assert mlp.w_gate.dtype == mlp.w_down.dtype == param_dtype
    tolerance = 1e-5 if before.dtype == "float32" else 3e-2
    np.testing.assert_allclose(*(y.astype("float32") for y in (after, before)), atol=tolerance)


@pytest.mark.parametrize("wide", FORMS[0].values())
def test_one_float32_kernel_of_three_keeps_the_dtype_of_outputs(wide):
    mlp = MLP(param_dtype="bfloat16")
    kernel = getattr(mlp, wide).kernel
    kernel.set_value(kernel[...].astype("float32"))
    model, x = nnx.Sequential(mlp), draw(3, D).astype("bfloat16")
    before = call(model, x)
    replace_mlps(model, activation="silu")
    after = call(model, x)
    assert after.dtype == before.dtype == "float32"
    np.testing.assert_allclose(after, before, atol=3e-2)


def test_a_model_with_a_threshold_keeps_it():
    model = Model(MLP(activation=lambda z: jnp.where(z > 0.1, z, 0)))
    x = draw(3, D)
    before = call(model, x)
    replace_mlps(model, activation=Rectifier(threshold=0.1))
    np.testing.assert_allclose(call(model, x), before, rtol=1e-5, atol=1e-5)


def test_training_with_relu_and_l1_closes_gates():
    model, x = Model(MLP(activation=nnx.relu), MLP(activation=nnx.relu)), draw(64, D)
    x[:, 0] = 2.0  # a constant feature can switch neurons off
    replace_mlps(model)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            y, stats = capture_stats(model)(x)
            return jnp.mean((y - jnp.roll(x, 1, axis=-1)) ** 2) + 0.1 * stats.l1, stats.modules

        grads, modules = nnx.grad(loss, has_aux=True)(model)
        optimizer.update(model, grads)
        return {path: stats.nnz for path, stats in modules.items()}

    first, *_, last = [step(model, optimizer) for _ in range(60)]
    assert set(first) == {"first", "others/0/mlp"}
    for path in first:
        assert last[path] < 0.8 * first[path]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", [("x", "y"), ("y",)], ids=str)
def test_sharding_is_kept(axes):
    """`axes` of a kernel `[D, H]`, by name and in memory."""
    mesh = make_mesh((2, 4), ("x", "y"))
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
    with jax.set_mesh(mesh):
        model = nnx.Sequential(MLP(kernel_init=init))
        x = draw(4, D)
        before = call(model, x)
        (mlp,) = replace_mlps(model, activation="silu").values()
        after = call(model, x)
    d, h = (*axes, None)[:2]
    weights = {"w_gate": P(h, d), "w_up": P(h, d), "w_down": P(*axes)}
    for name, spec in weights.items():
        weight = getattr(mlp, name)
        assert P(*weight.get_metadata()["out_sharding"]) == spec
        assert weight[...].sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2), name
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


class Stacked(nnx.Module):
    """Layers whose weights have a leading axis, under `nnx.scan`."""

    def __init__(self):
        metadata = {nnx.PARTITION_NAME: "layers"}
        init = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False
        )
        make = nnx.vmap(lambda _: MLP(kernel_init=init), transform_metadata=metadata)
        self.layers = make(jnp.arange(3))

    def __call__(self, x):
        scan = nnx.scan(lambda x, mlp: mlp(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, self.layers)


def test_stacked_layers_stay_stacked():
    model, x = Stacked(), draw(3, D)
    before = call(model, x)
    mlp = replace_mlps(model, activation="silu")["layers"]
    assert mlp.w_up.shape == mlp.w_down.shape == (3, H, D)
    assert mlp.w_gate.get_metadata()["out_sharding"] == ("layers", "mlp", "embed")
    np.testing.assert_allclose(call(model, x), before, rtol=1e-5, atol=1e-5)


def test_a_module_at_two_places_stays_one():
    shared = MLP()
    model = Model(shared, MLP(), shared)
    replaced = replace_mlps(model)
    assert sorted(replaced) == ["first", "others/0/mlp", "others/1/mlp"]
    assert model.first is model.others[1]["mlp"]
    assert model.first is not model.others[0]["mlp"]


def test_another_usual_activation_is_no_other_block():
    model = Model(*(MLP(activation=act) for act in (nnx.gelu, jnp.tanh, nnx.silu)))
    assert len(replace_mlps(model)) == 3


class OfTokens(MLP):
    def __call__(self, x):
        assert x.ndim == 2
        return super().__call__(x)


def test_a_module_may_take_no_batches():
    assert list(replace_mlps(Model(OfTokens()))) == ["first"]


def test_a_shared_kernel_that_stays_as_it_is_stays_shared():
    model = Model(MLP(), MLP())
    model.others[0]["mlp"].down_proj = model.first.down_proj
    replace_mlps(model)
    assert model.first.w_down is model.others[0]["mlp"].w_down


def test_a_model_is_made_of_them_under_jit():
    """As models are whose weights are sharded from the start."""

    @nnx.jit
    def make():
        model = Model(MLP())
        replace_mlps(model)
        return model

    assert type(make().first) is SparseMLP


class Asks(Model):
    """Calls its module as a `SparseMLP` cannot be called."""

    def __call__(self, x):
        return self.first(x, scale=1.0)


class Scales(MLP):
    def __call__(self, x, scale=1.0):
        return scale * super().__call__(x)


def test_outputs_of_the_model_are_checked_if_asked_for():
    model, x = Model(MLP(), MLP()), draw(3, D)
    before, graph = call(model, x), nnx.graphdef(model)
    for model_, message in (
        (model, "nothing is replaced, as with activation='relu' outputs of the model change by "),
        (Asks(Scales()), "'relu' .* unexpected keyword argument 'scale'"),
    ):
        with pytest.raises(ValueError, match=message):
            replace_mlps(model_, check=x)
    assert nnx.graphdef(model) == graph
    np.testing.assert_array_equal(call(model, x), before)
    assert len(replace_mlps(model, activation="silu", check=(x,))) == 2


class First(Model):
    """Returns its input, too, in front of what its modules compute."""

    def __call__(self, x):
        return x, super().__call__(x)


def test_each_output_of_the_model_is_checked():
    with pytest.raises(ValueError, match=r"outputs of the model change by .* of their size"):
        replace_mlps(First(MLP()), check=draw(3, D))


def test_a_model_of_another_framework_is_refused():
    with pytest.raises(ValueError, match=r"model must be an nnx\.Module, got Dense"):
        replace_mlps(linen.Dense(D))


def test_names_without_up_or_down_are_refused():
    with pytest.raises(ValueError, match="names must have the keys up, down and perhaps gate"):
        replace_mlps(Model(MLP()), names={"gate": "w1", "up": "w2"})
