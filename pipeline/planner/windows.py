"""The look-ahead: draw a window of pieces, pack it, hand out whole steps, carry the rest on.

In:   a ``WindowStart``, from which everything after it follows
Out:  ``Window`` after ``Window``; the last one is final and packs all that is left

Only the plan's end is flushed: epochs abut inside windows, packs and steps. Planned with more epochs, every
window before the final one is the same.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.arrival import note_arrival_steps
from ringfeed.pipeline.planner.block_feed import BlockFeed
from ringfeed.pipeline.planner.cursors import StreamCursor
from ringfeed.pipeline.planner.documents import DocumentTable
from ringfeed.pipeline.planner.draw_rules import draw_rules, open_feed, rule_at
from ringfeed.pipeline.planner.drawn_tokens import DrawnTokens
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.packing import Packing, Pool, PoolSources, Shape
from ringfeed.pipeline.planner.piece_stream import DrawRule, PieceStream, PoolPlace
from ringfeed.pipeline.planner.redraw import Redraw
from ringfeed.pipeline.planner.strategies import strategy_for
from ringfeed.pipeline.planner.stream import Losses, StreamPieces
from ringfeed.pipeline.planner.variable_packs import VariableShape, pack_variable

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
    drawn: DrawnTokens
    """Of the stream from ``planned_slots`` on; none where all pieces come from one source."""

    @classmethod
    def beginning(cls) -> "WindowStart":
        """Return the start of a plan."""
        return cls(
            cursor=StreamCursor(),
            drawn_slots=0,
            planned_slots=0,
            first_step=0,
            carried=StreamPieces.concat([]),
            drawn=DrawnTokens.none(),
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
        yield from _windows(feed, options, rules, start, documents)


def _windows(
    feed: BlockFeed,
    options: PlanOptions,
    rules: Sequence[DrawRule],
    start: WindowStart,
    documents: DocumentTable,
) -> Generator[Window, None, None]:
    packer, redraw = _packer(options, documents), Redraw.wanted_for(documents, options)
    stream = PieceStream(feed, cursor=start.cursor, drawn_slots=start.drawn_slots)
    while True:
        carried_slots = int(start.carried.slots.sum())
        place = PoolPlace(
            first_step=start.first_step, slots_before=carried_slots, step_slots=packer.step_slots
        )
        rule = rule_at(rules, start.first_step)
        new, losses = stream.take(packer.pool_slots - carried_slots, rule=rule, place=place)
        final = carried_slots + int(new.slots.sum()) < packer.pool_slots
        pieces = StreamPieces.concat([start.carried, new])
        drawn, mixed = start.drawn, None
        if rule.mixture.num_sources > 1:
            drawn, mixed = _note_drawn(start, pieces, documents, step_slots=packer.step_slots)
        pool = Pool(pieces, len(start.carried), final, start.first_step, start.planned_slots, mixed)
        packing = packer.pack(pool)
        num_packs = len(packing.offsets) - 1
        first_packs = np.append(np.arange(0, num_packs, options.packs_per_step), num_packs)
        if redraw is not None:
            packing = redraw(packing, first_packs, first_step=start.first_step)
        packing, window_slots = note_arrival_steps(packing, first_packs, pool, step_slots=packer.step_slots)
        planned_slots = start.planned_slots + window_slots
        after = WindowStart(
            cursor=stream.cursor,
            drawn_slots=stream.drawn_slots,
            planned_slots=planned_slots,
            first_step=start.first_step + len(first_packs) - 1,
            carried=packing.carried,
            drawn=drawn.since(planned_slots // packer.step_slots),
        )
        yield Window(start, packing, first_packs, losses, after, final)
        if final:
            return
        start = after


def _note_drawn(
    start: WindowStart, pieces: StreamPieces, documents: DocumentTable, *, step_slots: int
) -> tuple[DrawnTokens, PoolSources]:
    """Return what was drawn, with the new pieces of a pool, and where all its pieces come from."""
    sources = documents.source_of(pieces.pieces.documents).astype(np.int64)
    new = slice(len(start.carried), None)
    drawn = start.drawn.with_pieces(
        pieces.arrivals[new] // step_slots,
        sources[new],
        pieces.pieces.lengths[new],
        num_sources=len(documents.sources),
    )
    places = (drawn.first + np.arange(len(drawn.tokens) + 1)) * step_slots
    end = start.drawn_slots + int(pieces.slots[new].sum())
    return drawn, PoolSources(sources, np.minimum(places, end), drawn.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packer:
    """What packs a pool, and the sizes that it works with."""

    pack: Callable[[Pool], Packing]
    pool_slots: int
    """Slots of a pool while the stream goes on."""
    step_slots: int
    """Slots of a step, about."""


def _packer(options: PlanOptions, documents: DocumentTable) -> _Packer:
    shape = Shape.of(options)
    if options.variable is None:
        strategy = strategy_for(options.balance, documents)
        return _Packer(
            pack=lambda pool: strategy(pool, shape),
            pool_slots=shape.pool_slots,
            step_slots=options.packs_per_step * options.pack_tokens,
        )
    variable = VariableShape(
        packs_per_step=options.packs_per_step,
        slate_size=options.packs_per_slate,
        lengths=options.pack_lengths,
        cost_model=options.cost_model,
        work=options.variable,
    )
    return _Packer(
        pack=partial(pack_variable, shape=variable),
        pool_slots=shape.pool_slots,
        step_slots=options.packs_per_step * options.variable.mean_tokens,
    )
