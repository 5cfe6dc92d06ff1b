"""The code of docs/make-your-model-sparse.md runs and does what the page says."""

import dataclasses
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.errors import relative_error
from tests.packages import needed
from twell_jax import order_by_use
from twell_jax.convert import FORMS

PAGE = (Path(__file__).parents[1] / "docs/make-your-model-sparse.md").read_text()
EMBED, MLP, BATCH = 16, 48, 5


def run(heading):
    """The names that the code below a heading of the page defines; `heading` begins its text."""
    (code,) = re.findall(rf"^{heading}.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    names = {"__name__": "page"}
    exec(compile(code, "make-your-model-sparse.md", "exec"), names)
    return names


def draw(*shape):
    return seeds.rng().standard_normal(shape, np.float32)


def hidden(x, w_gate, w_up):
    """float64 `[BATCH, MLP]`, of weights `[MLP, EMBED]`."""
    x, w_gate, w_up = (np.asarray(a, np.float64) for a in (x, w_gate, w_up))
    return np.maximum(x @ w_gate.T, 0) * (x @ w_up.T)


def test_an_nnx_model():
    names = run("## A model in Flax NNX")
    assert list(names["replaced"]) == ["layers/0", "layers/2"]
    stats = names["stats"]
    assert 0 < stats.nnz < 256 and 0 < stats.union <= 1 and 0 < stats.listed <= 1
    assert stats.overflow == 0 and len(stats.table().splitlines()) == 4
    block = stats.modules["layers/0"]
    assert sorted(order_by_use(block.tiles, block.nnz)) == list(range(256))


def test_a_linen_model():
    assert_all_have_gradients(run("## A model in Flax Linen"))


def test_an_equinox_model():
    needed("equinox")
    assert_all_have_gradients(run("## A model in Equinox"))


def assert_all_have_gradients(names):
    assert all(np.any(leaf) for leaf in jax.tree.leaves(names["grads"]))


def stand_in(monkeypatch, name, **contents):
    """Makes `import name` work, with a module that holds this alone."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    vars(sys.modules[name]).update(contents)


class DenseGeneral(nnx.Module):
    def __init__(self, in_features, out_features):
        self.kernel = nnx.Param(jnp.asarray(draw(in_features, out_features)))


class MlpBlock(nnx.Module):
    """Stands for MaxText's, with the arguments that matter here."""

    def __init__(self, in_features, intermediate_dim, activations, dtype):
        assert len(activations) == 2
        self.dtype = dtype
        self.wi_0 = DenseGeneral(in_features, intermediate_dim)
        self.wi_1 = DenseGeneral(in_features, intermediate_dim)
        self.wo = DenseGeneral(intermediate_dim, in_features)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_of_maxtext(monkeypatch, dtype):
    stand_in(monkeypatch, "maxtext.layers.linears", MlpBlock=MlpBlock)
    block = run("MaxText's `MlpBlock`")["SparseMlpBlock"](EMBED, MLP, ("silu", "linear"), dtype)
    assert {*nnx.to_flat_state(nnx.state(block)).paths} == {
        (name, "kernel") for name in ("wi_0", "wi_1", "wo")
    }
    x = draw(BATCH, EMBED)
    y, sown = nnx.capture(block, nnx.Intermediate)(
        x, deterministic=True, intermediate_sharding=None, out_sharding=None
    )
    h = hidden(x, block.wi_0.kernel[...].T, block.wi_1.kernel[...].T)
    assert y.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert relative_error(y, h @ np.asarray(block.wo.kernel[...], np.float64)) < tolerance
    (l1,) = sown["l1"].get_value()
    assert l1 == pytest.approx(np.abs(h).sum(-1).mean(), rel=tolerance)


@dataclasses.dataclass
class NamedArray:
    """Stands for Haliax's: an array whose axes, here strings, have names."""

    array: jax.Array
    axes: tuple[str, ...]

    def rearrange(self, axes):
        others = [axis for axis in self.axes if axis not in axes]
        order = [a for axis in axes for a in (others if axis is ... else [axis])]
        places = [self.axes.index(axis) for axis in order]
        return NamedArray(jnp.transpose(self.array, places), tuple(order))


@dataclasses.dataclass
class Linear:
    """Stands for `haliax.nn.Linear`, with its weight in either order."""

    weight: NamedArray
    In: str
    Out: str


@dataclasses.dataclass
class LlamaMlp:
    """Stands for Levanter's."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


@pytest.mark.parametrize("out_first", [True, False])
def test_a_block_of_levanter(monkeypatch, out_first):
    stand_in(monkeypatch, "levanter.models.llama", LlamaMlp=LlamaMlp)
    stand_in(monkeypatch, "haliax", named=NamedArray)
    weights = [draw(MLP, EMBED) for _ in range(3)]

    def layer(weight, source, target):
        array = NamedArray(weight, ("mlp", "embed"))
        order = (target, source) if out_first else (source, target)
        return Linear(array.rearrange(order), source, target)

    ways = ("embed", "mlp"), ("embed", "mlp"), ("mlp", "embed")
    layers = [layer(w, *way) for w, way in zip(weights, ways, strict=True)]
    x = draw(EMBED, BATCH)
    y, l1 = run("Levanter's `LlamaMlp`")["SparseLlamaMlp"](*layers)(
        NamedArray(x, ("embed", "batch")), key=None
    )
    h = hidden(x.T, *weights[:2])
    assert y.axes == ("batch", "embed")
    assert relative_error(y.array, h @ weights[2].astype(np.float64)) < 1e-5
    assert l1 == pytest.approx(np.abs(h).sum(-1).mean(), rel=1e-5)


def test_the_table_of_layers_is_that_of_replace_mlps():
    rows = re.findall(r"^\| ((?:`|none).*?) \|", PAGE, re.MULTILINE)
    found = [tuple(name for name in re.findall(r"`(\w+)`", row)) for row in rows]
    assert found == [tuple(form.values()) for form in FORMS]
