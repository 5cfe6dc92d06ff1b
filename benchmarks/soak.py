"""Compares very many random rows of the block, and of its gradients, with dense ones in float64.

    python -m benchmarks.soak [--rows 1e8] [--seed N] [--back-end MMA | Ampere] [--out DIRECTORY]

Patterns come from ten families, each call draws another one, and every row is checked by itself. A
row is wrong if its error is larger than rounding explains: that of its terms, by the norm that they
have together if they do not cancel, and that of itself. One neuron that is lost or counted twice
among a thousand is more.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm

from benchmarks import record
from pallas_kernels.quantised import Operand, Quantised, rounded
from twell_jax import sparse_ffn

ROUNDING = 2.0**-8  # the most by which rounding to bfloat16 changes a number
TERMS = 3 * ROUNDING  # of the gate, of h and of its gradients
SUMS = 2.0**-18  # error of a sum of products, as a share of the product of both norms
SUMS_IN_8_BITS = 2.0**-12  # the same of 8-bit operands, of which one may be rounded the other way
UNSURE = 1e-4  # a gate this close to zero may fall on either side of it
L1 = 0.1  # weight of the sum of |h| in the loss


class Pattern(NamedTuple):
    """What is active: neuron n is for token m if normal(m, n) > bias[m] * threshold[n].

    Attributes:
      bias: float32 [M]; 1 as usual, -1 for a token with nearly all neurons active.
      threshold: float32 [H].
      source: int32 [M], the token that each token repeats.
      poison: float32 [M], added to one feature.
    """

    bias: jax.Array
    threshold: jax.Array
    source: jax.Array
    poison: jax.Array


def usual(m: int, h: int, share: float = 0.01) -> Pattern:
    """This share of the neurons is active for every token."""
    threshold = jnp.full(h, norm.ppf(1 - share), jnp.float32)
    return Pattern(jnp.ones(m), threshold, jnp.arange(m), jnp.zeros(m))


def skewed(key: jax.Array, m: int, h: int) -> Pattern:
    """30 % of the neurons are never active, the use of the others is log-normal."""
    use, dead = jax.random.split(key)
    share = jnp.clip(0.004 * jnp.exp(1.5 * jax.random.normal(use, (h,))), 1e-6, 0.5)
    threshold = jnp.where(jax.random.uniform(dead, (h,)) < 0.3, 100.0, norm.ppf(1 - share))
    return usual(m, h)._replace(threshold=threshold)


def with_dense(key: jax.Array, m: int, h: int, run: int) -> Pattern:
    """Runs of tokens at random, a hundredth of all, have nearly all neurons active."""
    chosen = jax.random.uniform(key, (-(-m // run),)) < 0.01
    bias = jnp.where(jnp.repeat(chosen, run)[:m], -2.0, 1.0)
    return usual(m, h)._replace(bias=bias)


def not_finite(key: jax.Array, m: int, h: int) -> Pattern:
    """A thousandth of the tokens has a NaN, an inf or a -inf."""
    where, which = jax.random.split(key)
    value = jnp.array([jnp.nan, jnp.inf, -jnp.inf])[jax.random.randint(which, (m,), 0, 3)]
    chosen = jax.random.uniform(where, (m,)) < 1e-3
    return usual(m, h)._replace(poison=jnp.where(chosen, value, 0))


FAMILIES: dict[str, Callable[[jax.Array, int, int], Pattern]] = {
    "uniform, 1 %": lambda key, m, h: usual(m, h),
    "uniform, 12 %": lambda key, m, h: usual(m, h, 0.12),  # 31 in a tile of TwELL, its capacity
    "skewed": skewed,
    "runs of equal tokens": lambda key, m, h: skewed(key, m, h)._replace(
        source=jnp.arange(m) // 37 * 37
    ),
    "dense tokens": functools.partial(with_dense, run=1),
    "dense runs": functools.partial(with_dense, run=256),
    "all zero": lambda key, m, h: usual(m, h)._replace(bias=jnp.full(m, 64.0)),
    "all dense": lambda key, m, h: usual(m, h)._replace(bias=jnp.full(m, -4.0)),
    "half dense": lambda key, m, h: usual(m, h)._replace(bias=jnp.zeros(m)),
    "NaN and inf": not_finite,
}


@dataclass(frozen=True)
class Case:
    """A program of the soak.

    Attributes:
      m, d, h: tokens, features and neurons.
      gated: whether there is a gate projection.
      options: of `sparse_ffn`.
      extra: what it has besides: "live" neurons, a "residual", or all but w_down in "8 bits".
    """

    m: int
    d: int
    h: int
    gated: bool
    options: tuple[tuple[str, str], ...]
    extra: str = ""

    @property
    def live(self) -> int:
        """How many neurons may be active."""
        return self.h * 5 // 8 + 3 if self.extra == "live" else self.h


FEW = (("implementation", "mosaic"),)
TWELL = (("packing", "twell"),)
FORWARD = (("packing", "unions"),)
UNIONS = (*FORWARD, ("gradients", "sparse"))
CASES = [
    Case(1, 512, 1408, True, FEW),
    Case(8, 2048, 5632, True, FEW),
    Case(16, 896, 4864, False, FEW),
    Case(63, 512, 1408, False, FEW),
    Case(64, 3072, 8192, True, FEW),
    Case(33, 512, 1408, True, FEW, "live"),
    Case(48, 512, 1408, True, FEW, "8 bits"),
    Case(301, 512, 1408, True, FEW),  # by the dense block
    Case(777, 1024, 2816, False, FEW),
    Case(301, 512, 1408, True, TWELL),
    Case(40001, 512, 1408, True, TWELL),
    Case(40001, 512, 1408, False, TWELL),
    Case(301, 512, 1408, True, UNIONS),
    Case(40001, 512, 1408, True, UNIONS),
    Case(40001, 512, 1408, False, UNIONS),
    Case(5001, 512, 1408, True, TWELL, "8 bits"),
    Case(5001, 512, 1408, True, FORWARD, "8 bits"),
    Case(5001, 512, 1408, True, FORWARD, "residual"),
    Case(5001, 512, 1408, True, UNIONS, "live"),
    Case(16385, 2048, 5632, True, TWELL),
    Case(16385, 2048, 5632, True, UNIONS),
]


type Program = tuple[Case, str]  # and the name of the pattern's family


def draw(key: jax.Array, case: Case, pattern: Pattern) -> list[Operand]:
    """(x, w_gate, w_up, w_down, dy) in bfloat16 or 8 bits; without a gate, w_up decides what is
    active. The residual, if there is one, is dy."""
    keys = jax.random.split(key, 5)
    x, dy = (jax.random.normal(k, (case.m, case.d)) for k in keys[:2])
    gate, up, down = (jax.random.normal(k, (case.h, case.d)) / case.d**0.5 for k in keys[2:])
    x = x[pattern.source].at[:, -1].set(pattern.bias).at[:, 0].add(pattern.poison)
    gate = gate.at[:, -1].set(-pattern.threshold)
    if not case.gated:
        up = gate
    x, gate, up, down, dy = (a.astype(jnp.bfloat16) for a in (x, gate, up, down, dy))
    if case.extra == "8 bits":
        gate, up = rounded(gate), rounded(up)
    return [x, gate, up, down, dy]


class Factors(NamedTuple):
    """What vectors are multiplied with: float64 [M, H] each.

    Attributes:
      value: the factors.
      error: by how much sums in float32, which may cancel, can change them.
      unsure: how large those are whose gate may fall on either side of zero.
    """

    value: jax.Array
    error: jax.Array
    unsure: jax.Array


class Rows(NamedTuple):
    """The rows of one result: float64 [N, D], and the error that each may have [N]."""

    value: jax.Array
    allowed: jax.Array


def dense(case: Case, x, gate, up, down, dy) -> list[Rows]:
    """y and the gradients of x, the weights that there are, and w_down; where JAX has float64."""
    in_8_bits = case.extra == "8 bits"
    x = rounded(x) if in_8_bits else x
    x, gate, up, down, dy = map(_wide, (x, gate, up, down, dy))
    z, u, dh = x @ gate.T, x @ up.T, dy @ down.T
    size_x, size_dy = (jnp.linalg.norm(a, axis=1)[:, None] for a in (x, dy))
    size_x, size_dy = size_x * (SUMS_IN_8_BITS if in_8_bits else SUMS), size_dy * SUMS
    z_error = size_x * jnp.linalg.norm(gate, axis=1)
    is_live = jnp.arange(case.h) < case.live
    z = jnp.where(is_live, z, -jnp.inf)
    g = jax.lax.reduce_precision(jnp.maximum(z, 0), exponent_bits=8, mantissa_bits=7)
    active, none = g > 0, jnp.zeros_like(g)
    maybe_active = z > -z_error
    u_error = size_x * jnp.linalg.norm(up, axis=1)
    if not case.gated:
        u, u_error = jnp.ones_like(g), none
    dh += L1 / case.m * jnp.sign(g * u)
    dh_error = size_dy * jnp.linalg.norm(down, axis=1)

    def product(a, a_error, b, b_error, unsure=none) -> Factors:
        error = a_error * jnp.abs(b) + b_error * jnp.abs(a)
        return Factors(a * b, jnp.where(maybe_active, error, 0), unsure)

    h = product(g, z_error, u, u_error)
    h = h._replace(value=jnp.where(is_live, h.value, 0))  # also of tokens that are not finite
    dg = product(dh, dh_error, u, u_error, jnp.where(jnp.abs(z) < UNSURE, jnp.abs(dh * u), 0))
    dg = dg._replace(value=jnp.where(active, dg.value, 0))
    pairs = [(dg, gate)]
    if case.gated:
        pairs.append((product(dh, dh_error, g, z_error), up))
    y, dx = rows([(h, down)]), rows(pairs)
    if case.extra == "residual":
        y = Rows(y.value + dy, y.allowed + ROUNDING * jnp.linalg.norm(y.value + dy, axis=1))
    is_finite = jnp.isfinite(x).all(axis=1)
    results = [y, dx._replace(allowed=jnp.where(is_finite, dx.allowed, jnp.inf))]
    results += [rows([(jax.tree.map(jnp.transpose, factors), x)]) for factors, _ in pairs]
    return [*results, rows([(jax.tree.map(jnp.transpose, h), dy)])]


def _wide(a: Operand) -> jax.Array:
    """As float64."""
    if isinstance(a, Quantised):
        return a.values.astype(jnp.float64) * a.scale
    return a.astype(jnp.float64)


def rows(terms: list[tuple[Factors, jax.Array]]) -> Rows:
    """The sum of all terms, each factors [N, K] times vectors [K, D]."""
    value, squares, unsure = 0.0, 0.0, 0.0
    for factors, vectors in terms:
        # In the last feature the weights of gates are alike, so that errors of one sign add up.
        sizes = jnp.linalg.norm(vectors.at[:, -1].multiply(2), axis=1)
        value += factors.value @ vectors
        squares += (TERMS * jnp.abs(factors.value) + factors.error) ** 2 @ sizes**2
        unsure += factors.unsure @ sizes
    own = ROUNDING * jnp.linalg.norm(value, axis=1)
    return Rows(value, own + jnp.sqrt(squares) + unsure)


def ours(case: Case, x, gate, up, down, dy) -> list[jax.Array]:
    """As `dense`, by `sparse_ffn`; y alone, unless the gradients are sparse, too."""
    weights = (gate if case.gated else None), up, down
    extra = {"live": jnp.int32(case.live), "residual": dy}
    extra = {name: value for name, value in extra.items() if name == case.extra}
    ffn = functools.partial(sparse_ffn, **dict(case.options), **extra)
    if case.options != UNIONS:
        return [ffn(x, *weights)[0]]

    def loss(x, weights):
        y, stats = ffn(x, *weights)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)) + L1 * stats.l1, y

    (dx, grads), y = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, weights)
    return [y, dx, *(grad for grad in grads if grad is not None)]


def check(case: Case, key: jax.Array, pattern: Pattern) -> dict[str, jax.Array]:
    """The number of rows checked and wrong, and the largest error as a share of what is allowed."""
    # XLA may leave out a rounding to bfloat16 and back. The barrier keeps it.
    operands = jax.lax.optimization_barrier(draw(key, case, pattern))
    out = ours(case, *operands)
    with jax.enable_x64(True):
        return compare(out, dense(case, *operands)[: len(out)])


def compare(outs: list[jax.Array], reference: list[Rows]) -> dict[str, jax.Array]:
    """As `check`. Where the reference is not finite, the result may not be so, either. Rows whose
    allowed error is not finite are not checked: the gradients of tokens that are not finite."""
    counts = {"rows": 0, "wrong": 0, "worst": 0.0}
    for out, (value, allowed) in zip(outs, reference, strict=True):
        error = jnp.linalg.norm(out.astype(value.dtype) - value, axis=1)
        finite = jnp.isfinite(value).all(axis=1)
        wrong = jnp.where(finite, ~(error <= allowed), jnp.isfinite(out).all(axis=1))
        wrong &= ~finite | jnp.isfinite(allowed)
        ratio = jnp.where(finite & (allowed > 0), error / allowed, 0)
        counts["rows"] += len(error)
        counts["wrong"] += jnp.sum(wrong)
        counts["worst"] = jnp.maximum(counts["worst"], jnp.max(ratio))
    return counts


def compiled(case: Case) -> Callable[[jax.Array, Pattern], dict[str, jax.Array]]:
    """`check` of a case, as a program."""
    key, pattern = jax.random.key(0), usual(case.m, case.h)
    return jax.jit(functools.partial(check, case)).lower(key, pattern).compile()


def compiled_family(program: Program) -> Callable[[jax.Array], Pattern]:
    """What draws the patterns of a program."""
    case, family = program
    function = functools.partial(FAMILIES[family], m=case.m, h=case.h)
    return jax.jit(function).lower(jax.random.key(0)).compile()


def soak(programs: list[Program], rows: float, seed: int) -> Iterator[list[dict[str, Any]]]:
    """After each round in which all are drawn: a row of the record for each program."""
    cases = list(dict.fromkeys(case for case, _ in programs))
    with ThreadPoolExecutor() as pool:
        checks = dict(zip(cases, pool.map(compiled, cases), strict=True))
        patterns = list(pool.map(compiled_family, programs))
    totals = [{"rows": 0, "wrong": 0, "worst": 0.0} for _ in programs]
    keys = map(functools.partial(jax.random.fold_in, jax.random.key(seed)), itertools.count())
    while sum(total["rows"] for total in totals) < rows:
        found = []
        for (case, _), pattern in zip(programs, patterns, strict=True):
            pattern_key, key = jax.random.split(next(keys))
            found.append(checks[case](key, pattern(pattern_key)))
        for total, one in zip(totals, jax.device_get(found), strict=True):
            total["rows"] += int(one["rows"])
            total["wrong"] += int(one["wrong"])
            total["worst"] = max(total["worst"], float(one["worst"]))
        yield [
            {"family": family, "m": case.m, "d": case.d, "h": case.h, "gated": case.gated}
            | {**dict(case.options), "extra": case.extra, **total}
            for (case, family), total in zip(programs, totals, strict=True)
        ]


def parser(description: str | None, rows: float) -> argparse.ArgumentParser:
    """Of the command line of a soak: rows, seed and out."""
    made = record.parser(description)
    made.add_argument("--rows", type=float, default=rows, help="at least so many are compared")
    made.add_argument("--seed", type=int, default=0)
    return made


def main() -> None:
    made = parser(__doc__, rows=1e8)
    made.add_argument("--back-end", choices=("MMA", "Ampere"))
    args = made.parse_args()
    path = record.new_path(record.force(args.back_end, "soak"), args.out)
    for rows in soak(list(itertools.product(CASES, FAMILIES)), args.rows, args.seed):
        record.write("soak", rows, path, seed=args.seed)  # a run that is cut off leaves this
        counts = (sum(row[name] for row in rows) for name in ("rows", "wrong"))
        print("{:.4g} rows, {} wrong".format(*counts), flush=True)
    print(path)


if __name__ == "__main__":
    main()
