"""Balanced work: a step's packs are chosen from a look-ahead of W steps, so that its ranks cost the same.

In:   a ``Pool`` of W steps (``packing.py``)
Out:  a ``Packing`` of the next W / 4 steps, with slates; of all steps where the pool is the last

One document of a whole pack may cost more than all else that a rank does in a step. No order of one step's
documents makes up for that; eight such documents from W steps do, one for each of eight ranks. So each step

1. packs all long pieces of the pool (``slate_choice.py``) and takes runs of packs that cost the same: slates,
   one from each part of the order by cost (``spread``), or all next to each other (``homogeneous``);
2. exchanges pieces with the pool: for old ones first (``slate_age.py``), then for the shares of a mixture
   (``slate_shares.py``), then to make slates level (``slate_swaps.py``);
3. fills up with short pieces, nearly in arrival order (``slate_fill.py``), where ranks lack work.

No piece stands further than W steps from where it arrived, or W + 1 where more must go than packs hold. All
is in whole numbers: the same plan on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.arrival import note_arrival_steps
from ringfeed.pipeline.planner.packing import Packing, Pool, Shape, cut_slates, group_by_pack
from ringfeed.pipeline.planner.slate_age import take_old
from ringfeed.pipeline.planner.slate_choice import choose_packs, make_skeletons
from ringfeed.pipeline.planner.slate_fill import due_units, fill_packs, fill_the_empty
from ringfeed.pipeline.planner.slate_shares import (
    SourceParts,
    burden_skeletons,
    force_shares,
    keep_shares,
    source_parts,
)
from ringfeed.pipeline.planner.slate_stock import (
    IN_POOL,
    TICKS,
    Rules,
    StepPacks,
    Stock,
    is_any_left,
    make_stock,
    set_ages,
)
from ringfeed.pipeline.planner.slate_swaps import level_slates, move_to_packs
from ringfeed.pipeline.planner.stream import StreamPieces

__all__ = ["pack_slates"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Portion:
    """Some steps, from one pool."""

    packing: Packing
    num_packs: list[int]
    """Packs of each step, as they were planned."""
    used: NDArray[np.bool_]
    """bool, of all those packs: does it hold anything? At a plan's end there may be none left for some."""


def pack_slates(pool: Pool, shape: Shape) -> Packing:
    """Pack the next steps; see the module's first lines.

    The last pool is packed a portion at a time, too, each from all that is left, so that what has become old
    meanwhile goes first.
    """
    portions = [_pack_portion(pool, shape)]
    while pool.final and len(portions[-1].packing.carried):
        pool, portions[-1] = _rest_of(pool, portions[-1], shape)
        portions.append(_pack_portion(pool, shape))
    packed = StreamPieces.concat([portion.packing.packed for portion in portions])
    counts = np.concatenate([np.diff(portion.packing.offsets) for portion in portions])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    slates = _slates(
        [count for portion in portions for count in portion.num_packs],
        np.concatenate([portion.used for portion in portions]),
        _pack_costs(packed, offsets, shape),
        shape,
    )
    return Packing(packed, offsets, portions[-1].packing.carried, slates)


def _pack_portion(pool: Pool, shape: Shape) -> _Portion:
    """Pack a quarter of the window's steps; fewer where nothing is left."""
    stream = pool.stream
    stock, rules = make_stock(pool, shape)
    parts = source_parts(pool, shape)
    num_packs: list[int] = []
    while is_any_left(stock) and len(num_packs) < shape.steps_at_once:
        num_packs.append(_pack_step(stock, rules, parts, first_pack=sum(num_packs)))
    used = np.zeros(sum(num_packs), np.bool_)
    used[stock.packs[stock.packs != IN_POOL]] = True
    ranks = np.append(np.where(used, np.cumsum(used) - 1, -1), -1)
    order, offsets, left = group_by_pack(stock.packs, ranks, int(used.sum()))
    return _Portion(Packing(stream.take(order), offsets, stream.take(left)), num_packs, used)


def _rest_of(pool: Pool, portion: _Portion, shape: Shape) -> tuple[Pool, _Portion]:
    """Return the pool that a portion of the last one leaves, and the portion with its steps of arrival."""
    num_packs = len(portion.packing.offsets) - 1
    first_packs = np.append(np.arange(0, num_packs, shape.packs_per_step), num_packs)
    packing, slots = note_arrival_steps(
        portion.packing, first_packs, pool, step_slots=shape.packs_per_step * shape.pack_tokens
    )
    mixed = pool.mixed
    if mixed is not None:
        places = np.searchsorted(pool.stream.arrivals, packing.carried.arrivals)
        mixed = replace(mixed, sources=mixed.sources[places])
    rest = replace(
        pool,
        stream=packing.carried,
        num_carried=len(packing.carried),
        first_step=pool.first_step + len(first_packs) - 1,
        planned_slots=pool.planned_slots + slots,
        mixed=mixed,
    )
    return rest, replace(portion, packing=packing)


def _pack_costs(packed: StreamPieces, offsets: Int64, shape: Shape) -> Int64:
    costs = shape.cost_model.piece_costs(packed.pieces.lengths)
    return np.asarray(np.add.reduceat(costs, offsets[:-1]) if len(costs) else costs, dtype=np.int64)


def _slates(
    num_packs: Sequence[int], used: NDArray[np.bool_], costs: Int64, shape: Shape
) -> NDArray[np.int32]:
    """Return the slate of each used pack in its step.

    Only the last step of a plan may hold fewer packs than others. Where one before it came out short, packs
    move up from the step after it: from there on slates are cut anew.
    """
    planned = np.repeat(np.arange(len(num_packs)), num_packs)
    within = np.arange(len(planned)) - np.repeat(np.cumsum([0, *num_packs])[:-1], num_packs)
    slates = (within // shape.slate_size).astype(np.int32)
    planned, slates = planned[used], np.asarray(slates[used], dtype=np.int32)
    steps, packs = np.divmod(np.arange(len(slates)), shape.packs_per_step)
    moved = np.flatnonzero(steps != planned)
    if len(moved):
        first = int(steps[moved[0]]) * shape.packs_per_step
        slates[first:] = cut_slates(steps[first:], packs[first:], costs[first:], slate_size=shape.slate_size)
    return slates


def _pack_step(stock: Stock, rules: Rules, parts: SourceParts | None, *, first_pack: int) -> int:
    """Pack one step; return how many packs it has."""
    longs = stock.longs
    set_ages(stock, rules)
    skeletons, supply = make_skeletons(stock, rules)
    if parts is not None:
        burden_skeletons(stock, skeletons, rules, parts)
    late, due = due_units(stock, rules, -TICKS // 2), due_units(stock, rules, TICKS)
    chosen = choose_packs(skeletons, rules, supply, (late, due))
    packs = StepPacks(
        first_pack,
        skeletons.rooms[chosen],
        skeletons.full_costs[chosen],
        np.zeros(len(chosen), np.int64),
        np.zeros(rules.slate, np.int64),
    )
    numbers = np.full(len(skeletons.rooms), IN_POOL, np.int64)
    numbers[chosen] = np.arange(len(chosen))
    live = skeletons.of_long >= 0
    longs.places[live] = numbers[skeletons.of_long[live]]
    take_old(longs, packs, rules, supply)
    if parts is not None:
        keep_shares(stock, packs, rules, supply, parts)
    level_slates(longs, packs, rules, supply)
    if parts is not None:
        force_shares(stock, packs, rules, supply, parts)
    move_to_packs(stock, packs)
    fill_packs(stock, packs, rules, supply)
    fill_the_empty(stock, packs, rules)
    stock.clock[0] += 1
    return len(chosen)
