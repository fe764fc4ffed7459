"""What one dp rank must know of a step, whatever dp size the run has.

In:   the facts of the whole step (``pipeline/view_source.py``), the rank's place
Out:  ``StepShare``: the rank's packs and the numbers that all ranks agree on (``pipeline/batch_builder.py``)

The facts of a step grow with its packs, so with dp; a share does not. A service sends shares: at a large dp
the facts of all packs would outweigh the tokens of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash

from ringfeed.pipeline.ranks import MISSING, assign_packs

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.ranks import RankPlace
    from ringfeed.pipeline.view_source import StepFacts

__all__ = ["StepShare", "deal_step"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepShare:
    """One dp rank's part of a step, without any token. The same for all cp ranks."""

    step: int
    chain: str
    """Hash chain value of this step, hex."""
    supervised: npt.NDArray[np.int64]
    """int64 [S], supervised tokens of the whole step per source corpus."""
    packs: npt.NDArray[np.int64]
    """int64 [M, packs_per_chunk], packs of each of this rank's micro-batches; ``ranks.MISSING`` for none."""
    slots: npt.NDArray[np.int64]
    """int64 [M, packs_per_chunk], T of each of these packs, also of one that is missing."""

    def digest(self, overlay_digest: str) -> int:
        """Return xxh3_64 over chain value, overlay digest and this rank's packs: ``BatchInfo.step_digest``.

        The chain value covers every piece list of the step, so pack ids are enough to tell the rank's own.
        """
        hasher = xxhash.xxh3_64(bytes.fromhex(self.chain))
        hasher.update(bytes.fromhex(overlay_digest))
        hasher.update(np.ascontiguousarray(self.packs, dtype="<i8").data)
        return hasher.intdigest()


class _StepShape(Protocol):
    """What dealing must know of a plan, beside the step."""

    @property
    def packs_per_step(self) -> int: ...

    @property
    def slate_size(self) -> int: ...

    @property
    def spec(self) -> ViewSpec: ...


def deal_step(facts: StepFacts, shape: _StepShape, place: RankPlace) -> StepShare:
    """Return the share that ``place`` has of a step (its cp rank does not matter).

    Raises:
        ValueError: if dp_size * packs_per_chunk does not divide packs_per_step.
    """
    table = assign_packs(
        facts.costs,
        facts.slates,
        packs_per_step=shape.packs_per_step,
        slate_size=shape.slate_size,
        dp_size=place.dp_size,
        packs_per_chunk=place.packs_per_chunk,
    )
    packs = table[:, place.dp_rank]
    padding = shape.spec.pack_lengths.padding
    return StepShare(
        step=facts.step,
        chain=facts.chain,
        supervised=facts.supervised.sum(axis=0),
        packs=packs,
        slots=np.where(packs == MISSING, padding, facts.slots[packs]),
    )
