"""How full and how even a plan is, measured on the blocks that were written.

In:   blocks of a plan (``pipeline/plan_blocks.py``)
Out:  ``PlanReport``, stored in the manifest and printed by ``ringfeed plan --report``

Balance is that of the ranks the plan is meant for: dp = slate size, one pack per chunk (``balance.py``). A
missing pack costs nothing, so a last step that holds fewer packs counts against the plan; ``settled`` leaves
out the last ``window + 1`` steps, where there is no look-ahead left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ringfeed.pipeline.manifest import FileEntry
from ringfeed.pipeline.plan_blocks import BlockFacts, read_columns
from ringfeed.pipeline.planner.balance import BalanceFigures, BalanceMeter
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.tally import BlockTally
from ringfeed.sharding.padding import slot_lengths

__all__ = ["PlanReport", "report_on_blocks"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """Figures of a plan. Counts of documents count each time that one was drawn."""

    balance: str
    """The strategy that ran."""
    steps: int
    packs: int
    pieces: int
    tokens: int
    """Real tokens in packs."""
    fill: float
    """Real tokens over all slots of all packs."""
    pad_multiple: int
    """What pieces are padded to."""
    slot_padding: int
    """Tokens that pad pieces to the pad multiple."""
    tail_padding: int
    """Tokens at the end of packs that no piece takes."""
    slot_waste: float
    """``slot_padding`` over all slots of all packs."""
    tail_waste: float
    """``tail_padding`` over all slots of all packs; with fill and ``slot_waste`` it makes 1."""
    step_imbalance: float
    """Sum over steps of the most expensive rank, over the sum of the mean rank."""
    step_imbalance_p99: float
    """99th percentile over steps of the most expensive rank over the mean one."""
    micro_batch_imbalance: float
    """The same as ``step_imbalance`` over micro-batches: ranks wait for each other in each of them."""
    step_imbalance_bound: float | None = None
    """No deal of the same packs of each step has less; None where an earlier ringfeed made the plan."""
    step_imbalance_p99_bound: float | None = None
    micro_batch_imbalance_bound: float | None = None
    displacement_mean: float
    """Steps between where a piece stands and where it arrived in the stream, mean over pieces."""
    displacement_max: int
    displacement_counts: list[int]
    """Pieces at each distance in steps; the last entry counts all from there on (``tally.py``)."""
    empty: int
    """Documents without a token: skipped."""
    dropped: int
    dropped_tokens: int
    split: int
    """Documents cut into several pieces."""
    truncated: int
    truncated_tokens: int
    early: int
    """Documents drawn before a curriculum allowed their length: nothing else was left of their epoch."""
    bytes: int
    """Size of the plan's blocks."""
    bytes_per_piece: float
    bytes_per_step: float
    settled: dict[str, float] | None
    """Fill and balance without the last ``window + 1`` steps; None for a plan no longer than that."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return asdict(self)

    @property
    def figures(self) -> BalanceFigures | None:
        """The balance as it was measured, None where an earlier ringfeed left the bounds out."""
        return _stored_figures(asdict(self))

    @property
    def settled_figures(self) -> BalanceFigures | None:
        """As ``figures``, without the last ``window + 1`` steps."""
        return None if self.settled is None else _stored_figures(self.settled)


def report_on_blocks(
    folder: Path, entries: Sequence[FileEntry], facts: Sequence[BlockFacts], options: PlanOptions
) -> PlanReport:
    """Measure the blocks of a plan that is complete; reads their costs, and the lengths of the last steps."""
    tally = BlockTally.sum_of(BlockTally.from_json(block.tally) for block in facts)
    meter = _metered(folder, entries, options)
    num_steps = sum(block.num_steps for block in facts)
    num_settled = num_steps - options.window - 1
    size = sum(entry.bytes for entry in entries)
    settled = None
    if num_settled > 0:
        late_tokens, late_room = _tokens_from(folder, entries, facts, num_settled, options)
        settled = {
            "fill": (tally.tokens - late_tokens) / (tally.room - late_room),
            **asdict(meter.balance(num_steps=num_settled)),
        }
    return PlanReport(
        balance=str(options.balance),
        steps=num_steps,
        pad_multiple=options.document_multiple,
        **_counted(tally),
        **asdict(meter.balance()),
        bytes=size,
        bytes_per_piece=size / tally.pieces,
        bytes_per_step=size / num_steps,
        settled=settled,
    )


def _metered(folder: Path, entries: Sequence[FileEntry], options: PlanOptions) -> BalanceMeter:
    """Return a meter that has measured all blocks by the plan's own dp and costs."""
    meter = BalanceMeter(
        packs_per_step=options.packs_per_step,
        slate_size=options.packs_per_slate,
        dp_size=options.packs_per_slate,
    )
    for entry in entries:
        table = read_columns(folder / entry.path, ["step", "slate", "cost"])
        steps, slates, costs = (table.column(name).to_numpy() for name in ("step", "slate", "cost"))
        meter.add(steps, slates=slates, planned=costs)
    return meter


def _counted(tally: BlockTally) -> dict[str, Any]:
    """Return what the report says of packs, pieces and documents."""
    packs = ("packs", "pieces", "tokens", "displacement_max")
    documents = ("empty", "dropped", "dropped_tokens", "split", "truncated", "truncated_tokens", "early")
    return {
        **{name: getattr(tally, name) for name in (*packs, *documents)},
        "fill": tally.tokens / tally.room,
        "slot_padding": tally.slots - tally.tokens,
        "tail_padding": tally.room - tally.slots,
        "slot_waste": (tally.slots - tally.tokens) / tally.room,
        "tail_waste": (tally.room - tally.slots) / tally.room,
        "displacement_mean": tally.displacement / tally.pieces,
        "displacement_counts": list(tally.displacement_counts),
    }


def _stored_figures(stored: Mapping[str, float | None]) -> BalanceFigures | None:
    found = {entry.name: stored.get(entry.name) for entry in fields(BalanceFigures)}
    known = {name: value for name, value in found.items() if value is not None}
    return BalanceFigures(**known) if len(known) == len(found) else None


def _tokens_from(
    folder: Path, entries: Sequence[FileEntry], facts: Sequence[BlockFacts], step: int, options: PlanOptions
) -> tuple[int, int]:
    """Return the real tokens in ``step`` and the steps after it, and the slots of their packs."""
    tokens = room = 0
    for entry, block in zip(entries, facts, strict=True):
        if block.first_step + block.num_steps <= step:
            continue
        table = read_columns(folder / entry.path, ["step", "lengths"])
        rows: pa.ChunkedArray = table.column("lengths").filter(
            pa.array(table.column("step").to_numpy() >= step)
        )
        lists = rows.combine_chunks()
        lengths = lists.flatten().to_numpy()
        tokens += int(lengths.sum())
        ends = np.cumsum([0, *lists.value_lengths().to_numpy()])
        slots = slot_lengths(lengths, multiple=options.document_multiple)
        room += int(options.pack_lengths.of(np.add.reduceat(slots, ends[:-1])).sum())
    return tokens, room
