"""Which batch is converted where, and what comes out next: plain state, without Ray and without a clock.

In:   batches in input order; which workers come, go, finish and fail (``workers/convert_pool.py``)
Out:  assignments of batches to workers, and results in input order (``workers/convert_stream.py``)

A batch is held until its result was taken. So whatever a worker had when it died is converted again by
another one, and nothing is lost or doubled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ringfeed.pipeline.executor import JobFailedError

__all__ = ["Assignment", "ConvertQueue", "QueueLimits"]

Input = TypeVar("Input")
Output = TypeVar("Output")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """How much is under way at once.

    Raises:
        ValueError: if a limit is below 1.
    """

    window_bytes: int
    """Of batches and their results. The batch that reaches it is the last one taken in."""
    window_batches: int
    batches_per_worker: int
    max_deaths: int = 5
    """Workers in a row that may die over one batch before it is given up."""

    def __post_init__(self) -> None:
        for name in ("window_bytes", "window_batches", "batches_per_worker", "max_deaths"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assignment(Generic[Input]):
    """One try at one batch."""

    worker: str
    index: int
    """Of the batch in the input, from 0."""
    attempt: int
    batch: Input


@dataclass(kw_only=True, slots=True, eq=False)
class _Entry(Generic[Input, Output]):
    """A batch that was taken in and whose result was not taken yet."""

    index: int
    batches: tuple[Input, ...]
    """The batch; none where the input had an error in its place."""
    num_bytes: int
    attempt: int = 0
    worker: str | None = None
    """Who has it now."""
    deaths: int = 0
    """Workers that died over it."""
    results: list[Output] = field(default_factory=list)
    """One, once it is converted."""
    error: Exception | None = None


class ConvertQueue(Generic[Input, Output]):
    """A window over the input. All calls come from one thread."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._entries: deque[_Entry[Input, Output]] = deque()
        self._loads: dict[str, list[int]] = {}
        """Indices that each worker has, in the order in which it got them."""
        self._num_taken_in = 0
        self._bytes = 0
        self._has_ended = False

    @property
    def has_room(self) -> bool:
        """Whether the next batch may be taken in."""
        limits = self._limits
        is_small = self._bytes < limits.window_bytes and len(self._entries) < limits.window_batches
        return is_small and not self._has_ended

    @property
    def is_drained(self) -> bool:
        """Whether the input has ended and every result was taken."""
        return self._has_ended and not self._entries

    @property
    def num_taken_in(self) -> int:
        """Batches so far: the index of the next one."""
        return self._num_taken_in

    @property
    def bytes_held(self) -> int:
        """Bytes of batches that are held, and of their results."""
        return self._bytes

    def put(self, batch: Input, *, num_bytes: int) -> None:
        """Take in the next batch."""
        self._append((batch,), num_bytes, None)

    def put_error(self, error: Exception) -> None:
        """Let ``error`` be the next batch's result: it is raised when its turn comes."""
        self._append((), 0, error)

    def end(self, error: Exception | None = None) -> None:
        """Say that no batch follows; an ``error`` of the input is raised after all results."""
        if error is not None:
            self.put_error(error)
        self._has_ended = True

    def add_worker(self, name: str) -> None:
        """Give work to ``name`` from now on."""
        self._loads[name] = []

    def lose_worker(self, name: str, *, reason: str) -> None:
        """Let others do what ``name`` had. Nothing that it still sends counts."""
        lost = self._loads.pop(name, [])
        for place, index in enumerate(lost):
            entry = self._entry(index)
            entry.worker = None
            # It has them one after the other: the first one is what it died over.
            entry.deaths += place == 0
            if entry.deaths >= self._limits.max_deaths:
                entry.error = JobFailedError(
                    f"batch {index}: {entry.deaths} workers in a row died over it ({reason}); is there "
                    "memory for it?"
                )

    def assign(self) -> Assignment[Input] | None:
        """Return the next try to start: the first batch that nobody has, to who has the least to do."""
        if not self._loads:
            return None
        worker = min(self._loads, key=lambda name: len(self._loads[name]))
        if len(self._loads[worker]) >= self._limits.batches_per_worker:
            return None
        for entry in self._entries:
            if entry.worker is None and not entry.results and entry.error is None:
                entry.worker = worker
                entry.attempt += 1
                self._loads[worker].append(entry.index)
                (batch,) = entry.batches
                return Assignment(worker=worker, index=entry.index, attempt=entry.attempt, batch=batch)
        return None

    def finish(self, done: Assignment[Input], result: Output) -> None:
        """Note a result; one of a worker that was lost meanwhile does not count."""
        entry = self._release(done)
        if entry is not None:
            entry.results.append(result)

    def fail(self, done: Assignment[Input], error: Exception) -> None:
        """Note that a batch cannot be converted: ``error`` is raised when its turn comes."""
        entry = self._release(done)
        if entry is not None:
            entry.error = error

    def redo(self) -> None:
        """Convert the first batch again: its result is there, but cannot be had any more."""
        first = self._entries[0]
        first.results.clear()
        first.deaths += 1
        if first.deaths >= self._limits.max_deaths:
            first.error = JobFailedError(
                f"batch {first.index}: its result was lost {first.deaths} times; is there memory for it?"
            )

    def peek(self) -> list[Output]:
        """Return the first batch's result as a list of one; an empty one as long as there is none.

        Raises:
            Exception: what was noted for that batch.
        """
        if not self._entries:
            return []
        first = self._entries[0]
        if first.error is not None:
            raise first.error
        return first.results

    def pop(self) -> None:
        """Let go of the first batch: its result was taken."""
        self._bytes -= self._entries.popleft().num_bytes

    def _append(self, batches: tuple[Input, ...], num_bytes: int, error: Exception | None) -> None:
        self._entries.append(
            _Entry(index=self._num_taken_in, batches=batches, num_bytes=num_bytes, error=error)
        )
        self._bytes += num_bytes
        self._num_taken_in += 1

    def _release(self, done: Assignment[Input]) -> _Entry[Input, Output] | None:
        if done.index not in self._loads.get(done.worker, ()):
            return None
        entry = self._entry(done.index)
        if entry.attempt != done.attempt:
            return None
        self._loads[done.worker].remove(done.index)
        entry.worker = None
        return entry

    def _entry(self, index: int) -> _Entry[Input, Output]:
        # The window is without gaps.
        return self._entries[index - self._entries[0].index]
