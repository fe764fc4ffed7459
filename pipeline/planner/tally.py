"""Sums that make the report, kept per step, then per block, so that a resumed plan counts nothing twice.

In:   rows of a window (``rows.py``), losses of the stream (``stream.py``)
Out:  ``BlockTally``, stored in each block's facts; the report adds them up (``report.py``)
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.options import Overflow
from ringfeed.pipeline.planner.stream import Losses

__all__ = ["DISTANCES", "BlockTally", "StepTally", "count_distances"]

Int64 = NDArray[np.int64]

DISTANCES = 65
"""Displacements are counted one by one up to 63 steps, and together from 64 on."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTally:
    """Sums over each step of a window: int64 [steps] each."""

    packs: Int64
    pieces: Int64
    tokens: Int64
    """Real tokens."""
    slots: Int64
    """Slots taken by pieces, their padding included."""
    room: Int64
    """Slots of packs at the plan's multiple, their tails included."""
    split: Int64
    """Documents whose first piece is not all that is kept of them."""
    displacement: Int64
    """Sum over pieces of the steps between where they stand and where they arrived."""
    displacement_max: Int64
    displacement_counts: Int64
    """int64 [steps, ``DISTANCES``], pieces at each distance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTally:
    """Sums over one block, or over several."""

    packs: int = 0
    pieces: int = 0
    tokens: int = 0
    slots: int = 0
    room: int = 0
    split: int = 0
    displacement: int = 0
    displacement_max: int = 0
    displacement_counts: tuple[int, ...] = (0,) * DISTANCES
    empty: int = 0
    """Documents without a token, each time they were drawn."""
    dropped: int = 0
    dropped_tokens: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    early: int = 0
    """Documents drawn before a curriculum allowed their length."""

    @classmethod
    def of_steps(cls, steps: StepTally, first: int, last: int) -> "BlockTally":
        """Return the sums of steps ``first`` to ``last`` (not included) of a window."""
        names = [field.name for field in fields(StepTally) if not field.name.startswith("displacement_")]
        sums = {name: int(getattr(steps, name)[first:last].sum()) for name in names}
        return cls(
            **sums,
            displacement_max=int(steps.displacement_max[first:last].max(initial=0)),
            displacement_counts=tuple(steps.displacement_counts[first:last].sum(axis=0).tolist()),
        )

    @classmethod
    def of_losses(cls, losses: Losses, overflow: Overflow) -> "BlockTally":
        """Return what was lost, under the policy's own name."""
        count, tokens = len(losses.documents), int(losses.tokens.sum())
        if overflow is Overflow.DROP:
            return cls(empty=losses.num_empty, early=losses.num_early, dropped=count, dropped_tokens=tokens)
        return cls(empty=losses.num_empty, early=losses.num_early, truncated=count, truncated_tokens=tokens)

    @classmethod
    def sum_of(cls, tallies: Iterable["BlockTally"]) -> "BlockTally":
        """Add tallies up; the largest displacement is the largest of theirs."""
        parts = list(tallies)
        names = [field.name for field in fields(cls) if not field.name.startswith("displacement_")]
        counts = zip(*(part.displacement_counts for part in parts), strict=True)
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in names},
            displacement_max=max((part.displacement_max for part in parts), default=0),
            displacement_counts=tuple(map(sum, counts)) or cls().displacement_counts,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "BlockTally":
        """Return the tally in a block's facts."""
        return cls(**{**values, "displacement_counts": tuple(values["displacement_counts"])})

    def to_json(self) -> dict[str, Any]:
        """Return the tally as JSON-able values."""
        return asdict(self)


def count_distances(steps: Int64, distances: Int64, *, num_steps: int) -> Int64:
    """Count the pieces of each step by how far they are from where they arrived.

    Args:
        steps: int64 [P], 0 to ``num_steps`` - 1.
        distances: int64 [P], at least 0.
        num_steps: S.

    Returns:
        int64 [S, ``DISTANCES``].
    """
    cells = steps * DISTANCES + np.minimum(distances, DISTANCES - 1)
    return np.bincount(cells, minlength=num_steps * DISTANCES).reshape(num_steps, DISTANCES)
