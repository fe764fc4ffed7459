"""One source, or one length bucket of it, read in drawing order.

In:   draw blocks from a ``BlockFeed`` (``block_feed.py``)
Out:  documents ahead of the cursor; those that were taken, as pieces and losses (``stream.py``)
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.block_feed import BlockFeed
from ringfeed.pipeline.planner.cursors import LaneCursor
from ringfeed.pipeline.planner.drawn_blocks import BlockKey, DrawnBlock
from ringfeed.pipeline.planner.stream import Losses
from ringfeed.pipeline.step_packs import Pieces

__all__ = ["Lane", "LaneDocuments", "LanePieces"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LaneDocuments:
    """Documents that a lane could give next, K of them."""

    amounts: Int64
    """int64 [K], what each counts for in the mixture."""
    slots: Int64
    """int64 [K]"""


@dataclass(frozen=True, slots=True, eq=False)
class LanePieces:
    """The pieces of documents that a lane gave, P of K documents."""

    pieces: Pieces
    slots: Int64
    """int64 [P]"""
    counts: Int64
    """int64 [K], pieces of each document."""


class Lane:
    """A position in the order of one lane. ``ahead`` looks, ``take`` moves."""

    def __init__(self, feed: BlockFeed, *, source: int, lane: int, epoch: int, cursor: LaneCursor) -> None:
        self._feed = feed
        self._source = source
        self._lane = lane
        self._epoch = epoch
        self._block_number = cursor.block
        self._offset = cursor.offset
        self._key: BlockKey | None = None
        self._block: DrawnBlock | None = None
        self.drawn = cursor.drawn
        """What was drawn of this epoch, as the mixture counts."""
        self.credit = cursor.credit

    @property
    def done(self) -> bool:
        """Is nothing left of the epoch?"""
        return self._block_number >= self._feed.num_blocks(self._source)

    @property
    def cursor(self) -> LaneCursor:
        return LaneCursor(block=self._block_number, offset=self._offset, drawn=self.drawn, credit=self.credit)

    def begin_epoch(self, epoch: int) -> None:
        """Go to the first document of ``epoch``; what the lane is owed stays."""
        self._epoch = epoch
        self._block_number = self._offset = self.drawn = 0

    def ahead(self, slots: int, *, max_piece: int | None) -> LaneDocuments:
        """Return the next documents of the current block, up to the one that would reach ``slots`` slots.

        If they do not reach it, they are all that is left of the block.
        """
        block = self._load(max_piece)
        first, before = self._place(block)
        last = int(np.searchsorted(block.ends, before + slots)) + 1
        ends = block.ends[first:last]
        return LaneDocuments(block.amounts[first:last], np.diff(ends, prepend=before))

    def take(self, count: int, *, whole_block: bool) -> tuple[LanePieces, Losses]:
        """Take ``count`` of the documents that ``ahead`` returned last.

        Args:
            count: documents with pieces; those without, between them, are passed over.
            whole_block: pass over the documents without pieces at the end of the block, too.
        """
        if self._block is None:
            raise RuntimeError("ahead() comes before take()")
        block = self._block
        first, _ = self._place(block)
        last = first + count
        offset = self._offset
        if count:
            offset = int(block.places[last - 1]) + 1
        if whole_block:
            offset = len(block.ids)
        taken = self._pieces(block, first, last), self._losses(block, offset)
        self.drawn += int(block.amounts[first:last].sum())
        self._move(block, offset)
        return taken

    def _load(self, max_piece: int | None) -> DrawnBlock:
        key = BlockKey(
            source=self._source,
            lane=self._lane,
            epoch=self._epoch,
            block=self._block_number,
            max_piece=max_piece,
        )
        if self._block is None or self._key != key:
            self._block, self._key = self._feed.get(key), key
        return self._block

    def _place(self, block: DrawnBlock) -> tuple[int, int]:
        """Return the first document with pieces that was not drawn, and the slots before it."""
        first = int(np.searchsorted(block.places, self._offset))
        return first, int(block.ends[first - 1]) if first else 0

    def _pieces(self, block: DrawnBlock, first: int, last: int) -> LanePieces:
        cut = block.cut
        of_documents = block.first_pieces[first : last + 1]
        low, high = int(of_documents[0]), int(of_documents[-1])
        pieces = Pieces(
            block.ids[cut.places[low:high]],
            cut.starts[low:high],
            cut.lengths[low:high],
            np.full(high - low, self._epoch, np.int32),
        )
        return LanePieces(pieces, block.slots[low:high], np.diff(of_documents))

    def _losses(self, block: DrawnBlock, offset: int) -> Losses:
        cut, passed = block.cut, [self._offset, offset]
        num_empty = int(np.diff(np.searchsorted(cut.empty, passed))[0])
        low, high = np.searchsorted(cut.shortened, passed)
        ids = block.ids[cut.shortened[low:high]]
        return Losses(num_empty, ids, np.full(len(ids), self._epoch, np.int64), cut.lost[low:high])

    def _move(self, block: DrawnBlock, offset: int) -> None:
        self._offset = offset
        if offset == len(block.ids):
            self._block_number, self._offset = self._block_number + 1, 0
            self._block = self._key = None
