"""The stream of pieces in drawing order, taken in portions of so many slots.

In:   a draw (``draw.py``), lengths (``documents.py``), the overflow policy (``overflow.py``)
Out:  ``StreamPieces``, whole documents at a time; a cursor from which the same stream goes on
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.documents import DocumentTable
from ringfeed.pipeline.planner.draw import Draw, DrawCursor
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.overflow import CutDocuments, cut_documents
from ringfeed.pipeline.step_packs import Pieces
from ringfeed.sharding.padding import slot_lengths

__all__ = ["UNKNOWN_STEP", "Losses", "PieceStream", "StreamPieces"]

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
    """Documents of the stream that were left out, or lost tokens, each in the order drawn."""

    num_empty: int = 0
    documents: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    epochs: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    tokens: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    """Tokens lost."""

    @classmethod
    def concat(cls, parts: list["Losses"]) -> "Losses":
        """Return the losses of ``parts`` together."""
        return cls(
            sum(part.num_empty for part in parts),
            *(
                np.concatenate([getattr(part, name) for part in parts] or [np.empty(0, np.int64)])
                for name in ("documents", "epochs", "tokens")
            ),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _DrawnBlock:
    """One draw block, cut into pieces."""

    ids: Int64
    cut: CutDocuments
    slots: Int64
    ends: Int64
    """int64 [P], slots of the block up to and including each piece."""


class PieceStream:
    """Reads on from a cursor. Portions end at document borders."""

    def __init__(
        self, documents: DocumentTable, options: PlanOptions, *, cursor: DrawCursor, drawn_slots: int
    ) -> None:
        self._documents = documents
        self._options = options
        self._draw = Draw(documents.num_documents, seed=options.seed, epochs=options.epochs)
        self._block: _DrawnBlock | None = None
        self.cursor = cursor
        self.drawn_slots = drawn_slots
        """Slots of all pieces taken so far, in this run and before the cursor."""

    @property
    def exhausted(self) -> bool:
        """Have all epochs been drawn?"""
        return self.cursor.epoch >= self._options.epochs

    def take(self, slots: int) -> tuple[StreamPieces, Losses]:
        """Take whole documents until they have at least ``slots`` slots, or the stream ends."""
        parts, losses = [], []
        while slots > 0 and not self.exhausted:
            part, loss = self._take_from_block(slots)
            parts.append(part)
            losses.append(loss)
            slots -= int(part.slots.sum())
        return StreamPieces.concat(parts), Losses.concat(losses)

    def _take_from_block(self, slots: int) -> tuple[StreamPieces, Losses]:
        """Take up to ``slots`` slots, and the document that reaches them, from the current draw block."""
        block = self._current_block()
        places = block.cut.places
        first = int(np.searchsorted(places, self.cursor.offset))
        before = int(block.ends[first - 1]) if first else 0
        enough = int(np.searchsorted(block.ends, before + slots))
        next_document = int(places[enough]) + 1 if enough < len(places) else len(block.ids)
        last = int(np.searchsorted(places, next_document))
        part = self._pieces(block, first, last)
        loss = self._losses(block, self.cursor.offset, next_document)
        self._advance(block, next_document)
        return part, loss

    def _current_block(self) -> _DrawnBlock:
        if self._block is None:
            options = self._options
            ids = self._draw.block(self.cursor.epoch, self.cursor.block)
            cut = cut_documents(
                ids,
                self._documents.lengths(ids),
                pack_tokens=options.pack_tokens,
                overflow=options.overflow,
                balance=options.strategy,
            )
            slots = slot_lengths(cut.lengths, multiple=options.document_multiple)
            self._block = _DrawnBlock(ids, cut, slots, np.cumsum(slots))
        return self._block

    def _pieces(self, block: _DrawnBlock, first: int, last: int) -> StreamPieces:
        cut, slots = block.cut, block.slots[first:last]
        arrivals = np.cumsum(slots) - slots + self.drawn_slots
        self.drawn_slots += int(slots.sum())
        pieces = Pieces(
            block.ids[cut.places[first:last]],
            cut.starts[first:last],
            cut.lengths[first:last],
            np.full(last - first, self.cursor.epoch, np.int32),
        )
        return StreamPieces(pieces, slots, arrivals, np.full(last - first, UNKNOWN_STEP, np.int64))

    def _losses(self, block: _DrawnBlock, first: int, last: int) -> Losses:
        cut = block.cut
        num_empty = int(np.diff(np.searchsorted(cut.empty, [first, last]))[0])
        low, high = np.searchsorted(cut.shortened, [first, last])
        ids = block.ids[cut.shortened[low:high]]
        return Losses(num_empty, ids, np.full(len(ids), self.cursor.epoch, np.int64), cut.lost[low:high])

    def _advance(self, block: _DrawnBlock, offset: int) -> None:
        self.cursor = replace(self.cursor, offset=offset)
        if offset < len(block.ids):
            return
        self._block = None
        number = self.cursor.block + 1
        epoch = self.cursor.epoch
        if number == self._draw.num_blocks:
            number, epoch = 0, epoch + 1
        self.cursor = DrawCursor(epoch=epoch, block=number)
