"""Build the blocks of all cp ranks in one pass. A plain class: actors and tests wrap it.

In:   a ``ViewSource`` (``pipeline/plan_source.py``, or pre-sharded files), a ``BlockRequest``
Out:  ``EncodedBlock``s (``pipeline/step_block.py``); the builder is a ``BlockSupply``

A block is a pure function of its request. What is kept is a cache, bounded in bytes, so that the cp ranks of
one dp rank share a build; losing it costs time only.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ringfeed.pipeline.block_columns import facts_block, narrow_block
from ringfeed.pipeline.feed_facts import DEFAULT_BLOCK_BYTES, FeedFacts
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS
from ringfeed.pipeline.plan_growth import follow_plan
from ringfeed.pipeline.plan_source import PlanSource
from ringfeed.pipeline.ranks import MISSING
from ringfeed.pipeline.step_block import BlockHeader, BlockRows, encode_block
from ringfeed.pipeline.step_packs import Pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ringfeed.pipeline.feed_request import BlockRequest
    from ringfeed.pipeline.laid_pack import LaidPack
    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.step_block import EncodedBlock
    from ringfeed.pipeline.step_share import StepShare
    from ringfeed.pipeline.view_source import BuildSource, Overlay, ViewSource

__all__ = ["DEFAULT_KEEP_BYTES", "BlockBuilder", "PlanOpener"]

DEFAULT_KEEP_BYTES = 256 << 20
"""A few blocks of 8 MB for 8 cp ranks: peers ask within the time of a step."""
# Every rank at the end of a growing plan asks for facts again and again.
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOpener:
    """Opens a plan as a builder's source; small, and picklable for an actor."""

    plan: Path
    """Finished, or still being made: then its name to be."""
    spec: ViewSpec
    """From ``opening.open_spec``, made once by whoever starts the service."""
    corpora: tuple[Path, ...] | None = None
    """In command order; None takes the plan's own."""
    overlay: Overlay | None = None
    """Checked against the plan by whoever starts the service (``skip.check_steps``)."""

    def __call__(self) -> ViewSource:
        """Open plan and corpora.

        Raises:
            ValueError: if there is no plan and nobody makes one, or the corpora are not the planned ones.
            CorruptDataError: if plan or corpora are damaged.
        """
        plan = follow_plan(self.plan)
        return PlanSource(plan, plan.open_corpora(self.corpora), spec=self.spec, overlay=self.overlay)


class BlockBuilder:
    """Answers requests from a source of views. One at a time, from any thread."""

    def __init__(
        self,
        open_source: Callable[[], BuildSource],
        *,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        keep_bytes: int = DEFAULT_KEEP_BYTES,
    ) -> None:
        """Open the source.

        Args:
            open_source: gives a source of the run. If its plan is growing, it is looked at again when a step
                is asked for beyond the last one known.
            block_bytes: ids and labels of one rank in a full block.
            keep_bytes: for built blocks; the last build is kept whatever it takes.
        """
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, ...], tuple[EncodedBlock, ...]] = OrderedDict()
        self._source = open_source()
        self._facts = FeedFacts.of_source(self._source, block_bytes=block_bytes)
        self._looked = time.monotonic()
        self.num_builds = 0
        """Builds so far: requests of cp peers, and repeated ones, share them."""
        self.bytes_built = 0
        """Of all cp ranks' blocks."""
        self.tokens_built = 0
        """Local tokens of all cp ranks, padding included."""
        self.bytes_kept = 0
        """Bytes of the blocks that are kept."""

    def facts(self) -> FeedFacts:
        """Return what can be asked for now.

        Raises:
            ValueError: if the planner gave a growing plan up.
            CorruptDataError: if a new block of it is damaged.
        """
        with self._lock:
            if self._facts.is_growing and time.monotonic() - self._looked > _LOOK_SECONDS:
                self._look()
            return self._facts

    def block(self, request: BlockRequest) -> EncodedBlock:
        """Return the block that ``request`` asks for, with its columns alone.

        Raises:
            ValueError: if the request does not fit the run; says what would.
            CorruptDataError: if plan, corpora or shards are damaged.
        """
        with self._lock:
            self._check(request)
            if not request.columns:
                return facts_block(self._header(request))
            blocks = self._blocks(request)
        return narrow_block(blocks[request.place.cp_rank], request, self._facts)

    def build(self, request: BlockRequest) -> tuple[EncodedBlock, ...]:
        """Return the blocks of all cp ranks, with all columns; errors as ``block``."""
        with self._lock:
            self._check(request)
            return self._blocks(request)

    def close(self) -> None:
        """Give back files and blocks."""
        with self._lock:
            self._source.close()
            self._kept.clear()
            self.bytes_kept = 0

    def _check(self, request: BlockRequest) -> None:
        steps = request.steps(self._facts.batches_per_step(request.place))
        if steps[-1] >= self._facts.num_steps and self._facts.is_growing:
            self._look()
        request.check(self._facts)

    def _look(self) -> None:
        """See what the planner has finished since the last look."""
        source = self._source
        source.refresh()
        # First: a last step that comes now is then seen with the next look, not missed for good.
        is_growing = source.is_growing
        self._facts = self._facts.grown(
            num_steps=source.num_steps, is_growing=is_growing, max_slots=source.max_slots()
        )
        self._looked = time.monotonic()

    def _blocks(self, request: BlockRequest) -> tuple[EncodedBlock, ...]:
        key = request.share_key
        blocks = self._kept.get(key)
        if blocks is None:
            blocks = self._kept[key] = self._build(request)
            self.num_builds += 1
            self.bytes_built += _size(blocks)
            self.bytes_kept += _size(blocks)
            while self.bytes_kept > self._keep_bytes and len(self._kept) > 1:
                self.bytes_kept -= _size(self._kept.popitem(last=False)[1])
        self._kept.move_to_end(key)
        return blocks

    def _build(self, request: BlockRequest) -> tuple[EncodedBlock, ...]:
        shares = self._shares(request)
        packs = _packs_in(request, shares, self._facts)
        laid = [self._source.lay_pack(step, pack) for step, pack in packs]
        per_rank = _fill(self._source, laid)
        self.tokens_built += sum(len(rows.input_ids) for rows in per_rank)
        return tuple(
            encode_block(
                replace(request, place=replace(request.place, cp_rank=rank), columns=BLOCK_COLUMNS),
                rows,
                shares=shares,
                facts=self._facts,
            )
            for rank, rows in enumerate(per_rank)
        )

    def _shares(self, request: BlockRequest) -> list[StepShare]:
        steps = request.steps(self._facts.batches_per_step(request.place))
        return [self._source.step_share(step, request.place) for step in steps]

    def _header(self, request: BlockRequest) -> BlockHeader:
        return BlockHeader(
            fingerprint=self._facts.fingerprint,
            request=request,
            shares=tuple(self._shares(request)),
            digests={},
        )


def _size(blocks: Sequence[EncodedBlock]) -> int:
    return sum(block.nbytes for block in blocks)


def _packs_in(request: BlockRequest, shares: Sequence[StepShare], facts: FeedFacts) -> list[tuple[int, int]]:
    """Return (step, pack) of every row of the block."""
    tables = {share.step: share.packs for share in shares}
    return [
        (step, pack)
        for step, micro_batch in request.batches(facts.batches_per_step(request.place))
        for pack in tables[step][micro_batch].tolist()
        if pack != MISSING
    ]


def _fill(source: BuildSource, laid: Sequence[LaidPack]) -> list[BlockRows]:
    """Return every cp rank's rows of some packs; tokens go straight to where they are sent from."""
    cp_size = source.spec.cp_size
    lengths = np.array([[len(m) for m in pack.maps] for pack in laid], dtype=np.int64).reshape(-1, cp_size)
    offsets = np.concatenate([np.zeros((1, cp_size), dtype=np.int64), np.cumsum(lengths, axis=0)])
    totals = offsets[-1].tolist()
    ids = [np.empty(total, dtype=np.int32) for total in totals]
    labels = [np.empty(total, dtype=np.int32) for total in totals]
    supervised = np.empty((len(laid), cp_size), dtype=np.int64)
    for row, pack in enumerate(laid):
        bounds = list(zip(offsets[row].tolist(), offsets[row + 1].tolist(), strict=True))
        supervised[row] = source.fill_ranks(
            pack,
            [part[first:last] for part, (first, last) in zip(ids, bounds, strict=True)],
            [part[first:last] for part, (first, last) in zip(labels, bounds, strict=True)],
        )
    pieces = _piece_columns(laid)
    return [
        BlockRows(
            **pieces,
            token_offsets=np.ascontiguousarray(offsets[:, rank]),
            input_ids=ids[rank],
            labels=labels[rank],
            local_supervised=np.ascontiguousarray(supervised[:, rank]),
        )
        for rank in range(cp_size)
    ]


def _piece_columns(laid: Sequence[LaidPack]) -> dict[str, Any]:
    """Return what is the same on every cp rank."""
    pieces = Pieces.concat([pack.pieces for pack in laid])
    counts = [len(pack.pieces) for pack in laid]
    return {
        "piece_offsets": np.cumsum([0, *counts], dtype=np.int64),
        "documents": pieces.documents,
        "starts": pieces.starts,
        "lengths": pieces.lengths,
        "skipped": np.concatenate([np.empty(0, dtype=np.bool_), *(pack.skipped for pack in laid)]),
    }
