"""Puts `SparseMLP`s in place of the feed-forward modules of somebody else's NNX model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from twell_jax import foreign
from twell_jax.ffn import Activation, SparseMLP
from twell_jax.ffn.arguments import refuses_old_names

# How models call the layers of their feed-forward modules. Gated forms come first, because some of
# them hold the names of a plain one.
FORMS = (
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    {"gate": "w1", "up": "w3", "down": "w2"},
    {"gate": "wi_0", "up": "wi_1", "down": "wo"},
    {"gate": "gate", "up": "up", "down": "down"},
    {"up": "up_proj", "down": "down_proj"},
    {"up": "fc1", "down": "fc2"},
    {"up": "c_fc", "down": "c_proj"},
)


@refuses_old_names("threshold")
def replace_mlps(
    model: nnx.Module,
    *,
    activation: Activation = "relu",
    names: Mapping[str, str] | None = None,
    check: Any = None,
) -> dict[str, SparseMLP]:
    """Replaces the feed-forward modules of a model, in place, by `SparseMLP`s with their weights.

    A feed-forward module is one that holds `nnx.Linear`s without bias by the names of a row of
    `FORMS`, and no other variables or modules. Kernels may have leading axes, as those of layers
    under `nnx.scan` do. The model must call its modules as `y = mlp(x)`. Each kind of module is
    called on drawn tokens, with drawn weights: it must compute what its layers alone give with
    `activation` or another usual one. With another one than the model had, outputs change until it
    is trained further.

    Weights keep their dtypes, their metadata and their sharding, transposed where the weights are.
    The dtype of the computation stays that of the layers. What is shared with the kernel of "down"
    stays so. Optimizers must be made after this.

    Args:
      model: the model, which is changed.
      activation: of the new modules, as in `sparse_ffn`; "silu" leaves the outputs of a
        SiLU model as they are.
      names: what this model calls the layers "gate" (if gated), "up" and "down" of its feed-forward
        modules, in place of `FORMS`.
      check: an input of the model, or a tuple of them, if the activation stays: its outputs are
        compared before and after, within 1 % (5 % in 16 bits). The old weights are held so long.

    Returns:
      The new modules by their paths in the model, such as "layers/0/mlp". Other arguments of
      `SparseMLP` can be set on them: `mlp.gradients = "sparse"`.

    Raises:
      ValueError: `model` is no NNX module; `names` has other keys; no module has such names; or one
        that has them is not of this form, for example because it has biases, shares a layer with
        others or computes something else besides; or outputs differ from those before, if they are
        checked. The line names the module's path, and the model is as it was.
    """
    if not isinstance(model, nnx.Module):
        raise ValueError(f"model must be an nnx.Module, got {type(model).__name__}")
    if names is not None and set(names) not in ({"up", "down"}, {"gate", "up", "down"}):
        raise ValueError(f"names must have the keys up, down and perhaps gate, got {[*names]}")
    forms = FORMS if names is None else (names,)
    if check is None:
        return _replace(model, forms, activation)
    before = foreign.outputs(model, check)
    old: list[tuple[tuple[Any, ...], nnx.Module]] = []
    replaced = _replace(model, forms, activation, old)
    try:
        foreign.check_same(before, foreign.outputs(model, check))
    except Exception as error:  # also what the model raises with the new modules
        for path, module in old:
            _put(model, path, module)
        line = str(error).partition("\n")[0]
        raise ValueError(f"nothing is replaced, as with {activation=} {line}") from error
    return replaced


def _replace(
    model: nnx.Module,
    forms: tuple[Mapping[str, str], ...],
    activation: Activation,
    old: list[tuple[tuple[Any, ...], nnx.Module]] | None = None,
) -> dict[str, SparseMLP]:
    """See `replace_mlps`; what was replaced is appended to `old`, with its path."""
    replaced: dict[str, SparseMLP] = {}
    blocks: dict[int, SparseMLP] = {}
    # A module that is at several places is found at one of them, so the search is repeated.
    while found := list(_find(model, forms, activation)):
        # Each old module is let go before the next is copied: large models fit only once.
        while found:
            path, module, layers, block = found.pop(0)
            if id(module) not in blocks:
                blocks[id(module)] = block
                _move(layers, block)
            if old is not None:
                old.append((path, module))
            _put(model, path, blocks[id(module)])
            replaced[_name(path)] = blocks[id(module)]
    if not replaced:
        known = "; ".join(", ".join(form.values()) for form in forms)
        raise ValueError(f"no module of the model has the layers of a feed-forward block: {known}")
    return replaced


class _Found(NamedTuple):
    """A module to replace, its layers by role, and a `SparseMLP` for it that has only shapes."""

    path: tuple[Any, ...]
    module: nnx.Module
    layers: dict[str, nnx.Linear]
    block: SparseMLP


def _find(
    model: nnx.Module, forms: tuple[Mapping[str, str], ...], activation: Activation
) -> Iterator[_Found]:
    shared = nnx.find_duplicates(model)
    proven: list[tuple[Any, ...]] = []  # what can be compared, but not hashed
    for path, module in nnx.iter_modules(model):
        for form in forms:
            layers: dict[str, Any] = {r: getattr(module, name, None) for r, name in form.items()}
            if all(layer is not None for layer in layers.values()):
                try:
                    foreign.check_layers(module, form, layers)
                    foreign.check_sharing(path, form, shared)
                    _check_place(model, path)
                    block = _shapes(layers, activation)
                    kind = (nnx.graphdef(module), layers["up"].kernel.shape)
                    if kind not in proven:
                        foreign.check_outputs(module, form, activation)
                        proven.append(kind)
                except ValueError as error:
                    place = _name(path) or "the model itself"
                    raise ValueError(f"cannot replace {place}: {error}") from error
                yield _Found(path, module, layers, block)
                break


def _check_place(model: nnx.Module, path: tuple[Any, ...]) -> None:
    if not path:
        raise ValueError("it must be part of a module")
    if isinstance(_at(model, path[:-1]), tuple):
        raise ValueError("it is in a tuple, which cannot be changed; use nnx.List")


def _shapes(layers: Mapping[str, nnx.Linear], activation: Activation) -> SparseMLP:
    *_, d_model, d_ff = layers["up"].kernel.shape
    dtype = layers["up"].dtype
    if dtype is None and any(layer.kernel.dtype == jnp.float32 for layer in layers.values()):
        dtype = jnp.float32  # nnx.Linear promotes its input; SparseMLP would round its weights

    def make() -> SparseMLP:
        return SparseMLP(
            d_model,
            d_ff,
            gated="gate" in layers,
            dtype=dtype,
            activation=activation,
            rngs=nnx.Rngs(0),
        )

    # Weights bring their own axes. The block's, which a mesh need not have, must not matter here.
    with nnx.logical_axis_rules((("mlp", None), ("embed", None))):
        return nnx.eval_shape(make)


def _move(layers: Mapping[str, nnx.Linear], block: SparseMLP) -> None:
    """Gives the block the weights of the layers, `[..., H, D]`."""
    if "gate" in layers:
        block.w_gate = _transposed(layers["gate"].kernel)
    block.w_up = _transposed(layers["up"].kernel)
    block.w_down = layers["down"].kernel


def _transposed(kernel: nnx.Variable[jax.Array]) -> nnx.Variable[jax.Array]:
    value = jnp.swapaxes(kernel[...], -1, -2)
    axes: tuple[Any, ...] | None = kernel.get_metadata().get("out_sharding")
    if axes is None:
        return kernel.replace(value)
    padded = (*axes, *[None] * (value.ndim - len(axes)))
    flipped = (*padded[:-2], padded[-1], padded[-2])
    is_spec = isinstance(axes, PartitionSpec)
    return kernel.replace(value, out_sharding=PartitionSpec(*flipped) if is_spec else flipped)


def _put(model: nnx.Module, path: tuple[Any, ...], block: nnx.Module) -> None:
    parent, last = _at(model, path[:-1]), path[-1]
    if _is_container(parent):
        parent[last] = block
    else:
        setattr(parent, last, block)


def _at(model: nnx.Module, path: tuple[Any, ...]) -> Any:
    node: Any = model
    for key in path:
        node = node[key] if _is_container(node) else getattr(node, key)
    return node


def _is_container(node: Any) -> bool:
    return isinstance(node, Sequence | Mapping)  # among them nnx.List and nnx.Dict


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
