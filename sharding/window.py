"""Which tokens of its own document a query sees: so many before itself and so many after.

In:   a caller's ``(left, right)``, as flash attention has it
Out:  ``Window``, and from it one range of keys for each query

Shapes: Q queries.
"""

from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["CAUSAL", "WHOLE", "DocumentSpans", "Window", "read_sides"]

UNLIMITED = -1


def read_sides(window: Any) -> tuple[int, int]:
    """Return both sides of a window, (left, right).

    Raises:
        ValueError: if these are not two integers, or one is below -1.
    """
    sides = tuple(window) if isinstance(window, tuple | list) else ()
    if len(sides) != 2 or any(not hasattr(side, "__index__") or isinstance(side, bool) for side in sides):
        raise ValueError(f"window must be two integers, (left, right), got {window!r}")
    left, right = map(index, sides)
    if min(left, right) < UNLIMITED:
        raise ValueError(f"window={(left, right)} must have sides of at least -1 (-1: no limit)")
    return left, right


@dataclass(frozen=True, slots=True)
class Window:
    """A query sees ``left`` tokens before its own and ``right`` after it, of its own document.

    ``Window(-1, 0)`` is causal, ``Window(-1, -1)`` the whole document, ``Window(w, 0)`` a causal window of w
    tokens and the query's own. Flash attention's ``window_size`` beside ``causal=True`` is ``Window(w, 0)``.

    Raises:
        ValueError: if a side is no integer, or below -1.
    """

    left: int
    """-1: no limit."""
    right: int
    """-1: no limit."""

    def __post_init__(self) -> None:
        read_sides((self.left, self.right))

    @classmethod
    def read(cls, value: "Window | tuple[int, int]") -> "Window":
        """Return the window that ``value`` is, or whose sides it has.

        Raises:
            ValueError: if it is neither.
        """
        return value if isinstance(value, cls) else cls(*read_sides(value))


CAUSAL = Window(-1, 0)
"""A query sees its document up to itself."""
WHOLE = Window(-1, -1)
"""A query sees its whole document."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentSpans:
    """Each query's place, and where its document's real tokens begin and end, in chunk positions."""

    queries: Int64Array
    """int64 [Q]"""
    starts: Int64Array
    """int64 [Q]"""
    stops: Int64Array
    """int64 [Q], one past the document's last token; at most ``starts`` for padding."""

    def key_ranges(self, window: Window) -> tuple[Int64Array, Int64Array]:
        """Return the first key that each query sees and the end of them, int64 [Q] each.

        A query that sees none, such as padding, has an end that is not above its first key.
        """
        starts, stops = self.starts, self.stops
        # No side reaches further than the furthest query: so sides of any size fit into int64.
        far = int(self.queries.max(initial=0)) + int(stops.max(initial=0))
        if window.left != UNLIMITED:
            starts = np.maximum(starts, self.queries - min(window.left, far))
        if window.right != UNLIMITED:
            stops = np.minimum(stops, self.queries + 1 + min(window.right, far))
        return starts, stops
