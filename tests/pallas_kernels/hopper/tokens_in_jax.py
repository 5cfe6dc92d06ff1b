"""What lanes and blocks do in products of few tokens, in pure JAX for Pallas' interpreter."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import support, warpgroup
from pallas_kernels.hopper.decode import cluster, rounding, token_columns


class Quartets:
    """Two quartets of blocks, whose blocks tell each other what they have; in threads."""

    def __init__(self):
        self._board = {}
        self._meetings = [threading.Barrier(4) for _ in range(2)]

    def exchange_columns(self, accs, block, parts_ref, _):
        """Each block of a quartet gets 16 of the 64 columns of every block."""

        def exchange(accs, block):
            own = slice(16 * (int(block) % 4), 16 * (int(block) % 4) + 16)
            parts = np.stack([a[:, own] for a in self._exchange(accs, block)], axis=1)
            return np.swapaxes(parts, 2, 3).reshape(parts_ref.shape)

        shape = jax.ShapeDtypeStruct(parts_ref.shape, jnp.float32)
        parts_ref[...] = io_callback(exchange, shape, jnp.stack(accs), block)

    def scales(self, parts, block, *_):
        """The blocks of a quartet tell each other their `parts`."""

        def exchange(parts, block):
            return np.max(self._exchange(parts, block), axis=0)

        top = io_callback(exchange, jax.ShapeDtypeStruct(parts.shape, jnp.float32), parts, block)
        return top * np.float32(1 / 448), 1 / (top * np.float32(1 / 448))

    def _exchange(self, values, block):
        """What the four blocks of a quartet have put on the board, in order."""
        quartet = int(block) // 4
        self._board[int(block)] = np.asarray(values)
        self._meetings[quartet].wait(timeout=60)  # all have sent
        found = [self._board[sender] for sender in range(4 * quartet, 4 * quartet + 4)]
        self._meetings[quartet].wait(timeout=60)  # all have received
        return found


def replacements():
    """What stands in for the functions of a module: pairs of the module and a dictionary."""
    quartets = Quartets()
    return (
        (
            cluster,
            {
                "prepare": _nothing,
                "expect": _nothing,
                "exchange_columns": quartets.exchange_columns,
                "wait_for_parts": _nothing,
                "release": _nothing,
            },
        ),
        (
            rounding,
            {"largest": _largest, "scales": quartets.scales, "store": _store_rounded},
        ),
        (warpgroup, {"barrier": _nothing}),
        (support, {"sm_count": lambda: 132}),
        (plgpu, {"griddepcontrol_wait": _nothing, "griddepcontrol_launch_dependents": _nothing}),
        (
            token_columns,
            {
                "load": _load,
                "store": _store,
                "inverse_rms": _inverse_rms,
                "store_sums": _store_sums,
                "add_parts": lambda ref: jnp.sum(ref[...], axis=0),
            },
        ),
    )


def _nothing(*_):
    pass


def _largest(x_ref, first, columns):
    part = jax.lax.dynamic_slice_in_dim(_padded(x_ref, columns), first, columns, 1)
    return jnp.repeat(jnp.max(jnp.abs(part), axis=1).astype(jnp.float32), 16)


def _store_rounded(x_ref, first, reciprocal, target_ref):
    stage = jax.lax.dynamic_slice_in_dim(_padded(x_ref, 128), first, 128, 1)
    values = stage.astype(jnp.float32) * reciprocal[::16, None]
    target_ref[...] = values.astype(target_ref.dtype)


def _padded(x_ref, columns):
    return jnp.pad(x_ref[...], ((0, 0), (0, 4 * columns)))


def _load(ref, first, tokens):
    rows = jnp.broadcast_to(ref[...], (tokens, ref.shape[-1]))
    return jax.lax.dynamic_slice_in_dim(rows, first, 16, 1).astype(jnp.float32).reshape(-1)


def _store(ref, first, values):
    ref[:, pl.ds(first, 16)] = values.astype(ref.dtype).reshape(-1, 16)


def _inverse_rms(ref, columns, eps):
    mean = jnp.sum(ref[...], axis=1) / columns
    return jnp.repeat(jax.lax.rsqrt(mean + eps), 16)


def _store_sums(ref, part, values):
    ref[:, pl.ds(part, 1)] = jnp.sum(values.reshape(-1, 16), axis=1, keepdims=True)
