"""Draw blocks made ready for packing: drawn, measured, cut into pieces.

In:   draws (``draw.py``), lengths (``documents.py``), the rule that cuts documents (``overflow.py``)
Out:  ``DrawnBlock``: a pure function of its key, so that any thread may make any block

A lane is one source of the plan, or with a curriculum that makes long documents wait, one length bucket of
it. The lanes of a source go through the same order, each passing over the documents of the others.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.mixture_recipe import MixtureRecipe, MixtureUnit
from ringfeed.pipeline.planner.documents import DocumentTable
from ringfeed.pipeline.planner.draw import Draw
from ringfeed.pipeline.planner.given import row_documents
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.overflow import CutDocuments, CutRule, cut_documents
from ringfeed.sharding.padding import slot_lengths

__all__ = ["BlockKey", "BlockMaker", "DrawnBlock", "LaneOrder", "SourceSpan", "source_spans"]

Int64 = NDArray[np.int64]

_LENGTHS_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpan:
    """Documents that are drawn as one source: consecutive global ids."""

    name: str
    first_document: int
    num_documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockKey:
    """Which block of which lane, and how long its pieces may be."""

    source: int
    lane: int
    epoch: int
    block: int
    max_piece: int | None


@dataclass(frozen=True, slots=True, eq=False)
class DrawnBlock:
    """The D documents of one lane in one draw block, in drawing order. K of them have pieces, P in all."""

    ids: Int64
    """int64 [D], global ids."""
    cut: CutDocuments
    slots: Int64
    """int64 [P], slots of each piece."""
    places: Int64
    """int64 [K], which of the D documents has pieces; ascending."""
    first_pieces: Int64
    """int64 [K + 1], pieces before each of the K documents."""
    amounts: Int64
    """int64 [K], what each of them counts for in the mixture: its tokens, or 1."""
    ends: Int64
    """int64 [K], slots of the block up to and including each of them."""


def source_spans(documents: DocumentTable, *, num_sources: int) -> tuple[SourceSpan, ...]:
    """Return the documents of each source of a mixture; a single source has all documents of the plan."""
    if num_sources == 1:
        name = ", ".join(source.name for source in documents.sources)
        return (SourceSpan(name=name, first_document=0, num_documents=documents.num_documents),)
    spans, first = [], 0
    for source in documents.sources:
        spans.append(SourceSpan(name=source.name, first_document=first, num_documents=source.num_documents))
        first += source.num_documents
    return tuple(spans)


class LaneOrder:
    """The order of the documents of each lane. Holds no block and no position."""

    def __init__(
        self,
        documents: DocumentTable,
        mixture: MixtureRecipe,
        *,
        seed: int | None,
        row_starts: Int64 | None = None,
    ) -> None:
        """Take what is drawn from, and how.

        Args:
            documents: what is drawn from.
            mixture: its sources; one where rows are drawn.
            seed: of the shuffle.
            row_starts: int64 [R + 1], first document of each row that is drawn as one; None draws documents.
        """
        self.documents = documents
        self.spans = source_spans(documents, num_sources=mixture.num_sources)
        self.edges = mixture.bucket_edges()
        """Rising lengths between buckets: lane i has documents longer than edge i - 1, up to edge i."""
        self._row_starts = row_starts
        sizes = [span.num_documents for span in self.spans] if row_starts is None else [len(row_starts) - 1]
        self._draws = [Draw(size, seed=seed, source=number) for number, size in enumerate(sizes)]

    @property
    def num_lanes(self) -> int:
        """Lanes of each source."""
        return len(self.edges) + 1

    def num_blocks(self, source: int) -> int:
        """Return the draw blocks in an epoch of ``source``."""
        return self._draws[source].num_blocks

    def block(self, key: BlockKey) -> tuple[Int64, Int64]:
        """Return ids and lengths of the lane's documents in a block: int64 [D] each."""
        drawn = self._draws[key.source].block(key.epoch, key.block)
        ids = drawn + self.spans[key.source].first_document
        if self._row_starts is not None:
            ids = row_documents(drawn, self._row_starts)
        lengths = self.documents.lengths(ids)
        if not self.edges:
            return ids, lengths
        inside = self.lanes_of(lengths) == key.lane
        return ids[inside], lengths[inside]

    def lanes_of(self, lengths: Int64) -> NDArray[np.intp]:
        """Return the lane of documents of these lengths; a length that is an edge is below it."""
        return np.searchsorted(self.edges, lengths)


class BlockMaker:
    """Makes draw blocks: cuts and measures the documents of an order."""

    def __init__(self, order: LaneOrder, options: PlanOptions, *, unit: MixtureUnit) -> None:
        """Take the order, what documents count for, and of the options overflow, pack and padding sizes."""
        self.order = order
        self._options = options
        self._unit = unit

    def make(self, key: BlockKey) -> DrawnBlock:
        """Return one block.

        Raises:
            ValueError: if a document of it is too long and the overflow policy is ``error``.
        """
        ids, lengths = self.order.block(key)
        cut = cut_documents(ids, lengths, self._rule(key.max_piece))
        slots = slot_lengths(cut.lengths, multiple=self._options.document_multiple)
        firsts = np.flatnonzero(cut.starts == 0)
        first_pieces = np.append(firsts, len(slots))
        amounts = np.ones(len(firsts), np.int64)
        if self._unit is MixtureUnit.TOKENS and len(firsts):
            amounts = np.add.reduceat(cut.lengths, firsts)
        ends = np.cumsum(slots)[first_pieces[1:] - 1]
        return DrawnBlock(ids, cut, slots, cut.places[firsts], first_pieces, amounts, ends)

    def lane_amounts(self, source: int) -> Int64:
        """Return what the documents of each lane of ``source`` come to in an epoch: int64 [lanes]."""
        span = self.order.spans[source]
        totals = np.zeros(self.order.num_lanes, np.int64)
        for first in range(0, span.num_documents, _LENGTHS_AT_ONCE):
            last = min(first + _LENGTHS_AT_ONCE, span.num_documents)
            ids = np.arange(first, last, dtype=np.int64) + span.first_document
            lengths = self.order.documents.lengths(ids)
            # Uncut: where long documents are cut there is one lane, and nothing to weigh.
            cut = cut_documents(ids, lengths, self._rule(None))
            amounts = cut.lengths if self._unit is MixtureUnit.TOKENS else (cut.starts == 0).astype(np.int64)
            np.add.at(totals, self.order.lanes_of(lengths[cut.places]), amounts)
        return totals

    def _rule(self, max_piece: int | None) -> CutRule:
        return CutRule(
            pack_tokens=self._options.longest_piece,
            field=self._options.longest_piece_field,
            overflow=self._options.overflow,
            balance=self._options.balance,
            max_piece=max_piece,
        )
