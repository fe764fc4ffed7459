"""How many bytes of blocks a feeder has ready that are not sent, over all its streams.

In:   a stream that is about to get a block, and its size at most (``workers/flight_exchange.py``)
Out:  leave to get it, at once or when others have sent theirs

A stream that has nothing ready may always get one block, so a rank that does not read starves nobody. What a
stream gets ahead of that comes out of the budget, in the order in which streams asked.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["ReadyBudget"]


class ReadyBudget:
    """Shared by the streams of one server. Safe from any thread."""

    def __init__(self, budget: int) -> None:
        """Begin with nothing ready.

        Args:
            budget: bytes of all blocks that are ready or being got, beside the one that each stream may have.
        """
        self._budget = budget
        self._changed = threading.Condition()
        self._sizes: dict[Hashable, deque[int]] = {}
        self._waiting: deque[Hashable] = deque()

    @property
    def bytes_ready(self) -> int:
        """Bytes of the blocks that are ready or being got, at most."""
        with self._changed:
            return self._used()

    def enter(self, stream: Hashable, size: int, *, timeout: float) -> bool:
        """Wait until ``stream`` may get one more block; return whether it may.

        A stream that may not yet keeps its place among those that wait, until it may or is forgotten.

        Args:
            stream: who asks; one thread at a time for each.
            size: bytes of the block at most.
            timeout: seconds to wait.
        """
        with self._changed:
            if stream not in self._waiting:
                self._waiting.append(stream)
            if not self._changed.wait_for(lambda: self._may(stream, size), timeout):
                return False
            self._waiting.remove(stream)
            self._sizes.setdefault(stream, deque()).append(size)
            self._changed.notify_all()
            return True

    def leave(self, stream: Hashable) -> None:
        """Say that the oldest block of ``stream`` is sent."""
        with self._changed:
            if self._sizes.get(stream):
                self._sizes[stream].popleft()
                self._changed.notify_all()

    def forget(self, stream: Hashable) -> None:
        """Say that ``stream`` is over."""
        with self._changed:
            self._sizes.pop(stream, None)
            if stream in self._waiting:
                self._waiting.remove(stream)
            self._changed.notify_all()

    def _used(self) -> int:
        return sum(sum(sizes) for sizes in self._sizes.values())

    def _may(self, stream: Hashable, size: int) -> bool:
        if not self._sizes.get(stream):
            return True
        # First come, first served: a large block is not overtaken by small ones for ever.
        return self._waiting[0] == stream and self._used() + size <= self._budget
