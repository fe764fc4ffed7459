"""Which documents a plan has drawn, told by where its draw stands: what must be in it, what may, what not.

In:   the order of documents (``drawn_blocks.py``), the state after a plan's last block (``snapshots.py``)
Out:  a ``Demand`` per document and epoch, for ``pipeline/verify_coverage.py``

Epochs before a source's current one were drawn whole. Of the current one, what lies before the cursors was:
one bit per document tells, so that a billion documents take 125 MB.
"""

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.coverage import Demand
from ringfeed.pipeline.planner.cursors import LaneCursor, SourceCursor
from ringfeed.pipeline.planner.drawn_blocks import BlockKey, LaneOrder, SourceSpan
from ringfeed.pipeline.planner.snapshots import Snapshot

__all__ = ["DrawnDocuments"]

Int64 = NDArray[np.int64]


class DrawnDocuments:
    """What was drawn up to a snapshot."""

    def __init__(self, order: LaneOrder, snapshot: Snapshot) -> None:
        """Take the order that was drawn in, and the state after the last block of a plan."""
        self._order = order
        self._carried = snapshot.window.carried.pieces
        beginning = SourceCursor(lanes=(LaneCursor(),) * order.num_lanes)
        self._cursors = snapshot.window.cursor.sources or (beginning,) * len(order.spans)
        self._is_open = snapshot.steps_done > 0
        """Was more drawn, for a window that the plan has only the first steps of?"""
        self._begun = [self._drawn_bits(number) for number in range(len(order.spans))]

    @property
    def spans(self) -> tuple[SourceSpan, ...]:
        """The documents of each source."""
        return self._order.spans

    def num_epochs(self, source: int, *, latest: int) -> int:
        """Return the epochs of ``source`` to look at, where ``latest`` is the last one that was found."""
        epoch = self._cursors[source].epoch
        drawn = epoch if self._begun[source] is None else epoch + 1
        return max(drawn, latest + 1) if self._is_open else drawn

    def demand(self, source: int, low: int, high: int, *, num_epochs: int) -> NDArray[np.int8]:
        """Return a ``Demand`` for the global ids ``low`` to ``high`` of a source: int8 [epochs, D]."""
        cursor, begun = self._cursors[source], self._begun[source]
        later = Demand.MAY_BE if self._is_open else Demand.MUST_NOT_BE
        demand = np.full((num_epochs, high - low), later, np.int8)
        demand[: cursor.epoch] = Demand.MUST_BE
        if begun is not None:
            first = self.spans[source].first_document
            ids = np.arange(low - first, high - first)
            drawn = (begun[ids >> 3] >> (ids & 7)) & 1
            demand[cursor.epoch, drawn.astype(np.bool_)] = Demand.MUST_BE
        inside = (self._carried.documents >= low) & (self._carried.documents < high)
        demand[self._carried.epochs[inside], self._carried.documents[inside] - low] = Demand.MAY_BE
        return demand

    def _drawn_bits(self, source: int) -> NDArray[np.uint8] | None:
        """Return a bit per document that was drawn in the source's current epoch; None if none was."""
        span, cursor = self.spans[source], self._cursors[source]
        bits = None
        for number, lane in enumerate(cursor.lanes):
            for block in range(min(lane.block + 1, self._order.num_blocks(source))):
                key = BlockKey(source=source, lane=number, epoch=cursor.epoch, block=block, max_piece=None)
                ids, _ = self._order.block(key)
                if block == lane.block:
                    ids = ids[: lane.offset]
                if bits is None and len(ids):
                    bits = np.zeros(-(-span.num_documents // 8), np.uint8)
                if bits is not None:
                    local = ids - span.first_document
                    np.bitwise_or.at(bits, local >> 3, np.uint8(1) << (local & 7).astype(np.uint8))
        return bits
