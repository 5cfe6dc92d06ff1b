"""Chooses the algorithm that serves a call of `sparse_ffn`, by one table of rules.

`select` is a pure function of a `Case` and a `Request`. It takes the first rule that neither the
case nor the request excludes, and gives a reason for each rule that it passed over.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax

from pallas_kernels.kernels import HOPPER, MAX_FEW_TOKENS, Kernels

Implementation = Literal["xla", "mosaic"]
Packing = Literal["twell", "unions"]
Gradients = Literal["dense", "sparse"]
Algorithm = Literal["dense", "few_tokens", "dense_block", "twell", "unions"]

BACK_ENDS: tuple[Kernels, ...] = (HOPPER,)  # the first that can serve is implementation="mosaic"

MANY_TOKENS = 1024  # enough to fill a GPU
FROM_MANY = (MANY_TOKENS, math.inf)
FROM_FEW_TO_MANY = (MAX_FEW_TOKENS + 1, MANY_TOKENS - 1)


def unmeasured(has_live: bool, tokens: int) -> str | None:
    """What no record knows of a call with so many tokens on a device, in words; None if all is.

    Live neurons were measured with many tokens
    (benchmarks/results/live-nvidia-h100-80gb-hbm3-20261125.json).
    """
    if has_live and tokens < MANY_TOKENS:
        return f"live neurons for fewer than {MANY_TOKENS} tokens"
    return None


class CannotServe(ValueError):
    """The implementation, packing or gradients asked for cannot serve these inputs here."""


@dataclass(frozen=True)
class Case:
    """What decides about a call, apart from the caller's wishes.

    Attributes:
      tokens: number of tokens on each device.
      neurons: H.
      gated: whether there is a gate projection.
      back_end: the name of the kernels that can serve these weights here; None if none can.
      expected_nnz: mean non-zeros per token; None if unknown.
      unsupported: why kernels cannot serve these inputs here; None if they can.
      has_live: whether neurons from a number on the device on never fire.
      lasso: whether `FFNStats.lasso` is wanted.
      quantised: whether w_gate or w_up is `Quantised`.
    """

    tokens: int
    neurons: int
    gated: bool
    back_end: str | None = None
    expected_nnz: float | None = None
    unsupported: str | None = None
    has_live: bool = False
    lasso: bool = False
    quantised: bool = False


@dataclass(frozen=True)
class Request:
    """What the caller asks for; None leaves it to the table.

    Attributes:
      implementation: "xla" or "mosaic".
      packing: the packed format of the gate, for more than 64 tokens.
      gradients: how to compute the backward, for more than 64 tokens.
      named_by: the argument or environment variable that named the implementation.
    """

    implementation: Implementation | None = None
    packing: Packing | None = None
    gradients: Gradients | None = None
    named_by: str = "implementation"

    @property
    def wants_kernels(self) -> str | None:
        """The part of the request that only kernels can serve, in words; None if there is none."""
        if self.implementation == "mosaic":
            return f"{self.named_by}='mosaic'"
        if self.packing is not None:
            return f"packing={self.packing!r}"
        return "gradients='sparse'" if self.gradients == "sparse" else None

    def check(self) -> None:
        """Raises CannotServe if no algorithm offers everything that was asked for."""
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
    """The implementation that an algorithm belongs to, the packings and gradients that it serves,
    whether it serves a number of live neurons and `Quantised` weights, and the gradients with which
    it has the lasso."""

    implementation: Implementation
    packings: tuple[Packing | None, ...]
    gradients: tuple[Gradients, ...]
    live: bool = True
    quantised: bool = True
    lasso: tuple[Gradients | None, ...] = ()


OFFERS: dict[Algorithm, Offer] = {
    "dense": Offer("xla", (None,), ("dense",), lasso=(None, "dense")),
    # Few tokens are not packed, and their gradients are dense whatever is asked for.
    "few_tokens": Offer("mosaic", (None, "twell", "unions"), ("dense", "sparse")),
    "dense_block": Offer("mosaic", (None,), ("dense",), live=False, quantised=False),
    "twell": Offer("mosaic", (None, "twell"), ("dense",), live=False),
    # What the lasso is made of is kept for sparse gradients alone.
    "unions": Offer("mosaic", (None, "unions"), ("dense", "sparse"), lasso=("sparse",)),
}


_NO_LASSO = "kernels compute the lasso with gradients='sparse' alone"
_ALL_NEURONS = "its kernels compute all neurons: leave out live, or write packing='unions'"
_NO_GRADIENTS = "Quantised weights have no gradients: leave gradients out"


@dataclass(frozen=True)
class Rule:
    """A row of the table: an algorithm, and the calls that it serves.

    Attributes:
      algorithm: the algorithm.
      tokens: the least and the most tokens on each device.
      back_end: the name of the kernels that were measured; None for any.
      gated: whether the block must have a gate; None for both forms.
      most_open: the largest `expected_nnz` that it serves, as a share of H; None for any.
      knows: whether it serves only if `expected_nnz` is given.
      record: file under benchmarks/results that supports the rule; None where the caller decides.
    """

    algorithm: Algorithm
    tokens: tuple[int, float] = (1, math.inf)
    back_end: str | None = None
    gated: bool | None = None
    most_open: float | None = None
    knows: bool = False
    record: str | None = None

    def excluded(self, case: Case, request: Request) -> str | None:
        """Why the rule does not serve this call, in words; None if it does."""
        offer, (least, most) = OFFERS[self.algorithm], self.tokens
        if request.implementation not in (None, offer.implementation):
            return f"implementation={request.implementation!r} was asked for"
        if request.packing not in (None, *offer.packings):
            return f"packing={request.packing!r} was asked for"
        if request.gradients not in (None, *offer.gradients):
            return f"gradients={request.gradients!r} was asked for"
        if offer.implementation == "mosaic" and case.unsupported:
            return case.unsupported
        unknown = unmeasured(case.has_live, case.tokens)
        # Callers who ask for kernels get them by the rules without a record.
        if offer.implementation == "mosaic" and self.record and unknown:
            return f"not measured with {unknown}"
        if case.quantised and request.gradients == "sparse":
            return _NO_GRADIENTS
        if case.lasso and request.gradients not in offer.lasso:
            return _NO_LASSO
        if case.quantised and not offer.quantised:
            return "it takes no Quantised weights"
        if case.has_live and not offer.live:
            return _ALL_NEURONS
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
_FEW_TOKENS = "ffn-few-nvidia-h100-80gb-hbm3-20261126.json"
_PROMPTS = "ffn-prompts-nvidia-h200-20261125.json"
_STUDY = "study-nvidia-h100-80gb-hbm3-20261121.json"

RULES: tuple[Rule, ...] = (  # the first that is not excluded serves
    # Where the kernels win, if the caller leaves the choice. If many neurons fire, those for few
    # tokens take up to a fourth more time, unions a few percent.
    Rule("few_tokens", (1, 16), "Hopper", most_open=0.05, record=_FEW_TOKENS),
    Rule("few_tokens", (17, 32), "Hopper", most_open=0.03, record=_FEW_TOKENS),
    Rule("few_tokens", (33, MAX_FEW_TOKENS), "Hopper", most_open=0.015, record=_FEW_TOKENS),
    # Dense, too, but faster than the products of a library, whatever the pattern.
    Rule("dense_block", FROM_FEW_TO_MANY, "Hopper", record=_PROMPTS),
    Rule("unions", FROM_MANY, "Hopper", gated=True, record=_GOALS),
    # Without a gate one matmul of two can be sparse, not two of three.
    Rule("unions", FROM_MANY, "Hopper", gated=False, most_open=0.01, knows=True, record=_STUDY),
    # Everything else, if the caller leaves the choice.
    Rule("dense", record=_SHAPES),
    # For callers who ask for kernels, or for what only kernels can serve.
    Rule("few_tokens", (1, MAX_FEW_TOKENS)),
    Rule("unions", FROM_MANY),
    Rule("dense_block", FROM_FEW_TO_MANY),
    Rule("twell"),
    Rule("unions"),
)


@dataclass(frozen=True)
class Selection:
    """The result of `select`.

    Attributes:
      rule: the rule that serves.
      passed_over: the rules before it, each with the reason why it does not serve.
      case: the case that was decided.
    """

    rule: Rule
    passed_over: tuple[tuple[Rule, str], ...]
    case: Case

    def __str__(self) -> str:
        """Lines for the case, for each rule that was passed over, and for the one that serves."""
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
    """Finds the first rule that serves.

    Raises:
      CannotServe: no rule does; the message names the request and the reason.
    """
    request.check()
    passed_over: list[tuple[Rule, str]] = []
    for rule in RULES:
        why = rule.excluded(case, request)
        if why is None:
            return Selection(rule, tuple(passed_over), case)
        passed_over.append((rule, why))
    refusals = _NO_GRADIENTS, _NO_LASSO, _ALL_NEURONS
    refused = next((why for _, why in passed_over if why in refusals), None)
    raise CannotServe(f"{request.wants_kernels} cannot serve: {case.unsupported or refused}")


def back_end(w_down: jax.Array | jax.ShapeDtypeStruct) -> tuple[Kernels | None, str | None]:
    """The first back end that can serve here and None, or None and why none can."""
    reasons = []
    for kernels in BACK_ENDS:
        why = kernels.unsupported(w_down)
        if why is None:
            return kernels, None
        reasons.append(why)
    return None, "; ".join(reasons)
