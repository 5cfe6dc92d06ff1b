"""What figures show, apart from their pixels."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text


@contextlib.contextmanager
def seen() -> Iterator[list[Figure]]:
    """Figures that are saved inside the block, in this order."""
    figures, save = [], Figure.savefig
    with pytest.MonkeyPatch.context() as patch:

        def savefig(figure, *arguments, **options):
            figures.append(figure)
            save(figure, *arguments, **options)

        patch.setattr(Figure, "savefig", savefig)
        yield figures


def labels(axes: Axes) -> list[str]:
    """What stands on the panel, such as values at bars; none covers another or is cut off."""
    require_apart(axes.texts)
    boxes = [text.get_window_extent() for text in axes.texts]
    figure = axes.figure.bbox
    assert all(figure.x0 <= box.x0 and box.x1 <= figure.x1 for box in boxes)
    return [text.get_text() for text in axes.texts]


def require_apart(texts: Sequence[Text]) -> None:
    """None of them covers another."""
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
