"""What every back end and every algorithm is tested with.

A new back end is a line in tests/conftest.py, a new algorithm a line in `ALGORITHMS`.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests import seeds
from twell_jax import sparse_ffn
from twell_jax.ffn import dispatch

ALGORITHMS = {  # how a caller asks for it, and some tokens that it serves
    "few_tokens": ({"implementation": "mosaic"}, 5),
    "dense_block": ({"implementation": "mosaic"}, 130),
    "twell": ({"packing": "twell"}, 100),
    "unions": ({"packing": "unions"}, 700),
}
PACKED = ["twell", "unions"]

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
every_packing = pytest.mark.parametrize("algorithm", PACKED)
either_form = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])

xla = jax.jit(functools.partial(sparse_ffn, implementation="xla"))

TOKENS, COLUMNS = P(("data", "fsdp")), P(None, "fsdp")


def sparse(capacity=None):
    """The options of `sparse_ffn` for sparse gradients, with this capacity."""
    return {"packing": "unions", "gradients": "sparse" if capacity is None else capacity}


def by(algorithm, **options):
    """`sparse_ffn` by this algorithm."""
    return functools.partial(sparse_ffn, **ALGORITHMS[algorithm][0], **options)


def run(algorithm, *operands):
    """(y, stats) by this algorithm and the back end that serves; no program is traced twice."""
    return _compiled(dispatch.BACK_ENDS, algorithm)(*operands)


def assert_same_stats(algorithm, operands, found, expected):
    """The statistics of two calls with the same operands, but for the rounding of one sum.

    TwELL lists heavy tokens as they arrive and sums their l1 in that order, so that two float32
    sums of as many numbers, none of them negative, may differ.
    """
    additions = len(operands[0]) + len(operands[-1]) if algorithm == "twell" else 0
    np.testing.assert_allclose(found.l1, expected.l1, rtol=additions * 2.0**-23)
    others = (replace(stats, l1=jnp.zeros(())) for stats in (found, expected))
    jax.tree.map(np.testing.assert_array_equal, *others)


@functools.cache
def _compiled(back_ends, algorithm):
    return jax.jit(by(algorithm))


def draw(m, d, h, *, gated=True, dtype=jnp.bfloat16, threshold=2.2):
    """(x, w_gate, w_up, w_down), of NumPy, whose gates are active above `threshold` deviations.

    The last feature of x is 1; -1 there makes nearly all active for a token, 0 half.
    """
    rng = seeds.rng()
    x, w_gate, w_up, w_down = (rng.standard_normal(s) for s in ((m, d), *3 * [(h, d)]))
    x[:, -1] = 1
    for w in (w_gate, w_up, w_down):
        w /= d**0.5
    (w_gate if gated else w_up)[:, -1] = -threshold
    arrays = [a.astype(dtype) for a in (x, w_gate, w_up, w_down)]
    return arrays if gated else [arrays[0], None, *arrays[2:]]


def draw_exact(m, d, h, *, gated=True, density=0.01):
    """As `draw`, but gates are 0 or 1 without rounding; also which are active, bool `[m, h]`.

    Tokens that follow each other are alike.
    """
    rng = seeds.rng()
    neurons = rng.random((h, d)) < density * rng.exponential(size=(h, 1))
    kinds = rng.integers(0, d // 4, m) + 3 * d // 4 * np.arange(m) // m
    x, *weights = draw(m, d, h, gated=gated)
    x = np.eye(d, dtype=x.dtype)[kinds]
    weights[0 if gated else 1] = (2 * neurons - 1).astype(x.dtype)
    return [x, *weights], neurons.T[kinds]


def in_float32(operands):
    return [None if a is None else a.astype(np.float32) for a in operands]


def gradients(ffn, operands, dy):
    """Those of sum(y dy) + l1 for the operands that there are; y and the stats."""

    def loss(operands):
        y, stats = ffn(*operands)
        return jnp.sum(y.astype(jnp.float32) * dy) + stats.l1, (y, stats)

    return jax.grad(loss, has_aux=True)(operands)
