"""What the draw took from each source, from where steps have come to on: the shares that steps should have.

In:   pieces as they are drawn (``windows.py``), with their sources
Out:  ``DrawnTokens``, a part of the planner's state, for planners that move pieces (``slate_shares.py``)

Pieces of later steps may be in steps already, so a pool alone does not tell what was drawn. A stretch of the
stream is as long as a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["DrawnTokens"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTokens:
    """Tokens per source in stretches of the stream: B of them, the first with what comes after the steps."""

    first: int
    """Number of the first stretch, counted from the stream's beginning."""
    tokens: Int64
    """int64 [B, S]"""

    @classmethod
    def none(cls) -> "DrawnTokens":
        """Return what holds before anything is drawn, or where all pieces come from one source."""
        return cls(0, np.zeros((0, 1), np.int64))

    def with_pieces(
        self, stretches: Int64, sources: Int64, tokens: Int64, *, num_sources: int
    ) -> "DrawnTokens":
        """Return the same with pieces that were drawn next.

        Args:
            stretches: int64 [P], stretch of each piece.
            sources: int64 [P], below ``num_sources``.
            tokens: int64 [P]
            num_sources: S
        """
        known = len(self.tokens)
        num_stretches = max(known, int(stretches.max(initial=self.first - 1)) + 1 - self.first)
        summed = np.zeros((num_stretches, num_sources), np.int64)
        summed[:known] = self.tokens
        np.add.at(summed, (stretches - self.first, sources), tokens)
        return DrawnTokens(self.first, summed)

    def since(self, stretch: int) -> "DrawnTokens":
        """Return the same without what comes before ``stretch``."""
        return DrawnTokens(stretch, self.tokens[stretch - self.first :])

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values; ``from_json`` is the way back."""
        return {"first": self.first, "tokens": self.tokens.tolist()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DrawnTokens":
        """Rebuild what ``to_json()`` gave."""
        tokens = np.array(values["tokens"], np.int64)
        return cls(values["first"], tokens.reshape(len(tokens), -1) if len(tokens) else cls.none().tokens)
