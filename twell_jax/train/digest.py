"""Digests of arrays and of JSON, by which a restored checkpoint is compared with what was saved.

An array's digest does not depend on how it is sharded, see docs/design/0021-digests.md.
"""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def of_arrays(tree: Any) -> dict[str, jax.Array]:
    """The digest of each array of a tree, computed on its devices; all of its processes call it.

    Returns:
      uint32 [2], replicated, for the path of each array, such as "params/embed/embedding/value".
    """
    digests = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        # One after the other: processes on CPUs may wait for each other forever if reductions of
        # several programs are under way.
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        digests[name] = jax.block_until_ready(_sums(x))
    return digests


def texts(digest: jax.Array) -> list[str]:
    """A digest in hexadecimal, as each device of this process has it.

    They differ only if the array's replicas do. The first is that of the first replica.
    """
    values = (np.asarray(shard.data) for shard in digest.addressable_shards)
    return [value.astype(">u4").tobytes().hex() for value in values]


def of_json(tree: Any) -> str:
    """The digest of what JSON keeps of a tree."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """The sum and the sum of squares, modulo 2^32, of a hash of each element and its index."""
    word = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        index = index * jnp.uint32(size) + along
    hashed, zero = _mixed(bits ^ _mixed(index)), jnp.uint32(0)
    # One reduction of both: XLA would keep `hashed`, as large as x, for a second one.
    sums = jax.lax.reduce(
        (hashed, hashed * hashed),
        (zero, zero),
        lambda total, more: (total[0] + more[0], total[1] + more[1]),
        tuple(range(bits.ndim)),
    )
    return jnp.stack(sums)


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of all uint32 in which each bit of x decides about half of the bits."""
    # The constants are those of "lowbias32", https://github.com/skeeto/hash-prospector
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
