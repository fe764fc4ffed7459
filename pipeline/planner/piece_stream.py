"""The stream of pieces in drawing order, taken in portions of so many slots.

In:   lanes (``lanes.py``), weights and limits by step (``pipeline/mixture_recipe.py``)
Out:  ``StreamPieces``, whole documents at a time; a cursor from which the same stream goes on

The step that a place of the stream belongs to is where it would stand if steps were filled in drawing order:
the look-ahead moves a document by a window at most.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.mixture_recipe import WEIGHT_UNIT, LongDocuments, MixtureRecipe, apportion
from ringfeed.pipeline.planner.block_feed import BlockFeed
from ringfeed.pipeline.planner.cursors import LaneCursor, SourceCursor, StreamCursor
from ringfeed.pipeline.planner.lanes import Lane, LanePieces
from ringfeed.pipeline.planner.merge import merge_lanes
from ringfeed.pipeline.planner.stream import UNKNOWN_STEP, Losses, StreamPieces
from ringfeed.pipeline.step_packs import Pieces

__all__ = ["DrawRule", "PieceStream", "PoolPlace"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawRule:
    """What the draw follows from one step on."""

    mixture: MixtureRecipe
    stops_after: tuple[int | None, ...]
    """Per source the epochs after which the draw ends."""
    first_step: int = 0
    """Windows that begin at this step, or later, follow it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlace:
    """Where in the plan the next piece of a pool belongs."""

    first_step: int
    """The first step of the window that the pool is for."""
    slots_before: int
    """Slots of the pool before the piece."""
    step_slots: int
    """Slots of a step."""

    @property
    def step(self) -> int:
        return self.first_step + self.slots_before // self.step_slots

    def slots_until(self, step: int) -> int:
        """Return the slots from here to the beginning of ``step``."""
        return (step - self.first_step) * self.step_slots - self.slots_before


@dataclass(slots=True)
class _Source:
    """One source: its epoch, and the lanes that share it."""

    name: str
    epoch: int
    lanes: list[Lane]
    amounts: list[int] | None
    """What an epoch of each lane comes to; None for a single lane, which needs no share."""


@dataclass(frozen=True, slots=True)
class _Share:
    """A lane that may be drawn from now."""

    source: _Source
    lane: Lane
    weight: int
    early: bool
    """Its documents are above the curriculum's limit, but nothing else is left of the epoch."""


class PieceStream:
    """Reads on from a cursor. Portions end at document borders."""

    def __init__(self, feed: BlockFeed, *, cursor: StreamCursor, drawn_slots: int) -> None:
        maker, order = feed.maker, feed.maker.order
        beginning = SourceCursor(lanes=(LaneCursor(),) * order.num_lanes)
        cursors = cursor.sources or (beginning,) * len(order.spans)
        self._edges = order.edges
        self._sources = [
            _Source(
                order.spans[number].name,
                at.epoch,
                [
                    Lane(feed, source=number, lane=lane, epoch=at.epoch, cursor=lane_cursor)
                    for lane, lane_cursor in enumerate(at.lanes)
                ],
                maker.lane_amounts(number).tolist() if order.num_lanes > 1 else None,
            )
            for number, at in enumerate(cursors)
        ]
        self.drawn_slots = drawn_slots
        """Slots of all pieces taken so far, in this run and before the cursor."""

    @property
    def cursor(self) -> StreamCursor:
        """Where the stream stands."""
        return StreamCursor(
            sources=tuple(
                SourceCursor(epoch=source.epoch, lanes=tuple(lane.cursor for lane in source.lanes))
                for source in self._sources
            )
        )

    def take(self, slots: int, *, rule: DrawRule, place: PoolPlace) -> tuple[StreamPieces, Losses]:
        """Take whole documents until they have at least ``slots`` slots, or the stream ends.

        Raises:
            ValueError: if a source that is drawn from has no document with a token that may be kept.
        """
        parts, losses = [], []
        while slots > 0:
            step = place.step
            shares = self._shares(rule, step)
            if not shares:
                break
            change = rule.mixture.next_change(step)
            portion = slots if change is None else min(slots, place.slots_until(change))
            max_piece = None
            if rule.mixture.long_documents is LongDocuments.CUT:
                max_piece = rule.mixture.limit_at(step)
            part, loss = self._draw(shares, portion, max_piece=max_piece)
            parts.append(part)
            losses.append(loss)
            taken = int(part.slots.sum())
            slots -= taken
            place = replace(place, slots_before=place.slots_before + taken)
        return StreamPieces.concat(parts), Losses.concat(losses)

    def _shares(self, rule: DrawRule, step: int) -> list[_Share]:
        """Return the lanes to draw from, with weights that sum to ``WEIGHT_UNIT``; none at the end."""
        mixture = rule.mixture
        for source, stop in zip(self._sources, rule.stops_after, strict=True):
            if stop is not None and source.epoch >= stop:
                return []
        weights = [
            0 if drop is not None and source.epoch >= drop else weight
            for source, drop, weight in zip(
                self._sources, mixture.drops_after, mixture.weights_at(step), strict=True
            )
        ]
        if sum(weights) != WEIGHT_UNIT:
            weights = list(apportion(weights))
        limit = mixture.limit_at(step) if mixture.long_documents is LongDocuments.DEFER else None
        shares = []
        for source, weight in zip(self._sources, weights, strict=True):
            if weight:
                shares += self._lane_shares(source, weight, limit)
        return shares

    def _lane_shares(self, source: _Source, weight: int, limit: int | None) -> list[_Share]:
        """Split the weight of a source over its lanes by what is left of each, so that they end together."""
        if source.amounts is None:
            return [_Share(source, source.lanes[0], weight, early=False)]
        left = [number for number, lane in enumerate(source.lanes) if not lane.done]
        # The last lane has no edge: its documents are as long as they like.
        allowed = left if limit is None else [i for i in left if i < bisect_right(self._edges, limit)]
        early = not allowed
        chosen = allowed or left[:1]
        remaining = [max(1, source.amounts[i] - source.lanes[i].drawn) for i in chosen]
        return [
            _Share(source, source.lanes[i], part, early)
            for i, part in zip(chosen, apportion(remaining, weight), strict=True)
            if part
        ]

    def _draw(
        self, shares: Sequence[_Share], slots: int, *, max_piece: int | None
    ) -> tuple[StreamPieces, Losses]:
        """Draw up to ``slots`` slots, and the document that reaches them; less where a block ends.

        Raises:
            ValueError: as ``take``.
        """
        documents = [share.lane.ahead(slots, max_piece=max_piece) for share in shares]
        credits = np.array([share.lane.credit for share in shares], np.int64)
        order, counts, dry = merge_lanes(
            np.concatenate([ahead.amounts for ahead in documents]),
            np.concatenate([ahead.slots for ahead in documents]),
            np.cumsum([0, *(len(ahead.slots) for ahead in documents)]),
            np.array([share.weight for share in shares], np.int64),
            credits,
            slots,
            WEIGHT_UNIT,
        )
        parts, losses = [], []
        for number, (share, count, credit) in enumerate(
            zip(shares, counts.tolist(), credits.tolist(), strict=True)
        ):
            part, loss = share.lane.take(count, whole_block=number == dry)
            share.lane.credit = credit
            parts.append(part)
            losses.append(replace(loss, num_early=count if share.early else 0))
            if all(lane.done for lane in share.source.lanes):
                self._begin_epoch(share.source)
        return self._in_order(parts, order), Losses.concat(losses)

    def _begin_epoch(self, source: _Source) -> None:
        """Begin the next epoch of a source of which nothing is left.

        Raises:
            ValueError: if nothing was drawn in this one, and others would go round for ever.
        """
        if not any(lane.drawn for lane in source.lanes) and len(self._sources) > 1:
            raise ValueError(
                f"source {source.name!r} has no document with a token that may be kept (empty ones are "
                "skipped, overflow=drop leaves out those longer than a pack); give it weight 0, or use "
                "overflow split or truncate"
            )
        source.epoch += 1
        for lane in source.lanes:
            lane.begin_epoch(source.epoch)

    def _in_order(self, parts: Sequence[LanePieces], order: Int64) -> StreamPieces:
        """Bring the pieces of all lanes into the order in which their documents were drawn."""
        pieces = Pieces.concat([part.pieces for part in parts])
        slots = np.concatenate([part.slots for part in parts])
        if len(parts) > 1:
            places = np.argsort(order, kind="stable")
            of_pieces = np.repeat(places, np.concatenate([part.counts for part in parts]))
            sorting = np.argsort(of_pieces, kind="stable")
            pieces, slots = pieces.take(sorting), slots[sorting]
        arrivals = np.cumsum(slots) - slots + self.drawn_slots
        self.drawn_slots += int(slots.sum())
        return StreamPieces(pieces, slots, arrivals, np.full(len(slots), UNKNOWN_STEP, np.int64))
