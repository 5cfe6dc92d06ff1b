"""Whether somebody else's NNX module is a feed-forward block of its linear layers alone."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from twell_jax.ffn import Activation, activations

type Path = tuple[Any, ...]

# What changes what an `nnx.Linear` computes, and a `SparseMLP` does not have.
_UNKEPT = ("precision", "dot_general", "promote_dtype", "preferred_element_type")
# What a module may have had in place of the activation that is asked for.
_USUAL: tuple[Callable[[jax.Array], jax.Array], ...] = (
    jax.nn.silu,
    jax.nn.gelu,
    lambda z: jax.nn.gelu(z, approximate=False),
    lambda z: z * jax.nn.sigmoid(1.702 * z),
    jax.nn.relu,
    lambda z: jnp.square(jax.nn.relu(z)),
    jax.nn.sigmoid,
    jnp.tanh,
    lambda z: z,
)
# Of the drawn tokens. A norm, a clip or a bias is noticed at one of them at least.
_SCALES = (1.0, 8.0)
# Relative. In 16 bits a value may be rounded to the other side of a threshold.
_TOLERANCE, _OF_16_BITS = 0.03, 0.1


def check_layers(module: nnx.Module, form: Mapping[str, str], layers: Mapping[str, Any]) -> None:
    """Raises ValueError unless the module holds linear layers that fit each other alone.

    Args:
      module: has the layers.
      form: what it calls its layers "gate" (if gated), "up" and "down".
      layers: what it has by these names.
    """
    defaults = inspect.signature(nnx.Linear.__init__).parameters
    for role, layer in layers.items():
        if type(layer) is not nnx.Linear:
            raise ValueError(f"{form[role]} is {type(layer).__name__}, not nnx.Linear")
        if layer.bias is not None:
            raise ValueError(f"{form[role]} has a bias")
        for name in _UNKEPT:
            if getattr(layer, name) != defaults[name].default:
                raise ValueError(
                    f"{form[role]} has a {name} of its own, which a SparseMLP has not: set "
                    f"{form[role]}.{name} to the default of nnx.Linear first"
                )
    own = {(name, "kernel") for name in form.values()}
    others = [path for path, _ in nnx.to_flat_state(nnx.state(module)) if path not in own]
    parts = {(), *((name,) for name in form.values())}
    others += [path for path, _ in nnx.iter_modules(module) if path not in parts]
    if others:
        held = ", ".join("/".join(map(str, path)) for path in others)
        raise ValueError(f"it holds {held} beside {', '.join(form.values())}")
    shapes = {form[role]: layer.kernel.shape for role, layer in layers.items()}
    *stack, d_model, d_ff = layers["up"].kernel.shape
    expected = {name: (*stack, d_model, d_ff) for name in shapes}
    expected[form["down"]] = (*stack, d_ff, d_model)
    if shapes != expected:
        raise ValueError(f"kernels of shapes {shapes} do not fit each other")
    dtypes = {form[role]: layer.dtype for role, layer in layers.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"its layers compute in different dtypes: {dtypes}")


def check_sharing(path: Path, form: Mapping[str, str], shared: list[list[Path]]) -> None:
    """Raises ValueError if the model has a layer of the module elsewhere, too, whose kernel would
    become another's: those of the gate and up projection are transposed.

    Args:
      path: of the module in the model.
      form: see `check_layers`.
      shared: the paths of what is at several places of the model.
    """
    for role, name in form.items():
        mine = (*path, name), (*path, name, "kernel")
        for places in shared if role != "down" else ():
            if any(place in mine for place in places):
                others = ["/".join(map(str, place)) for place in places if place not in mine]
                raise ValueError(
                    f"the model has its {name} as {', '.join(others)}, too: give each a kernel of "
                    "its own"
                )


def check_outputs(module: nnx.Module, form: Mapping[str, str], activation: Activation) -> None:
    """Raises ValueError unless the module computes what its layers alone give, on drawn tokens and
    with drawn weights, with the activation or a usual one.

    Args:
      module, form: see `check_layers`.
      activation: as in `sparse_ffn`.
    """
    # Real values, also where the caller traces; products in full, so that errors are the module's.
    with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
        copy = _with_drawn_weights(module)
        layers = {role: getattr(copy, name) for role, name in form.items()}
        kernel = layers["up"].kernel
        d_model, dtype = kernel.shape[0], layers["up"].dtype or kernel.dtype
        # As many as devices, so that they can be split over any of a mesh.
        tokens = jax.random.normal(jax.random.key(0), (jax.device_count(), len(_SCALES), d_model))
        x = (tokens * jnp.asarray(_SCALES)[:, None]).astype(dtype)
        y = _call(copy, x)
        held = {path for path, _ in nnx.to_flat_state(nnx.state(copy))}
        if stored := held - {(name, "kernel") for name in form.values()}:
            names = ", ".join("/".join(map(str, path)) for path in sorted(stored))
            raise ValueError(f"a call stores {names}, which a SparseMLP does not")
        gate, up, w_down = _products(layers, x)
        first = up if gate is None else gate
        hidden = [activations.hidden(activation, gate, up)[0]] + [
            act(first) * (1 if gate is None else up) for act in _USUAL
        ]
        errors = [_error(y, h @ w_down) for h in hidden]
    tolerance = _OF_16_BITS if y.dtype.itemsize == 2 else _TOLERANCE
    if not any(error <= tolerance for error in errors):
        raise ValueError(
            f"its outputs are not what {', '.join(form.values())} alone give with "
            f"activation={activation!r} (on drawn tokens they differ by {errors[0]:.2g} of "
            "their size) or another usual one. If it computes nothing else, give it that "
            "activation first"
        )


def _with_drawn_weights(module: nnx.Module) -> nnx.Module:
    """A copy of one layer, `[D, H]`, also of stacked ones."""
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    drawn = []
    for key, leaf in zip(jax.random.split(jax.random.key(1), len(leaves)), leaves, strict=True):
        shape = leaf.shape[-2:]
        drawn.append(jax.random.normal(key, shape, leaf.dtype) * shape[0] ** -0.5)
    copy: nnx.Module = nnx.merge(graph, jax.tree.unflatten(tree, drawn))
    return copy


def _call(module: Any, x: jax.Array) -> jax.Array:
    """y of x `[B, T, D]`, from all its tokens at once if the module takes no batches."""
    problems = []
    for tokens in (x, x.reshape(-1, x.shape[-1])):
        try:
            y = module(tokens)
        except Exception as error:  # whatever somebody else's code raises
            line = f"{type(error).__name__}: {error}".partition("\n")[0]
            problems.append(f"mlp(x) with x {x.dtype} {list(tokens.shape)} raises {line}")
            continue
        if getattr(y, "shape", None) != tokens.shape:
            kind = list(y.shape) if isinstance(y, jax.Array) else type(y).__name__
            raise ValueError(f"mlp(x) with x {list(tokens.shape)} gives {kind}, no y of this shape")
        return jnp.asarray(y).reshape(x.shape)
    raise ValueError(problems[0])


def _products(
    layers: Mapping[str, nnx.Linear], x: jax.Array
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """The products with the gate, if there is one, and with up, and the weights of down."""
    kernels = {role: layer.kernel[...].astype(jnp.float32) for role, layer in layers.items()}
    x = x.astype(jnp.float32)
    gate = x @ kernels["gate"] if "gate" in kernels else None
    return gate, x @ kernels["up"], kernels["down"]


def _error(y: jax.Array, expected: jax.Array) -> float:
    """The largest difference of a token, relative to the norm of what was expected."""
    difference = jnp.linalg.norm(y.astype(jnp.float32) - expected.astype(jnp.float32), axis=-1)
    norm = jnp.linalg.norm(expected.astype(jnp.float32), axis=-1)
    return float(jnp.max(jnp.where(difference == 0, 0, difference / norm)))


def outputs(model: Any, inputs: Any) -> list[jax.Array]:
    """What the model gives for its inputs, one or a tuple, without a change to its state."""
    model = nnx.merge(*nnx.split(model))
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(model(*inputs))]


def check_same(before: list[jax.Array], after: list[jax.Array]) -> None:
    """Raises ValueError if outputs differ by more than rounding does, 5 % in 16 bits, else 1 %."""
    for old, new in zip(before, after, strict=True):
        error = _error(new.ravel(), old.ravel())
        if not error <= (0.05 if old.dtype.itemsize == 2 else 0.01):
            raise ValueError(f"outputs of the model change by {error:.2g} of their size")
