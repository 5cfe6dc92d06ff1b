"""Modules that `replace_mlps` leaves alone, as a `SparseMLP` computes something else."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.nnx_models import MLP, D, H, Model
from twell_jax.convert import replace_mlps


def with_layer(**layers):
    """A model whose second module has these instead of its own, or beside them."""
    mlp = MLP()
    for name, layer in layers.items():
        setattr(mlp, name, layer)
    return Model(MLP(), mlp)


class Other(MLP):
    """Computes something besides, with neither variables nor modules of its own."""

    def __init__(self, compute, **options):
        super().__init__(**options)
        self.compute = compute

    def __call__(self, x, *masks):
        return self.compute(self, super().__call__, x, *masks)


def rms(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def storing(self, mlp, x):
    self.seen = nnx.Intermediate(x)
    return mlp(x)


def norm_of_hidden(self, mlp, x):
    del mlp
    return self.down_proj(rms(nnx.silu(self.gate_proj(x)) * self.up_proj(x)))


OTHER = {
    "the norm of its input": (lambda self, mlp, x: mlp(rms(x)), "its outputs are not what"),
    "the norm of its output": (lambda self, mlp, x: rms(mlp(x)), "its outputs are not what"),
    "the norm of its hidden": (norm_of_hidden, "its outputs are not what gate_proj, up_proj, do"),
    "a residual": (lambda self, mlp, x: x + mlp(x), "its outputs are not what"),
    "a clip": (
        lambda self, mlp, x: jnp.clip(mlp(x), -7, 7),
        "its outputs are not what .* with activation='relu' .on drawn",
    ),
    "a mask": (
        lambda self, mlp, x, mask: mlp(x) * mask,
        r"mlp\(x\) with x float32 \[8, 2, 8\] raises TypeError: .* 'mask'$",
    ),
    "statistics": (lambda self, mlp, x: (mlp(x), x), "mlp.x. with x .* gives tuple, no y"),
    "what it stores": (storing, "a call stores seen, which a SparseMLP does not"),
}


def with_other(name):
    model = Model(MLP(), MLP())
    model.others[0]["mlp"] = Other(OTHER[name][0])
    return model


def sharing(role, name):
    """The second module's layer is the first one's; or `name` is another place of the model."""
    model = Model(MLP(), MLP())
    layer = getattr(model.first, role)
    if name is None:
        setattr(model.others[0]["mlp"], role, layer)
    else:
        setattr(model, name, nnx.Linear(D, H, use_bias=False, rngs=nnx.Rngs(0)))
        getattr(model, name).kernel = layer.kernel
    return model


def of_its_own(**options):
    return lambda: Model(MLP(), MLP(**options))


def of_several_dtypes():
    model = Model(MLP(), MLP())
    model.others[0]["mlp"].down_proj.dtype = jnp.bfloat16
    return model


def in_a_tuple():
    model = Model(MLP())
    model.others = nnx.data(({"mlp": MLP()}, MLP()))
    return model


UNSUITED = {  # what makes the model, and what is said
    "biased": (
        lambda: Model(MLP(), MLP(use_bias=True)),
        "cannot replace others/0/mlp: gate_proj has a bias",
    ),
    "with dropout": (
        lambda: with_layer(dropout=nnx.Dropout(0.1, rngs=nnx.Rngs(0))),
        "others/0/mlp: it holds dropout/rngs.* beside gate_proj, up_proj, down_proj",
    ),
    "with dropout without rngs": (
        lambda: with_layer(dropout=nnx.Dropout(0.1)),
        "others/0/mlp: it holds dropout beside gate_proj, up_proj, down_proj",
    ),
    "with a norm without parameters": (
        lambda: with_layer(
            norm=nnx.LayerNorm(D, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))
        ),
        "others/0/mlp: it holds norm beside gate_proj, up_proj, down_proj",
    ),
    "of products of its own": (
        of_its_own(dot_general=lambda *args, **kwargs: jax.lax.dot_general(*args, **kwargs)),
        "gate_proj has a dot_general of its own, .* set gate_proj.dot_general to the default",
    ),
    "of another precision": (
        of_its_own(precision="highest"),
        "gate_proj has a precision of its own, .* set gate_proj.precision to the default",
    ),
    "sharing a layer with another": (
        lambda: sharing("up_proj", None),
        "first: the model has its up_proj as others/0/mlp/up_proj, too: give each a kernel of its",
    ),
    "sharing a kernel": (
        lambda: sharing("gate_proj", "probe"),
        "first: the model has its gate_proj as probe/kernel, too",
    ),
    "with other layers": (
        lambda: with_layer(up_proj=nnx.LoRALinear(D, H, lora_rank=2, rngs=nnx.Rngs(0))),
        "others/0/mlp: up_proj is LoRALinear, not nnx.Linear",
    ),
    "with experts": (
        lambda: with_layer(gate_proj=nnx.Param(jnp.zeros((4, D, H)))),
        "others/0/mlp: gate_proj is Param, not nnx.Linear",
    ),
    "of another shape": (
        lambda: with_layer(down_proj=nnx.Linear(H, 4, use_bias=False, rngs=nnx.Rngs(0))),
        r"others/0/mlp: kernels of shapes .*\(48, 4\).* do not fit each other",
    ),
    "of several dtypes": (
        of_several_dtypes,
        "others/0/mlp: its layers compute in different dtypes: .*bfloat16",
    ),
    "in a tuple": (
        in_a_tuple,
        "others/1: it is in a tuple, which cannot be changed; use nnx.List",
    ),
    "itself": (MLP, "cannot replace the model itself: it must be part of a module"),
    "without one": (
        lambda: Model(nnx.Linear(D, D, rngs=nnx.Rngs(0))),
        "no module of the model has the layers",
    ),
    "a plain array": (
        lambda: with_layer(up_proj=jnp.zeros((D, H))),
        "others/0/mlp: up_proj is ArrayImpl, not",
    ),
} | {
    f"with {name}": (functools.partial(with_other, name), f"cannot replace others/0/mlp: {line}")
    for name, (_, line) in OTHER.items()
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", UNSUITED)
def test_what_cannot_be_replaced_is_named_and_the_model_left_alone(name):
    make, message = UNSUITED[name]
    model = make()
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=message) as raised:
        replace_mlps(model)
    assert "\n" not in str(raised.value)
    assert nnx.graphdef(model) == before
