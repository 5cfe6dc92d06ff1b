"""What a kernel leaves out must not be what was in memory before."""

import functools

import jax
import jax.numpy as jnp


def poison():
    """Fills memory of a GPU that is used next with NaN; a CPU's goes back to the system."""
    if jax.default_backend() == "cpu":
        return
    array = jnp.full((64, 1 << 20), jnp.nan)
    array.block_until_ready()
    array.delete()


def on_poisoned_memory(function, *operands, **options):
    """What the function returns, jitted, on memory that held NaN just before."""
    poison()
    return jax.block_until_ready(jax.jit(functools.partial(function, **options))(*operands))
