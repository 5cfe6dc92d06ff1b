"""Chooses the algorithm that serves a call of `sparse_ffn`, by one table of rules.

`select` is a pure function of a `Case`, a `Request` and what was measured of the block on this
card, if anything was. It takes the first rule that neither the case nor the request excludes, and
gives a reason for each rule that it passed over. What was measured here comes first.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.device import current
from pallas_kernels.kernels import AMPERE, HOPPER, MAX_FEW_TOKENS, MMA, Kernels
from twell_jax.ffn import measured
from twell_jax.ffn.algorithms import ALGORITHMS, Case, Request
from twell_jax.ffn.measured import Block, Measured

# The first that can serve is implementation="mosaic", and the last says what none serves. The
# environment may name one, for tests.
BACK_ENDS: tuple[Kernels, ...] = (HOPPER, MMA, AMPERE)
_VARIABLE = "TWELL_JAX_BACK_END"

MANY_TOKENS = 1024  # enough to fill a GPU
FROM_MANY = (MANY_TOKENS, math.inf)
FROM_FEW_TO_MANY = (MAX_FEW_TOKENS + 1, MANY_TOKENS - 1)


class CannotServe(ValueError):
    """The implementation, packing or gradients asked for cannot serve these inputs here.

    Attributes:
      why: the reason alone, for those who did not ask themselves.
    """

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or message

    @classmethod
    def because(cls, asked: str, why: str) -> "CannotServe":
        """What was asked for cannot serve, for a reason in words."""
        return cls(f"{asked} cannot serve: {why}; leave it out", why)


@dataclass(frozen=True)
class Rule:
    """A row of the table: an algorithm, and the calls that it serves.

    Attributes:
      algorithm: a key of `ALGORITHMS`.
      tokens: the least and the most tokens on each device.
      back_end: the name of the kernels that were measured; None for any.
      gated: whether the block must have a gate; None for both forms.
      widths: the least and the largest D.
      record: the file that supports the rule, under benchmarks/results if it is no path; None where
        the caller decides.
    """

    algorithm: str
    tokens: tuple[int, float] = (1, math.inf)
    back_end: str | None = None
    gated: bool | None = None
    widths: tuple[int, float] = (1, math.inf)
    record: str | None = None

    def excluded(self, case: Case, request: Request) -> str | None:
        """Why the rule does not serve this call, in words; None if it does."""
        least, most = self.tokens
        if why := ALGORITHMS[self.algorithm].excluded(case, request):
            return why
        if self.back_end not in (None, case.back_end):
            return f"measured for {self.back_end} alone"
        if not least <= case.tokens_here <= most:
            wanted = f"{least} or more" if most == math.inf else f"{least} to {most}"
            return f"{case.tokens_here} tokens on a device, not {wanted}"
        if self.gated not in (None, case.gated):
            return "only with a gate" if self.gated else "only without a gate"
        narrowest, widest = self.widths
        if not narrowest <= case.width <= widest:
            return f"D is {case.width}, and it was measured to gain from {narrowest} to {widest}"
        return None


_GOALS = "ffn-goals-nvidia-h100-80gb-hbm3-20261127.json"
_SHAPES = "ffn-nvidia-h100-80gb-hbm3-20261121.json"
_FEW_TOKENS = "ffn-few-nvidia-h100-80gb-hbm3-20261126.json"
_PROMPTS = "ffn-prompts-nvidia-h200-20261125.json"
_NARROW = "ffn-borders-896-nvidia-h100-80gb-hbm3-20261127.json"

# D and H of the blocks of these records, and the cards that they ran on.
RECORDED_WIDTHS = {(2048, 5632), (896, 4864)}
RECORDED_CARDS = ("H100", "H200")

RULES: tuple[Rule, ...] = (  # the first that is not excluded serves
    # Where the kernels win, if the caller leaves the choice. If many neurons are active, those for
    # few tokens take up to a third more time; unions a few percent, with 1024 tokens up to a third.
    Rule("few_tokens", back_end="Hopper", record=_FEW_TOKENS),
    # Dense, too, but faster than the products of a library, whatever the pattern, unless those fill
    # the GPU: of narrow blocks it takes more tokens to do so.
    Rule("dense_block", (256, MANY_TOKENS - 1), "Hopper", widths=(1, 2048), record=_PROMPTS),
    Rule(
        "dense_block",
        (MAX_FEW_TOKENS + 1, 2 * MANY_TOKENS - 1),
        "Hopper",
        gated=True,
        widths=(1, 1024),
        record=_NARROW,
    ),
    # Without a gate one matmul of two can be sparse, not two of three.
    Rule("unions", FROM_MANY, "Hopper", gated=True, record=_GOALS),
    # Everything else, if the caller leaves the choice.
    Rule("dense", record=_SHAPES),
    # For callers who ask for kernels, or for what only kernels can serve.
    Rule("few_tokens"),
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
        case, rule = self.case, self.rule
        lines = [
            f"{case.tokens_here} tokens on a device, {case.neurons} neurons, "
            f"{'gated' if case.gated else 'not gated'}:"
        ]
        passed_over = dict.fromkeys((rule.algorithm, why) for rule, why in self.passed_over)
        lines += [f"  not {algorithm}: {why}" for algorithm, why in passed_over]
        record = f" ({Path('benchmarks/results') / rule.record})" if rule.record else ""
        implementation = ALGORITHMS[rule.algorithm].implementation
        return "\n".join([*lines, f"  {rule.algorithm}, by {implementation}{record}"])


def select(case: Case, request: Request, times: Measured | None = None) -> Selection:
    """Finds the first rule that serves.

    Args:
      case: the facts of the call.
      request: what its caller asks for; if nothing, what was measured here decides.
      times: what was measured of the block on this card.

    Raises:
      CannotServe: no rule does; the message names the request and the reason.
    """
    if request.contradiction:
        raise CannotServe(request.contradiction)
    rules = RULES
    if times is not None and request.asks_nothing:
        fastest = times.fastest(case.tokens_here)
        rules = (Rule(fastest, record=str(times.path)), *RULES)
    passed_over: list[tuple[Rule, str]] = []
    for rule in rules:
        why = rule.excluded(case, request)
        if why is None:
            return Selection(rule, tuple(passed_over), case)
        passed_over.append((rule, why))
    # The last one that offers what is asked for serves the most cases of it.
    *_, why = (
        why for rule, why in passed_over if not ALGORITHMS[rule.algorithm].not_asked(request)
    )
    assert request.wants_kernels is not None  # else the dense rule serves
    raise CannotServe.because(request.wants_kernels, why)


def back_end(w: jax.Array | jax.ShapeDtypeStruct) -> tuple[Kernels | None, str | None]:
    """The first back end that can serve here and None, or None and why the last one cannot.

    Args:
      w: `[H, D]`, any of the block's weights, in the dtype of x.

    Raises:
      ValueError: the environment names no back end.
    """
    if jax.config.jax_enable_x64:
        return None, "it has no kernels for jax_enable_x64, with which indices have 64 bits"
    why = None
    for kernels in _wanted():
        why = kernels.unsupported(w)
        if why is None:
            return kernels, None
    return None, why


def recorded_back_end(w: jax.Array | jax.ShapeDtypeStruct) -> Kernels | None:
    """The back end that can serve here, if records say where it gains."""
    kernels, _ = back_end(w)
    return kernels if kernels is not None and kernels.recorded else None


def was_measured_to_gain(case: Case, dtype: jax.typing.DTypeLike) -> bool:
    """Whether sparse gradients were faster for the block of a case when it was measured on this
    card.

    Args:
      case, dtype: see `measured_here`.
    """
    times = measured_here(case, dtype)
    return times is not None and times.fastest_gradients(case.tokens_here) == "sparse"


def _wanted() -> tuple[Kernels, ...]:
    if _VARIABLE not in os.environ:
        return BACK_ENDS
    name, known = os.environ[_VARIABLE], {kernels.name: kernels for kernels in BACK_ENDS}
    if name not in known:
        raise ValueError(f"{_VARIABLE} must be one of {', '.join(known)}, got {name!r}")
    return (known[name],)


def measured_here(case: Case, dtype: jax.typing.DTypeLike) -> Measured | None:
    """What was measured of the block of a case on this card; None if nothing was.

    Args:
      case: the facts of the call.
      dtype: that of x.
    """
    block = measurable(case, dtype)
    return None if block is None else measured.of(current().device_kind, block)


def to_measure(case: Case, request: Request, dtype: jax.typing.DTypeLike) -> Block | None:
    """The block of a call that kernels may serve, but no record nor measurement decides about.

    Args:
      case, request, dtype: see `select` and `measured_here`.
    """
    block = measurable(case, dtype)
    if block is None or not request.asks_nothing or measured_here(case, dtype) is not None:
        return None
    card = current().device_kind
    if (block.width, block.neurons) in RECORDED_WIDTHS and any(n in card for n in RECORDED_CARDS):
        return None
    kernels = (of for of in ALGORITHMS.values() if of.implementation == "mosaic")
    return block if any(of.excluded(case, request) is None for of in kernels) else None


def measurable(case: Case, dtype: jax.typing.DTypeLike) -> Block | None:
    """The block of a case, as `twell_jax.measure` times it; None of one that it does not."""
    if case.back_end is None or case.quantised or case.live or case.devices.neurons > 1:
        return None
    return Block(case.width, case.neurons, case.gated, jnp.dtype(dtype).name)
