"""Where the draw of a plan stands: one cursor per source, and one per length bucket inside it.

In:   counts kept while documents are drawn (``piece_stream.py``)
Out:  ``StreamCursor``, as JSON in every snapshot (``snapshots.py``)
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ringfeed.pipeline.planner.draw import BLOCK_DOCUMENTS

__all__ = ["LaneCursor", "SourceCursor", "StreamCursor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneCursor:
    """Where one source, or one length bucket of it, is in the current epoch's order."""

    block: int = 0
    """The draw block that the next document comes from; the number of blocks when none is left."""
    offset: int = 0
    """Documents of the block that have been drawn, counting those of this bucket alone."""
    drawn: int = 0
    """Tokens (or documents, as the mixture counts) drawn in this epoch."""
    credit: int = 0
    """What it is owed: its share of all that was drawn, less what it was drawn, times ``WEIGHT_UNIT``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCursor:
    """Where one source stands."""

    epoch: int = 0
    lanes: tuple[LaneCursor, ...] = (LaneCursor(),)
    """One per length bucket, shortest documents first; a single one without a curriculum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCursor:
    """Where all sources stand."""

    sources: tuple[SourceCursor, ...] = ()
    """In command order; none: the beginning."""

    def documents_drawn(self, num_documents: int) -> int:
        """Return how many documents were drawn, epochs together, where all documents are one source."""
        if not self.sources:
            return 0
        source = self.sources[0]
        lane = source.lanes[0]
        in_epoch = min(lane.block * BLOCK_DOCUMENTS + lane.offset, num_documents)
        return source.epoch * num_documents + in_epoch

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values; ``from_json`` is the way back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StreamCursor":
        """Rebuild what ``to_json()`` gave."""
        return cls(
            sources=tuple(
                SourceCursor(
                    epoch=source["epoch"], lanes=tuple(LaneCursor(**lane) for lane in source["lanes"])
                )
                for source in values["sources"]
            )
        )
