"""What each algorithm can serve: the one place that says why a call cannot be served.

A `Case` holds the facts of a call, a `Request` what its caller asks for. Each algorithm answers in
one function of the facts why it cannot serve them. `dispatch` chooses among those that can.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pallas_kernels.kernels import MAX_FEW_TOKENS
from twell_jax.ffn.activations import Activation, rectifier
from twell_jax.ffn.partition import ONE_DEVICE, Devices

Implementation = Literal["xla", "mosaic"]
Packing = Literal["twell", "unions"]
Gradients = Literal["dense", "sparse"]
type LayerGradients = Gradients | float | None  # of one block; a number is a capacity

# Of the sparse gradients that training plans. A layer then reserves no more memory than with dense
# ones, and all patterns that fit with the margin take less time (docs/design/0009).
CAPACITY = 3 / 4
MARGIN = 1.1  # times the need of a layer must fit, for its gradients to become sparse


@dataclass(frozen=True)
class Case:
    """The facts that decide about a call, apart from the caller's wishes.

    Attributes:
      tokens: number of tokens, on all devices together.
      width: D.
      neurons: H.
      gated: whether there is a gate projection.
      activation: a name or a rectifier.
      biases: whether there are any.
      quantised: which of the weights "gate", "up" and "down" are `Quantised`.
      live: whether neurons from a number on, perhaps on the device, are never active.
      sequence: tokens of a sequence whose windows the lasso is wanted of; None if it is not.
      documents: whether these windows end where documents do.
      devices: over how many devices tokens and neurons have yet to be split.
      back_end: the name of the kernels that have a block of these widths, in the dtype of x, on
        this device; None if no kernels do.
      no_back_end: in this case, why not.
      no_8_bits: why these kernels cannot multiply 8-bit floats that the call has; None if they can,
        or if it has none.
    """

    tokens: int
    width: int
    neurons: int
    gated: bool
    activation: Activation = "relu"
    biases: bool = False
    quantised: tuple[str, ...] = ()
    live: bool = False
    sequence: int | None = None
    documents: bool = False
    devices: Devices = ONE_DEVICE
    back_end: str | None = None
    no_back_end: str | None = None
    no_8_bits: str | None = None

    @property
    def tokens_here(self) -> int:
        """Tokens on each device; where they do not divide, XLA pads."""
        return max(1, self.tokens // self.devices.tokens)


@dataclass(frozen=True)
class Request:
    """What the caller asks for; None leaves it to the table.

    Attributes:
      implementation: "xla" or "mosaic".
      packing: the packed format of the gate, for more than 64 tokens.
      gradients: how to compute the backward, for more than 64 tokens; a number asks for sparse ones
        with this capacity.
      named_by: the argument or environment variable that named the implementation.
    """

    implementation: Implementation | None = None
    packing: Packing | None = None
    gradients: LayerGradients = None
    named_by: str = "implementation"

    @property
    def capacity(self) -> float | None:
        """The capacity of the sparse gradients that are asked for; None if none are."""
        if self.gradients is None or self.gradients == "dense":
            return None
        return 1.0 if self.gradients == "sparse" else float(self.gradients)

    @property
    def wants_kernels(self) -> str | None:
        """The part of the request that only kernels can serve, in words; None if there is none."""
        if self.implementation == "mosaic":
            return f"{self.named_by}='mosaic'"
        if self.packing is not None:
            return f"packing={self.packing!r}"
        return None if self.capacity is None else f"gradients={self.gradients!r}"

    @property
    def asks_nothing(self) -> bool:
        """Whether the caller leaves the choice of the algorithm, dense gradients apart."""
        return self.implementation is None and self.wants_kernels is None

    @property
    def contradiction(self) -> str | None:
        """Why no algorithm offers everything that is asked for; None if one does."""
        if self.implementation == "xla" and self.wants_kernels:
            return (
                f"{self.named_by}='xla' cannot serve {self.wants_kernels}, which only kernels "
                "have; leave one out"
            )
        if self.packing == "twell" and self.capacity is not None:
            return (
                f"packing='twell' cannot serve gradients={self.gradients!r}, which only unions "
                "have; write packing='unions'"
            )
        return None


@dataclass(frozen=True)
class Algorithm:
    """What can be asked of an algorithm, and what it answers.

    Attributes:
      implementation: the one that it belongs to.
      packings, gradients: those for which it may serve.
      unsupported: given a case, and whether sparse gradients are asked for, why it cannot serve it,
        in words; None if it can.
    """

    implementation: Implementation
    packings: tuple[Packing, ...]
    gradients: tuple[Gradients, ...]
    unsupported: Callable[[Case, bool], str | None]

    def not_asked(self, request: Request) -> str | None:
        """What was asked for that the algorithm is not, in words; None if there is nothing."""
        if request.implementation not in (None, self.implementation):
            return f"implementation={request.implementation!r} was asked for"
        if request.packing not in (None, *self.packings):
            return f"packing={request.packing!r} was asked for"
        kind = request.gradients if request.capacity is None else "sparse"
        if kind not in (None, *self.gradients):
            return f"gradients={request.gradients!r} was asked for"
        return None

    def excluded(self, case: Case, request: Request) -> str | None:
        """Why the algorithm does not serve this call, in words; None if it can."""
        return self.not_asked(request) or self.unsupported(case, request.capacity is not None)


def _kernels(case: Case, sparse: bool) -> str | None:
    """Why no kernels can serve a case, with sparse gradients or with others."""
    act, devices = rectifier(case.activation), case.devices
    if act is None:
        return f"the activation must be zero for most neurons, got {case.activation}"
    if case.biases:
        return "the kernels add no biases"
    if "down" in case.quantised:
        return "the kernels take no Quantised w_down"
    if case.quantised and case.width % 128:
        return "the kernels take Quantised weights only with D a multiple of 128"
    if case.sequence is not None and (why := lasso_problem(sparse, case.documents)):
        return why
    if case.back_end is None:
        return case.no_back_end
    if case.no_8_bits is not None:
        return case.no_8_bits
    if case.sequence is not None and case.tokens_here % case.sequence:
        return "a device would have parts of the windows of a sequence"
    if devices.tokens * devices.neurons > 1 and devices.explicit_in_shard_map:
        return "inside shard_map the kernels cannot be split over axes that are explicit"
    if case.tokens % devices.tokens:
        return f"{case.tokens} tokens do not divide over {devices.tokens} devices"
    if case.neurons % (128 * devices.neurons):
        return f"{case.neurons} neurons are no multiple of 128 on each of {devices.neurons} devices"
    if case.quantised and sparse:
        return "Quantised weights have no gradients"
    return None


def lasso_problem(sparse: bool, documents: bool) -> str | None:
    """Why kernels compute no lasso, in words; None if some do.

    Args:
      sparse: whether sparse gradients are asked for.
      documents: whether the windows end where documents do.
    """
    if documents:
        return "the kernels compute no lasso over windows of documents"
    if not sparse:  # what the lasso is made of is not kept
        return "kernels compute the lasso with sparse gradients alone"
    return None


def _all_neurons(case: Case) -> str | None:
    """Why kernels that compute all neurons cannot serve a case."""
    if case.live:
        return "its kernels compute all neurons; those of unions take live"
    return None


def _dense(case: Case, sparse: bool) -> str | None:
    return None


def _few_tokens(case: Case, sparse: bool) -> str | None:
    if why := _kernels(case, sparse):
        return why
    if case.sequence is not None:
        return "its kernels compute no lasso"
    if case.tokens_here > MAX_FEW_TOKENS:
        return f"{case.tokens_here} tokens on a device, not 1 to {MAX_FEW_TOKENS}"
    return None


def _dense_block(case: Case, sparse: bool) -> str | None:
    if why := _kernels(case, sparse):
        return why
    return "it takes no Quantised weights" if case.quantised else _all_neurons(case)


def _twell(case: Case, sparse: bool) -> str | None:
    return _kernels(case, sparse) or _all_neurons(case)


ALGORITHMS: dict[str, Algorithm] = {  # of two that can be asked for alike, the later serves more
    "dense": Algorithm("xla", (), ("dense",), _dense),
    # Few tokens are not packed, and their gradients are dense whatever is asked for.
    "few_tokens": Algorithm("mosaic", ("twell", "unions"), ("dense", "sparse"), _few_tokens),
    "dense_block": Algorithm("mosaic", (), ("dense",), _dense_block),
    "twell": Algorithm("mosaic", ("twell",), ("dense",), _twell),
    "unions": Algorithm("mosaic", ("unions",), ("dense", "sparse"), _kernels),
}
