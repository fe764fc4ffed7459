"""Sums that make the report, kept per step, then per block, so that a resumed plan counts nothing twice.

In:   rows of a window (``rows.py``), losses of the stream (``stream.py``)
Out:  ``BlockTally``, stored in each block's facts; the report adds them up (``report.py``)
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.options import Overflow
from ringfeed.pipeline.planner.stream import Losses

__all__ = ["BlockTally", "StepTally"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTally:
    """Sums over each step of a window: int64 [steps] each."""

    packs: Int64
    pieces: Int64
    tokens: Int64
    """Real tokens."""
    slots: Int64
    """Slots taken by pieces, their padding included."""
    split: Int64
    """Documents whose first piece is not all that is kept of them."""
    displacement: Int64
    """Sum over pieces of the steps between where they stand and where they arrived."""
    displacement_max: Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTally:
    """Sums over one block, or over several."""

    packs: int = 0
    pieces: int = 0
    tokens: int = 0
    slots: int = 0
    split: int = 0
    displacement: int = 0
    displacement_max: int = 0
    empty: int = 0
    """Documents without a token, each time they were drawn."""
    dropped: int = 0
    dropped_tokens: int = 0
    truncated: int = 0
    truncated_tokens: int = 0

    @classmethod
    def of_steps(cls, steps: StepTally, first: int, last: int) -> "BlockTally":
        """Return the sums of steps ``first`` to ``last`` (not included) of a window."""
        names = [field.name for field in fields(StepTally) if field.name != "displacement_max"]
        sums = {name: int(getattr(steps, name)[first:last].sum()) for name in names}
        return cls(displacement_max=int(steps.displacement_max[first:last].max(initial=0)), **sums)

    @classmethod
    def of_losses(cls, losses: Losses, overflow: Overflow) -> "BlockTally":
        """Return what was lost, under the policy's own name."""
        count, tokens = len(losses.documents), int(losses.tokens.sum())
        if overflow is Overflow.DROP:
            return cls(empty=losses.num_empty, dropped=count, dropped_tokens=tokens)
        return cls(empty=losses.num_empty, truncated=count, truncated_tokens=tokens)

    @classmethod
    def sum_of(cls, tallies: Iterable["BlockTally"]) -> "BlockTally":
        """Add tallies up; the largest displacement is the largest of theirs."""
        parts = list(tallies)
        sums = {field.name: sum(getattr(part, field.name) for part in parts) for field in fields(cls)}
        sums["displacement_max"] = max((part.displacement_max for part in parts), default=0)
        return cls(**sums)

    @classmethod
    def from_json(cls, values: Mapping[str, int]) -> "BlockTally":
        """Return the tally in a block's facts."""
        return cls(**values)

    def to_json(self) -> dict[str, int]:
        """Return the tally as JSON-able values."""
        return asdict(self)
