"""The look-ahead: draw a window of pieces, pack it, hand out whole steps, carry the rest on.

In:   a ``WindowStart``, from which everything after it follows
Out:  ``Window`` after ``Window``; the last one is final and packs all that is left

Only the plan's end is flushed: epochs abut inside windows, packs and steps. Planned with more epochs, every
window before the final one is the same.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.block_feed import BlockFeed
from ringfeed.pipeline.planner.cursors import StreamCursor
from ringfeed.pipeline.planner.documents import DocumentTable
from ringfeed.pipeline.planner.draw_rules import draw_rules, open_feed, rule_at
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.packing import Packing, Pool
from ringfeed.pipeline.planner.piece_stream import DrawRule, PieceStream, PoolPlace
from ringfeed.pipeline.planner.strategies import Shape, strategy_for
from ringfeed.pipeline.planner.stream import UNKNOWN_STEP, Losses, StreamPieces

__all__ = ["Window", "WindowStart", "plan_windows"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowStart:
    """All that the windows from here on depend on, beside documents and options."""

    cursor: StreamCursor
    drawn_slots: int
    """Slots of all pieces drawn so far."""
    planned_slots: int
    """Slots of all pieces in steps so far; the difference is carried."""
    first_step: int
    """The window's first step."""
    carried: StreamPieces

    @classmethod
    def beginning(cls) -> "WindowStart":
        """Return the start of a plan."""
        return cls(
            cursor=StreamCursor(),
            drawn_slots=0,
            planned_slots=0,
            first_step=0,
            carried=StreamPieces.concat([]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Some whole steps, and what was lost while their pieces were drawn."""

    start: WindowStart
    packing: Packing
    first_packs: Int64
    """int64 [steps + 1], packs before each step of the window."""
    losses: Losses
    after: WindowStart
    """What comes after it; nothing is carried out of the final one."""
    final: bool

    @property
    def num_steps(self) -> int:
        return len(self.first_packs) - 1


def plan_windows(
    documents: DocumentTable,
    options: PlanOptions,
    *,
    start: WindowStart,
    rules: Sequence[DrawRule] | None = None,
) -> Generator[Window, None, None]:
    """Yield the windows from ``start`` on; always at least the final one, which may hold no step.

    Args:
        documents: what is planned.
        options: how.
        start: the beginning, or the start of any window.
        rules: what the draw follows, by step; by default what ``options`` say.

    Raises:
        ValueError: if documents and options do not fit together.
    """
    rules = draw_rules(documents, options) if rules is None else rules
    with open_feed(documents, options, rules) as feed:
        yield from _windows(feed, options, rules, start)


def _windows(
    feed: BlockFeed, options: PlanOptions, rules: Sequence[DrawRule], start: WindowStart
) -> Generator[Window, None, None]:
    shape = Shape(
        pack_tokens=options.pack_tokens,
        multiple=options.document_multiple,
        packs_per_step=options.packs_per_step,
        window=options.window,
    )
    pack = strategy_for(options.strategy)
    stream = PieceStream(feed, cursor=start.cursor, drawn_slots=start.drawn_slots)
    while True:
        carried_slots = int(start.carried.slots.sum())
        place = PoolPlace(
            first_step=start.first_step,
            slots_before=carried_slots,
            step_slots=shape.packs_per_step * shape.pack_tokens,
        )
        rule = rule_at(rules, start.first_step)
        new, losses = stream.take(shape.pool_slots - carried_slots, rule=rule, place=place)
        final = carried_slots + int(new.slots.sum()) < shape.pool_slots
        pool = Pool(StreamPieces.concat([start.carried, new]), len(start.carried), final)
        packing = pack(pool, shape)
        num_packs = len(packing.offsets) - 1
        first_packs = np.append(np.arange(0, num_packs, shape.packs_per_step), num_packs)
        packing, step_slots = _note_arrival_steps(packing, first_packs, start)
        after = WindowStart(
            cursor=stream.cursor,
            drawn_slots=stream.drawn_slots,
            planned_slots=start.planned_slots + step_slots,
            first_step=start.first_step + len(first_packs) - 1,
            carried=packing.carried,
        )
        yield Window(start, packing, first_packs, losses, after, final)
        if final:
            return
        start = after


def _note_arrival_steps(packing: Packing, first_packs: Int64, start: WindowStart) -> tuple[Packing, int]:
    """Fill in which step holds each new piece's place in the stream; also return the window's slots.

    If the steps of the plan were filled in arrival order, to the slots they have, a piece would stand in that
    step: how far it is from it is its displacement.
    """
    before = np.concatenate([[0], np.cumsum(packing.packed.slots)])[packing.offsets]
    ends = start.planned_slots + before[first_packs[1:]]

    def noted(pieces: StreamPieces) -> StreamPieces:
        steps = start.first_step + np.searchsorted(ends, pieces.arrivals, side="right")
        known = pieces.arrival_steps != UNKNOWN_STEP
        return replace(pieces, arrival_steps=np.where(known, pieces.arrival_steps, steps))

    noted_packing = Packing(noted(packing.packed), packing.offsets, noted(packing.carried))
    return noted_packing, int(before[-1])
