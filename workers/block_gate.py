"""Bound the blocks that a feeder holds, whatever its ranks do.

In:   a ``BlockSupply``
Out:  the same blocks, so many at a time: a request waits until an earlier block is let go of

A rank reads all that it asked for, so blocks leave on their own. One that is frozen keeps at most those that
were got ready for its stream, until the server breaks it off (``workers/flight_stalls.py``).
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfeed.pipeline.block_fetcher import BlockSupply
    from ringfeed.pipeline.feed_facts import FeedFacts
    from ringfeed.pipeline.feed_request import BlockRequest
    from ringfeed.pipeline.step_block import EncodedBlock

__all__ = ["BlockGate"]

_WAIT_SECONDS = 30.0


class BlockGate:
    """A ``BlockSupply`` that counts what it has given."""

    def __init__(self, supply: BlockSupply, *, most_blocks: int, wait_seconds: float = _WAIT_SECONDS) -> None:
        """Give none yet.

        Args:
            supply: where blocks come from.
            most_blocks: blocks at a time; a block counts until nothing refers to its rows.
            wait_seconds: for room, before a request fails for now.
        """
        self._supply = supply
        self._most_blocks = most_blocks
        self._wait_seconds = wait_seconds
        # Tokens in a queue, no semaphore: a block may be let go of in the middle of anything, by a garbage
        # collection in the very thread that waits here, so nothing that gives back may take a lock.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(most_blocks):
            self._room.put(None)
        self._lock = threading.Lock()
        self.bytes_given = 0
        """Of all blocks so far, those whose stream had broken by then too."""

    def facts(self) -> FeedFacts:
        return self._supply.facts()

    def block(self, request: BlockRequest) -> EncodedBlock:
        """Return the block, once there is room.

        Raises:
            ConnectionError: if there is no room for a long time; else as the supply.
        """
        if not request.columns:
            return self._supply.block(request)
        try:
            self._room.get(timeout=self._wait_seconds)
        except queue.Empty:
            raise ConnectionError(
                f"{self._most_blocks} blocks, all that node_bytes allows, have been held by streams for "
                f"{self._wait_seconds:g} s: ranks do not read what they asked for"
            ) from None
        try:
            block = self._supply.block(request)
        except BaseException:
            self._room.put(None)
            raise
        weakref.finalize(block.rows, self._room.put, None).atexit = False
        with self._lock:
            self.bytes_given += block.nbytes
        return block
