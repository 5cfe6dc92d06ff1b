"""Who serves a call of `sparse_ffn`: one table of rules, and what they are asked.

`select` is a pure function of a `Case` and a `Request`. It takes the first rule that neither the
case nor the request excludes, and says for each rule before it why it was passed over.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax

from pallas_kernels.kernels import HOPPER, MAX_FEW_TOKENS, Kernels

Implementation = Literal["xla", "mosaic"]
Packing = Literal["twell", "unions"]
Gradients = Literal["dense", "sparse"]
Algorithm = Literal["dense", "few_tokens", "twell", "unions"]

BACK_ENDS: tuple[Kernels, ...] = (HOPPER,)  # for implementation="mosaic", the first that can serve

MANY_TOKENS = 1024  # so many fill a GPU
FROM_MANY = (MANY_TOKENS, math.inf)


class CannotServe(ValueError):
    """What was asked for cannot be computed for these inputs on this machine."""


@dataclass(frozen=True)
class Case:
    """What the table is asked about.

    Attributes:
      tokens: on each device.
      neurons: H.
      gated: whether there is a gate projection.
      back_end: the name of the kernels that can serve these inputs here; None if none can.
      expected_nnz: mean non-zeros per token; None if unknown.
      unsupported: why kernels cannot serve these inputs here; None if they can.
    """

    tokens: int
    neurons: int
    gated: bool
    back_end: str | None = None
    expected_nnz: float | None = None
    unsupported: str | None = None


@dataclass(frozen=True)
class Request:
    """What the caller named; None leaves it to the table.

    Attributes:
      implementation: the back end.
      packing: of the gate, for more than 64 tokens.
      gradients: of more than 64 tokens.
      named_by: what the implementation was named by: the argument, or an environment variable.
    """

    implementation: Implementation | None = None
    packing: Packing | None = None
    gradients: Gradients | None = None
    named_by: str = "implementation"

    @property
    def wants_kernels(self) -> str | None:
        """What the caller named that only kernels have, in words; None if there is nothing."""
        if self.implementation == "mosaic":
            return f"{self.named_by}='mosaic'"
        if self.packing is not None:
            return f"packing={self.packing!r}"
        return "gradients='sparse'" if self.gradients == "sparse" else None

    def check(self) -> None:
        """Raises CannotServe if no algorithm has everything that was named."""
        if self.implementation == "xla" and (self.packing or self.gradients == "sparse"):
            what = f"packing={self.packing!r}" if self.packing else "gradients='sparse'"
            raise CannotServe(
                f"{self.named_by}='xla' cannot serve {what}, which only kernels have; leave one out"
            )
        if self.packing == "twell" and self.gradients == "sparse":
            raise CannotServe(
                "packing='twell' cannot serve gradients='sparse', which only unions have; write "
                "packing='unions'"
            )


@dataclass(frozen=True)
class Offer:
    """What an algorithm can give: an implementation, packings and gradients."""

    implementation: Implementation
    packings: tuple[Packing | None, ...]
    gradients: tuple[Gradients, ...]


OFFERS: dict[Algorithm, Offer] = {
    "dense": Offer("xla", (None,), ("dense",)),
    # Few tokens have no packed form, and dense gradients in any case.
    "few_tokens": Offer("mosaic", (None, "twell", "unions"), ("dense", "sparse")),
    "twell": Offer("mosaic", (None, "twell"), ("dense",)),
    "unions": Offer("mosaic", (None, "unions"), ("dense", "sparse")),
}


@dataclass(frozen=True)
class Rule:
    """A row of the table: the algorithm, and where it serves.

    Attributes:
      algorithm: what serves.
      tokens: the least and the most, on each device.
      back_end: the kernels that were measured; None for any.
      gated: None for both forms.
      most_open: share of the neurons that a token may fire at most; None for any.
      knows: whether it serves only if the caller knows how many fire.
      record: under benchmarks/results, the measurement behind it; None where the caller decides.
    """

    algorithm: Algorithm
    tokens: tuple[int, float] = (1, math.inf)
    back_end: str | None = None
    gated: bool | None = None
    most_open: float | None = None
    knows: bool = False
    record: str | None = None

    def excluded(self, case: Case, request: Request) -> str | None:
        """Why the rule does not serve, in words; None if it does."""
        offer, (least, most) = OFFERS[self.algorithm], self.tokens
        if request.implementation not in (None, offer.implementation):
            return f"implementation={request.implementation!r} was asked for"
        if request.packing not in (None, *offer.packings):
            return f"packing={request.packing!r} was asked for"
        if request.gradients not in (None, *offer.gradients):
            return f"gradients={request.gradients!r} was asked for"
        if offer.implementation == "mosaic" and case.unsupported:
            return case.unsupported
        if self.back_end not in (None, case.back_end):
            return f"measured for {self.back_end} alone"
        if not least <= case.tokens <= most:
            wanted = f"{least} or more" if most == math.inf else f"{least} to {most}"
            return f"{case.tokens} tokens on a device, not {wanted}"
        if self.gated not in (None, case.gated):
            return "only with a gate" if self.gated else "only without a gate"
        if case.expected_nnz is None:
            return "expected_nnz is not given" if self.knows else None
        limit = math.inf if self.most_open is None else self.most_open * case.neurons
        if case.expected_nnz > limit:
            return f"expected_nnz={case.expected_nnz:g}, more than {limit:g}"
        return None


_GOALS = "ffn-goals-nvidia-h100-80gb-hbm3-20261121.json"
_SHAPES = "ffn-nvidia-h100-80gb-hbm3-20261121.json"
_FEW_TOKENS = "ffn-twell-nvidia-h100-80gb-hbm3-20261121.json"
_STUDY = "study-nvidia-h100-80gb-hbm3-20261121.json"

RULES: tuple[Rule, ...] = (  # the first that is not excluded serves
    # Where the kernels win, if the caller leaves the choice. Rows are walked one by one for few
    # tokens, so many open gates are slow there; dense gates cost unions a few percent.
    Rule("few_tokens", (1, 32), "Hopper", most_open=0.05, record=_FEW_TOKENS),
    Rule("few_tokens", (33, MAX_FEW_TOKENS), "Hopper", most_open=0.02, record=_FEW_TOKENS),
    Rule("unions", FROM_MANY, "Hopper", gated=True, record=_GOALS),
    # Without a gate one matmul of two can be sparse, not two of three.
    Rule("unions", FROM_MANY, "Hopper", gated=False, most_open=0.01, knows=True, record=_STUDY),
    # Everything else, if the caller leaves the choice. From 65 to 1023 tokens no mean tells.
    Rule("dense", record=_SHAPES),
    # What a caller gets who asked for kernels, or for what only they have.
    Rule("few_tokens", (1, MAX_FEW_TOKENS)),
    Rule("unions", FROM_MANY),
    Rule("twell"),
    Rule("unions"),
)


@dataclass(frozen=True)
class Selection:
    """What `select` found.

    Attributes:
      rule: that serves.
      passed_over: the rules before it, and why each does not serve.
      case: that was asked about.
    """

    rule: Rule
    passed_over: tuple[tuple[Rule, str], ...]
    case: Case

    def __str__(self) -> str:
        """A line for the case, for each rule that was passed over, and for the one that serves."""
        case = self.case
        nnz = "unknown" if case.expected_nnz is None else f"{case.expected_nnz:g}"
        lines = [
            f"{case.tokens} tokens on a device, {case.neurons} neurons, "
            f"{'gated' if case.gated else 'not gated'}, expected_nnz {nnz}:"
        ]
        passed_over = dict.fromkeys((rule.algorithm, why) for rule, why in self.passed_over)
        lines += [f"  not {algorithm}: {why}" for algorithm, why in passed_over]
        record = f" (benchmarks/results/{self.rule.record})" if self.rule.record else ""
        offer = OFFERS[self.rule.algorithm]
        return "\n".join([*lines, f"  {self.rule.algorithm}, by {offer.implementation}{record}"])


def select(case: Case, request: Request) -> Selection:
    """The first rule that serves.

    Raises:
      CannotServe: none does; the message says what the caller named and why it cannot be had.
    """
    request.check()
    passed_over: list[tuple[Rule, str]] = []
    for rule in RULES:
        why = rule.excluded(case, request)
        if why is None:
            return Selection(rule, tuple(passed_over), case)
        passed_over.append((rule, why))
    raise CannotServe(f"{request.wants_kernels} cannot serve: {case.unsupported}")


def back_end(w_down: jax.Array) -> tuple[Kernels | None, str | None]:
    """The first back end that can serve a block here, or None, and why none can."""
    reasons = []
    for kernels in BACK_ENDS:
        why = kernels.unsupported(w_down)
        if why is None:
            return kernels, None
        reasons.append(why)
    return None, "; ".join(reasons)
