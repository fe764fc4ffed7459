"""What a draw gives: pieces on their way into packs, and what was lost while they were drawn.

In:   documents of all lanes in drawing order (``piece_stream.py``)
Out:  ``StreamPieces``, for a window's pool (``windows.py``), and ``Losses``, for the report and its files
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.step_packs import Pieces

__all__ = ["UNKNOWN_STEP", "Losses", "StreamPieces"]

Int64 = NDArray[np.int64]

UNKNOWN_STEP = -1


@dataclass(frozen=True, slots=True, eq=False)
class StreamPieces:
    """Pieces on their way into packs, P of them, in drawing order."""

    pieces: Pieces
    slots: Int64
    """int64 [P], slots that each piece takes."""
    arrivals: Int64
    """int64 [P], slots of the stream before each piece: strictly rising."""
    arrival_steps: Int64
    """int64 [P], the step that holds this place of the stream; ``UNKNOWN_STEP`` until it is planned."""

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, indices: Int64) -> "StreamPieces":
        """Return copies of the pieces at ``indices``."""
        return StreamPieces(
            self.pieces.take(indices),
            self.slots[indices],
            self.arrivals[indices],
            self.arrival_steps[indices],
        )

    @classmethod
    def concat(cls, parts: list["StreamPieces"]) -> "StreamPieces":
        """Return all pieces of ``parts`` one after another; none for no parts."""
        empty = np.empty(0, np.int64)
        columns = [[part.slots, part.arrivals, part.arrival_steps] for part in parts] or [[empty] * 3]
        return cls(
            Pieces.concat([part.pieces for part in parts]),
            *(np.concatenate(column) for column in zip(*columns, strict=True)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """Documents of the stream that were left out, or lost tokens, in the order of their source."""

    num_empty: int = 0
    documents: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    epochs: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    tokens: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    """Tokens lost."""
    num_early: int = 0
    """Documents drawn before the curriculum allowed their length: nothing else was left of the epoch."""

    @classmethod
    def concat(cls, parts: list["Losses"]) -> "Losses":
        """Return the losses of ``parts`` together."""
        columns = {
            name: np.concatenate([np.empty(0, np.int64), *(getattr(part, name) for part in parts)])
            for name in ("documents", "epochs", "tokens")
        }
        return cls(
            num_empty=sum(part.num_empty for part in parts),
            num_early=sum(part.num_early for part in parts),
            **columns,
        )
