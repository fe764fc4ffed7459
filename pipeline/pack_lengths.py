"""How many slots a pack has: one number for a run, or each pack's own footprint rounded up.

In:   footprints of packs (``sharding/padding.py``), the budget of a plan or a run
Out:  T of each pack (``pipeline/opening.py`` for views, ``pipeline/planner/`` for the report)

A plan knows footprints at its own multiple, a view at its layout's: both round up by this rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ringfeed.pipeline.choices import LengthBuckets, PackShape

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["LengthBuckets", "PackLengths", "PackShape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLengths:
    """The rule for T.

    Raises:
        ValueError: if buckets are asked for packs of one length.
    """

    budget: int
    """Slots of a fixed pack, and the most of a variable one; a multiple of ``multiple``."""
    multiple: int
    """What a variable T is a multiple of."""
    shape: PackShape = PackShape.FIXED
    buckets: LengthBuckets = LengthBuckets.NONE

    def __post_init__(self) -> None:
        if self.shape is PackShape.FIXED and self.buckets is not LengthBuckets.NONE:
            raise ValueError(
                f"length_buckets={str(self.buckets)!r} has nothing to do with packs of one length; "
                "use pack_shape=variable, or leave it out"
            )

    def check_budget(self, field: str) -> None:
        """Refuse a budget that is no bucket: full packs would have a length of their own.

        Args:
            field: what the user calls the budget.

        Raises:
            ValueError: with the nearest budgets that would do.
        """
        if self.buckets is not LengthBuckets.POWERS_OF_TWO or self.budget & (self.budget - 1) == 0:
            return
        below = 1 << (self.budget.bit_length() - 1)
        raise ValueError(
            f"{field}={self.budget} is no power of two, so length_buckets={str(self.buckets)!r} has none "
            f"for a full pack; nearest valid: {[below, 2 * below]}"
        )

    def bucket_lengths(self) -> Int64Array:
        """Return the few T that packs may have: int64 [B], rising to the budget; none where any will do."""
        if self.buckets is LengthBuckets.NONE:
            return np.empty(0, dtype=np.int64)
        if self.buckets is LengthBuckets.EIGHTHS:
            footprints = np.arange(1, 9, dtype=np.int64) * self._eighth
        else:
            footprints = np.left_shift(np.int64(1), np.arange(self.budget.bit_length() + 1))
        return np.unique(self.of(footprints))

    @property
    def _eighth(self) -> int:
        """Return the step between buckets of ``eighths``."""
        return -(-self.budget // (8 * self.multiple)) * self.multiple

    @property
    def padding(self) -> int:
        """Return T of the all-padding pack: the smallest there is."""
        return self.of_pack(0)

    def of_pack(self, footprint: int) -> int:
        """Return T of one pack."""
        if self.shape is PackShape.FIXED:
            return self.budget
        return int(self.of(np.array([footprint], dtype=np.int64))[0])

    def of(self, footprints: npt.NDArray[np.int64]) -> Int64Array:
        """Return T of each pack: footprints int64 [K], 0 for an all-padding pack -> int64 [K].

        A footprint beyond the budget, which a pack that is laid out refuses, gives the budget.
        """
        if self.shape is PackShape.FIXED:
            return np.full_like(footprints, self.budget)
        wanted = np.maximum(footprints, 1)
        if self.buckets is LengthBuckets.POWERS_OF_TWO:
            # Exact: x - 1 = f * 2^e with 0.5 <= f < 1, so 2^e is the first power of at least x.
            _, exponents = np.frexp((wanted - 1).astype(np.float64))
            wanted = np.left_shift(np.int64(1), exponents.astype(np.int64))
        elif self.buckets is LengthBuckets.EIGHTHS:
            wanted = -(-wanted // self._eighth) * self._eighth
        rounded: Int64Array = -(-wanted // self.multiple) * self.multiple
        return np.minimum(rounded, np.int64(self.budget))
