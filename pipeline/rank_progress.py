"""How far each rank of a feed has got, told by the blocks that it was given: plain numbers.

In:   which stretch of the run a rank was given (``workers/convert_feed_supply.py``)
Out:  the place up to which every rank was given all, and the one up to which it has it

A rank has blocks under way that may be got ready in any order. What lies before the first stretch that is
missing was given; a rank that goes on elsewhere (its loader was moved) is followed after a few blocks.
A rank that asks for a block shows that those which no longer fit into its stream have arrived.
"""

from __future__ import annotations

from collections import deque

__all__ = ["RankProgress"]

# Blocks that are got ready out of order at most.
_MOST_AHEAD = 4


class RankProgress:
    """How far the ranks of one feed are, in any unit. Not for use by several threads at once."""

    def __init__(self, ranks: list[tuple[int, int]], *, under_way: int) -> None:
        """Begin with nothing given.

        Args:
            ranks: all of them, as (dp rank, cp rank).
            under_way: blocks that were given to a rank last and may not have arrived.
        """
        self._most_ahead = max(_MOST_AHEAD, under_way)
        self._done = dict.fromkeys(ranks, 0)
        self._ahead: dict[tuple[int, int], list[tuple[int, int]]] = {rank: [] for rank in ranks}
        self._recent: dict[tuple[int, int], deque[int]] = {rank: deque(maxlen=under_way) for rank in ranks}
        """Where the blocks begin that are taken to be under way."""

    @property
    def past(self) -> int:
        """All before this place was given to every rank."""
        return min(self._done.values())

    @property
    def arrived(self) -> int:
        """All before this place has arrived at every rank."""
        return min(min([done, *self._recent[rank]]) for rank, done in self._done.items())

    @property
    def slowest(self) -> tuple[int, int]:
        """The rank that was given least: (dp rank, cp rank)."""
        return min(self._done, key=lambda rank: self._done[rank])

    def given(self, rank: tuple[int, int], first: int, end: int) -> None:
        """Note that ``rank`` was given what lies from ``first`` up to, and without, ``end``."""
        self._recent[rank].append(first)
        ahead = self._ahead[rank]
        ahead.append((first, end))
        ahead.sort()
        done = self._done[rank]
        if len(ahead) > self._most_ahead and ahead[0][0] > done:
            done = ahead[0][0]
        while ahead and ahead[0][0] <= done:
            done = max(done, ahead.pop(0)[1])
        self._done[rank] = done
