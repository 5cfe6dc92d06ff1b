"""The colours of what plots of records compare: each variant has the same one in all of them."""

import math
import re
from collections.abc import Iterable

from matplotlib.colors import to_hex, to_rgb

from twell_jax.plotting import COLORS

# Methods of training, blocks, and ways to compute one run. What stands in one figure differs.
_PLACES = {
    "relu": 0, "silu": 1, "l1": 2, "lasso": 3, "l1 and lasso": 4, "U target": 5,
    "U target and lasso": 6, "l1, warm-up": 7, "l1, re-initialised": 8, "l1, not gated": 9,
    "sparse": 6,
    "twell": 7, "unions": 6, "unions, fp8 gate": 2, "unions, fp8 gate and up": 3, "ellpack": 4,
    "bcoo": 5, "mosaic": 6, "dense-block": 9,
    "dense": 0, "dense, other micro-batches": 5, "sparse gradients": 6, "chosen by layer": 3,
}  # fmt: skip
_VARIANT = re.compile(r"(?P<method>.*?)(?: (?P<strength>\d\S*?))?(?P<change>, .*)?")


def of(names: Iterable[str]) -> dict[str, str]:
    """The colour of each variant, or each method, of a figure.

    The colour of a method is that of its variants in the middle of usual strengths; weaker ones are
    lighter and stronger ones darker. Names that are not known get colours that the others leave.
    """
    parsed = {name: _parsed(name) for name in names}
    methods = dict.fromkeys(method for method, _ in parsed.values())
    taken = {_PLACES[method] for method in methods if method in _PLACES}
    free = [place for place in range(len(COLORS)) if place not in taken] or [0]
    unknown = [method for method in methods if method not in _PLACES]
    places = _PLACES | {method: free[i % len(free)] for i, method in enumerate(unknown)}
    return {
        name: _shade(COLORS[places[method]], strength)
        for name, (method, strength) in parsed.items()
    }


def _parsed(name: str) -> tuple[str, float | None]:
    """The method of a variant, and its strength if it has one."""
    name = name.removeprefix("mosaic, ")  # who computes a packing of ours
    if name in _PLACES or (match := _VARIANT.fullmatch(name)) is None:
        return name, None
    try:
        strength = float(match["strength"]) if match["strength"] else None
    except ValueError:  # a number that is part of the name
        return name, None
    return match["method"] + (match["change"] or ""), strength


def _shade(color: str, strength: float | None) -> str:
    if strength is None:
        return color
    # Coefficients are from 1e-5 to 1e-2, targets of U from 1e-2 to 1, and a small one is strong.
    place = math.log10(strength) / 3
    darkness = min(1, max(-1, 2 * place + 7 / 3 if strength < 0.011 else -2 * place - 2 / 3))
    other, share = (to_rgb("black"), 0.55) if darkness > 0 else (to_rgb("white"), 0.6)
    share *= abs(darkness)
    return to_hex([(1 - share) * a + share * b for a, b in zip(to_rgb(color), other, strict=True)])
