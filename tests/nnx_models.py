"""Models in NNX as other people write them."""

import numpy as np
from flax import nnx

from tests import seeds

D, H = 8, 48
BLOCK = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class MLP(nnx.Module):
    """A feed-forward module whose layers have the given names."""

    def __init__(self, form=BLOCK, activation=nnx.silu, **options):
        self.form, self.activation = nnx.static(dict(form)), activation
        rngs = nnx.Rngs(seeds.integer())
        options = {"use_bias": False} | options
        for role, name in form.items():
            shape = (H, D) if role == "down" else (D, H)
            setattr(self, name, nnx.Linear(*shape, rngs=rngs, **options))

    def __call__(self, x):
        up = getattr(self, self.form["up"])(x)
        gated = "gate" in self.form
        h = self.activation(getattr(self, self.form["gate"])(x)) * up if gated else None
        return getattr(self, self.form["down"])(h if gated else self.activation(up))


class Model(nnx.Module):
    """A residual network around feed-forward modules, in the containers that models use."""

    def __init__(self, *mlps):
        self.norm = nnx.RMSNorm(D, rngs=nnx.Rngs(0))
        self.first = mlps[0]
        self.others = nnx.List([nnx.Dict(mlp=mlp) for mlp in mlps[1:]])

    def __call__(self, x):
        x = x + self.first(self.norm(x))
        for layer in self.others:
            x = x + layer["mlp"](self.norm(x))
        return x


def draw(*shape):
    return seeds.rng().standard_normal(shape, np.float32)


@nnx.jit
def call(model, x):
    return model(x)
