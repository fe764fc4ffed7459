"""The slices of an attention mask: which queries of a stream may see which keys.

In:   tuples of a caller, or what ``masks.py`` makes of documents
Out:  ``MaskSlices``, for ``areas.py`` to count and ``partition.py`` to deal out

A slice is a rectangle of queries [q0, q1) and keys [k0, k1), in tokens of the stream, and a kind that says
which pairs of it are allowed. Slices may share queries (prefix trees do); their pairs add up.
"""

from dataclasses import dataclass
from enum import IntEnum
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ringfeed.sharding.magi.slice_kernels import first_outside, is_by_query, last_query
from ringfeed.sharding.run_kernels import Int64Array

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Kinds", "MaskKind", "MaskSlices", "SliceTuple"]

SliceTuple: TypeAlias = tuple[int, int, int, int, str]
"""(q0, q1, k0, k1, "full" | "causal" | "inv_causal" | "bi_causal")"""

Kinds: TypeAlias = npt.NDArray[np.int8]


class MaskKind(IntEnum):
    """Which pairs (row i, column j) of a slice of n queries and m keys are allowed: two bits, two rules."""

    FULL = 0
    """Every pair."""
    CAUSAL = 1
    """j <= i + m - n: the last query sees every key."""
    INV_CAUSAL = 2
    """j >= i: the first query sees every key."""
    BI_CAUSAL = 3
    """Both of the two above: a band of m - n + 1 keys."""


_KIND_OF_WORD = {kind.name.lower(): kind for kind in MaskKind}
_WORD_OF_KIND = tuple(_KIND_OF_WORD)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskSlices:
    """S slices of one stream, S >= 0."""

    ranges: Int64Array
    """int64 [S, 4]: q0, q1, k0, k1."""
    kinds: Kinds
    """int8 [S], a ``MaskKind`` each."""

    @classmethod
    def of_kind(cls, kind: MaskKind, ranges: Int64Array) -> "MaskSlices":
        """Return slices of one kind from their ranges [S, 4]."""
        kinds = np.empty(len(ranges), dtype=np.int8)
        kinds.fill(int(kind))
        return cls(ranges=ranges, kinds=kinds)

    @classmethod
    def read(cls, slices: "MaskSlices | Iterable[SliceTuple]") -> "MaskSlices":
        """Return ``slices``, which may be given as tuples ``(q0, q1, k0, k1, kind)``.

        Raises:
            ValueError: if one of them is no such tuple (the slice is named).
        """
        if isinstance(slices, MaskSlices):
            return slices
        rows = [_read_slice(number, row) for number, row in enumerate(slices)]
        return cls(
            ranges=np.array([row[:4] for row in rows], dtype=np.int64).reshape(-1, 4),
            kinds=np.array([row[4] for row in rows], dtype=np.int8),
        )

    def __len__(self) -> int:
        """Return S."""
        return len(self.kinds)

    @property
    def query_end(self) -> int:
        """The largest q1 of slices that have both queries and keys; 0 if there is none."""
        return last_query(self.ranges)

    def to_tuples(self) -> list[SliceTuple]:
        """Return what ``read`` makes the same slices of."""
        return [
            (q0, q1, k0, k1, _WORD_OF_KIND[kind])
            for (q0, q1, k0, k1), kind in zip(self.ranges.tolist(), self.kinds.tolist(), strict=True)
        ]

    def with_padding(self, start: int, stop: int) -> "MaskSlices":
        """Return these and one more, last, whose queries [start, stop) see no key."""
        return self.joined(MaskSlices.of_kind(MaskKind.FULL, np.array([[start, stop, 0, 0]])))

    def joined(self, others: "MaskSlices") -> "MaskSlices":
        """Return these slices and ``others`` after them."""
        return MaskSlices(
            ranges=np.concatenate([self.ranges, others.ranges]),
            kinds=np.concatenate([self.kinds, others.kinds]),
        )

    def by_query(self) -> "MaskSlices":
        """Return the slices in order of (q0, q1), equal ones in the order they have."""
        if is_by_query(self.ranges):
            return self
        order = np.lexsort((self.ranges[:, 1], self.ranges[:, 0]))
        return MaskSlices(ranges=self.ranges[order], kinds=self.kinds[order])

    def check_inside(self, total: int) -> None:
        """Refuse slices that are no ranges of a stream of ``total`` tokens.

        Raises:
            ValueError: for the first range that falls or does not lie in [0, total].
        """
        first = first_outside(self.ranges, total)
        if first >= 0:
            start, stop = self.ranges.reshape(-1, 2)[first]
            side = ("queries", "keys")[first % 2]
            raise ValueError(
                f"slice {first // 2} has {side} [{start}, {stop}); they must not fall and must lie in the "
                f"stream, [0, {total})"
            )


def _read_slice(number: int, row: Any) -> tuple[int, int, int, int, MaskKind]:
    try:
        q0, q1, k0, k1, word = row
        q0, q1, k0, k1 = index(q0), index(q1), index(k0), index(k1)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"slice {number} is {row!r}, not four integers and a kind: (q0, q1, k0, k1, kind)"
        ) from error
    if not isinstance(word, str) or word not in _KIND_OF_WORD:
        raise ValueError(f"slice {number} has kind {word!r}; it must be one of {', '.join(_KIND_OF_WORD)}")
    return q0, q1, k0, k1, _KIND_OF_WORD[word]
