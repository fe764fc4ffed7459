"""Which blocks a rank has asked for, and how many bytes they take: its credits (law L11).

In:   where the consumer stands, counted in micro-batches from the first one of the plan
Out:  requests to a ``BlockFetcher`` for what comes next, never for more bytes than the budget

Blocks lie on a fixed grid of micro-batches, so that cp peers ask for the same ones and share a build. A rank
that resumes inside a block asks for the rest of it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringfeed.pipeline.feed_request import BlockRequest
from ringfeed.pipeline.step_block import TOKEN_COLUMNS

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ringfeed.pipeline.block_fetcher import BlockFetcher
    from ringfeed.pipeline.block_reader import ReadBlock
    from ringfeed.pipeline.feed_facts import FeedFacts
    from ringfeed.pipeline.ranks import RankPlace
    from ringfeed.pipeline.step_block import EncodedBlock

__all__ = ["BlockGrid", "FeedWindow", "Slot"]

# Upper bounds, so that what comes is never more than was reckoned with where shares are even. Of a piece:
# document, length, start, whether it is skipped. Of a row: its counts, offsets and digest.
_PIECE_BYTES = 21
_ROW_BYTES = 48
# A number in the header, with its comma; a step without its numbers; the rest of the header.
_NUMBER_BYTES, _STEP_BYTES, _HEADER_BYTES = 21, 128, 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGrid:
    """How the micro-batches of one rank fall into blocks. Pure arithmetic."""

    place: RankPlace
    columns: tuple[str, ...]
    batches_per_step: int
    """M"""
    batches_per_block: int
    batch_bytes: int
    """What one micro-batch takes in a block at most; an estimate where shares are uneven."""
    step_bytes: int = 0
    """What the facts of a step take that a block touches."""
    header_bytes: int = 0
    """What a block takes beside."""

    @classmethod
    def of(cls, facts: FeedFacts, place: RankPlace, columns: tuple[str, ...]) -> BlockGrid:
        """Return the grid of ``place``; ValueError if it does not fit the service."""
        num_columns = sum(name in columns for name in TOKEN_COLUMNS)
        pack_bytes = 4 * num_columns * facts.local_tokens + _PIECE_BYTES * facts.max_slots + _ROW_BYTES
        batches_per_step = facts.batches_per_step(place)
        numbers = 2 * batches_per_step * place.packs_per_chunk + len(facts.sources)
        return cls(
            place=place,
            columns=columns,
            batches_per_step=batches_per_step,
            batches_per_block=facts.batches_per_block(place),
            batch_bytes=place.packs_per_chunk * pack_bytes,
            step_bytes=_STEP_BYTES + _NUMBER_BYTES * numbers,
            header_bytes=_HEADER_BYTES,
        )

    def index(self, step: int, micro_batch: int) -> int:
        """Return how many micro-batches come before this one."""
        return step * self.batches_per_step + micro_batch

    def request(self, first: int, end: int) -> BlockRequest:
        """Ask for the micro-batches from ``first`` to the end of its block, or of the plan at ``end``."""
        stop = min((first // self.batches_per_block + 1) * self.batches_per_block, end)
        return BlockRequest(
            place=self.place,
            first_step=first // self.batches_per_step,
            first_micro_batch=first % self.batches_per_step,
            num_micro_batches=stop - first,
            columns=self.columns,
        )

    def bytes_of(self, request: BlockRequest) -> int:
        """Return what the answer to ``request`` takes at most; an estimate where shares are uneven."""
        num_steps = len(request.steps(self.batches_per_step))
        return self.header_bytes + num_steps * self.step_bytes + request.num_micro_batches * self.batch_bytes


class Slot:
    """One block that was asked for."""

    __slots__ = ("block", "first", "future", "request", "stop")

    def __init__(self, request: BlockRequest, first: int, future: Future[EncodedBlock]) -> None:
        self.request = request
        self.first = first
        self.stop = first + request.num_micro_batches
        self.future = future
        self.block: ReadBlock | None = None
        """Once its bytes were checked."""

    @property
    def nbytes(self) -> int | None:
        """Bytes that arrived; None while it is under way."""
        if self.block is not None:
            return self.block.nbytes
        done = self.future.done() and not self.future.cancelled() and self.future.exception() is None
        return self.future.result().nbytes if done else None


class FeedWindow:
    """The blocks from the consumer's place on, in order. Safe from any thread; nothing here waits."""

    def __init__(self, fetcher: BlockFetcher, grid: BlockGrid, *, budget: int) -> None:
        """Ask for nothing yet.

        Args:
            fetcher: where requests go.
            grid: how micro-batches fall into blocks.
            budget: bytes of all blocks, arrived or under way; one block is asked for whatever it takes.
        """
        self._fetcher = fetcher
        self._grid = grid
        self._budget = budget
        self._slots: deque[Slot] = deque()
        self._lock = threading.Lock()
        self._excess = 1.0
        """How much larger than reckoned with a block was, at the most."""

    def move_to(self, index: int, *, end: int) -> Slot:
        """Say that the consumer stands at ``index``, drop what it is past, and ask for what comes next.

        A place outside the window drops all of it: the consumer has moved.

        Args:
            index: the micro-batch that is wanted now; below ``end``.
            end: micro-batches that the plan has, as far as is known.

        Returns:
            The slot that has, or will have, ``index``.
        """
        with self._lock:
            while self._slots and self._slots[0].stop <= index:
                self._slots.popleft().future.cancel()
            if not self._slots or self._slots[0].first > index:
                self._drop()
                self._ask(index, end)
            self._fill(end)
            return self._slots[0]

    def ask_again(self, slot: Slot) -> None:
        """Ask for a block once more, because what came is of no use."""
        slot.block = None
        slot.future = self._fetcher.fetch(slot.request)

    def forget(self) -> None:
        """Drop all blocks and cancel what is under way."""
        with self._lock:
            self._drop()

    def blocks(self) -> list[ReadBlock]:
        """Return the blocks that were read and are still held."""
        with self._lock:
            return [slot.block for slot in self._slots if slot.block is not None]

    @property
    def asked_to(self) -> int:
        """The micro-batch after the last one that was asked for."""
        with self._lock:
            return self._slots[-1].stop if self._slots else 0

    def bytes_held(self) -> dict[str, int]:
        """Return the bytes of this rank's blocks, and of those under way (as estimated)."""
        with self._lock:
            arrived = [slot.nbytes for slot in self._slots]
            under_way = [s for s, size in zip(self._slots, arrived, strict=True) if size is None]
            here = sum(size for size in arrived if size is not None)
            name = f"{len(arrived) - len(under_way)} blocks at this rank (budget {self._budget:,} B)"
            waited = f"{len(under_way)} blocks under way"
            return {name: here, waited: sum(self._estimate(slot.request) for slot in under_way)}

    def _fill(self, end: int) -> None:
        while True:
            first = self._slots[-1].stop
            if first >= end:
                return
            used = sum(self._size(slot) for slot in self._slots)
            if used + self._estimate(self._grid.request(first, end)) > self._budget:
                return
            self._ask(first, end)

    def _ask(self, first: int, end: int) -> None:
        request = self._grid.request(first, end)
        self._slots.append(Slot(request, first, self._fetcher.fetch(request)))

    def _size(self, slot: Slot) -> int:
        size = slot.nbytes
        if size is None:
            return self._estimate(slot.request)
        # Shares may be uneven: what comes next is taken to be as large as the largest so far.
        self._excess = max(self._excess, size / self._grid.bytes_of(slot.request))
        return size

    def _estimate(self, request: BlockRequest) -> int:
        return math.ceil(self._grid.bytes_of(request) * self._excess)

    def _drop(self) -> None:
        for slot in self._slots:
            slot.future.cancel()
        self._slots.clear()
