"""How full and how even a plan is, measured on the blocks that were written.

In:   blocks of a plan (``pipeline/plan_blocks.py``)
Out:  ``PlanReport``, stored in the manifest and printed by ``ringfeed plan --report``

Balance is that of the ranks the plan is meant for: dp = slate size, one pack per chunk, dealt out as
``pipeline/ranks.py`` does. A missing pack costs nothing, so a last step that holds fewer packs counts
against the plan; ``settled`` leaves out the last ``window + 1`` steps, where there is no look-ahead left.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ringfeed.pipeline.manifest import FileEntry
from ringfeed.pipeline.plan_blocks import BlockFacts, read_columns
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.tally import BlockTally
from ringfeed.pipeline.ranks import MISSING, assign_steps

__all__ = ["PlanReport", "measure_plan"]

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
    slot_padding: int
    """Tokens that pad pieces to the pad multiple."""
    tail_padding: int
    """Tokens at the end of packs that no piece takes."""
    step_imbalance: float
    """Sum over steps of the most expensive rank, over the sum of the mean rank."""
    step_imbalance_p99: float
    """99th percentile over steps of the most expensive rank over the mean one."""
    micro_batch_imbalance: float
    """The same as ``step_imbalance`` over micro-batches: ranks wait for each other in each of them."""
    displacement_mean: float
    """Steps between where a piece stands and where it arrived in the stream, mean over pieces."""
    displacement_max: int
    empty: int
    """Documents without a token: skipped."""
    dropped: int
    dropped_tokens: int
    split: int
    """Documents cut into several pieces."""
    truncated: int
    truncated_tokens: int
    bytes: int
    """Size of the plan's blocks."""
    bytes_per_piece: float
    bytes_per_step: float
    settled: dict[str, float] | None
    """Fill and balance without the last ``window + 1`` steps; None for a plan no longer than that."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class _StepCosts:
    """Costs of each step under the deal to ranks: [steps] each."""

    largest: Int64
    """Of the most expensive rank."""
    total: Int64
    waiting: Int64
    """Sum over micro-batches of the most expensive pack."""


def measure_plan(
    folder: Path, entries: Sequence[FileEntry], facts: Sequence[BlockFacts], options: PlanOptions
) -> PlanReport:
    """Measure the blocks of a plan that is complete; reads their costs, and the lengths of the last steps."""
    tally = BlockTally.sum_of(BlockTally.from_json(block.tally) for block in facts)
    costs = _concat([_block_costs(folder / entry.path, options) for entry in entries])
    num_steps = len(costs.total)
    num_settled = num_steps - options.window - 1
    size = sum(entry.bytes for entry in entries)
    settled = None
    if num_settled > 0:
        tokens = tally.tokens - _tokens_from(folder, entries, facts, num_settled)
        settled = {
            "fill": tokens / (num_settled * options.packs_per_step * options.pack_tokens),
            **_balance(costs, num_settled, options.packs_per_slate),
        }
    slots = tally.packs * options.pack_tokens
    return PlanReport(
        balance=str(options.strategy),
        steps=num_steps,
        packs=tally.packs,
        pieces=tally.pieces,
        tokens=tally.tokens,
        fill=tally.tokens / slots,
        slot_padding=tally.slots - tally.tokens,
        tail_padding=slots - tally.slots,
        **_balance(costs, num_steps, options.packs_per_slate),
        displacement_mean=tally.displacement / tally.pieces,
        displacement_max=tally.displacement_max,
        empty=tally.empty,
        dropped=tally.dropped,
        dropped_tokens=tally.dropped_tokens,
        split=tally.split,
        truncated=tally.truncated,
        truncated_tokens=tally.truncated_tokens,
        bytes=size,
        bytes_per_piece=size / tally.pieces,
        bytes_per_step=size / num_steps,
        settled=settled,
    )


def _balance(costs: _StepCosts, num_steps: int, dp_size: int) -> dict[str, float]:
    largest, total = costs.largest[:num_steps], costs.total[:num_steps]
    # Of Python integers: exact, however long the plan is.
    work = sum(total.tolist()) / dp_size
    return {
        "step_imbalance": sum(largest.tolist()) / work,
        "step_imbalance_p99": float(np.percentile(largest * dp_size / total, 99)),
        "micro_batch_imbalance": sum(costs.waiting[:num_steps].tolist()) / work,
    }


def _block_costs(path: Path, options: PlanOptions) -> _StepCosts:
    table = read_columns(path, ["step", "slate", "cost"])
    steps, slates, costs = (table.column(name).to_numpy() for name in ("step", "slate", "cost"))
    first_packs = np.append(np.flatnonzero(np.diff(steps, prepend=-1)), len(steps))
    dp_size = options.packs_per_slate
    dealt = assign_steps(
        costs, slates, first_packs, by_slate=True, shape=(options.packs_per_step // dp_size, dp_size, 1)
    )
    places = np.where(dealt == MISSING, 0, dealt + first_packs[:-1, None, None, None])
    chunks = np.where(dealt == MISSING, 0, costs[places]).sum(axis=3)
    return _StepCosts(
        largest=chunks.sum(axis=1).max(axis=1),
        total=chunks.sum(axis=(1, 2)),
        waiting=chunks.max(axis=2).sum(axis=1),
    )


def _concat(parts: Sequence[_StepCosts]) -> _StepCosts:
    return _StepCosts(
        np.concatenate([part.largest for part in parts]),
        np.concatenate([part.total for part in parts]),
        np.concatenate([part.waiting for part in parts]),
    )


def _tokens_from(folder: Path, entries: Sequence[FileEntry], facts: Sequence[BlockFacts], step: int) -> int:
    """Return the real tokens in ``step`` and the steps after it."""
    tokens = 0
    for entry, block in zip(entries, facts, strict=True):
        if block.first_step + block.num_steps <= step:
            continue
        table = read_columns(folder / entry.path, ["step", "lengths"])
        rows: pa.ChunkedArray = table.column("lengths").filter(
            pa.array(table.column("step").to_numpy() >= step)
        )
        tokens += int(rows.combine_chunks().flatten().to_numpy().sum())
    return tokens
