"""Where a job's independent pieces run: here, in threads, or on Ray.

In:   a function and its inputs (``verify.py``, ``ingest.py``)
Out:  the results, in input order

``workers/`` supplies an executor over Ray; nothing in this folder imports it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

__all__ = ["Executor", "JobFailedError", "SerialExecutor", "ThreadExecutor"]

Input = TypeVar("Input")
Output = TypeVar("Output")


class JobFailedError(RuntimeError):
    """The machinery under a job failed, not its data: a worker died too often, a cluster is gone."""


class Executor(Protocol):
    """Applies a function to many inputs."""

    def map(self, function: Callable[[Input], Output], inputs: Iterable[Input], /) -> Iterator[Output]:
        """Yield ``function(x)`` for each input, in input order; the first error is raised."""
        ...


class SerialExecutor:
    """Runs everything in the calling thread."""

    def map(self, function: Callable[[Input], Output], inputs: Iterable[Input], /) -> Iterator[Output]:
        return map(function, inputs)


class ThreadExecutor:
    """Runs in threads: right for hashing, which reads files and releases the GIL."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def map(self, function: Callable[[Input], Output], inputs: Iterable[Input], /) -> Iterator[Output]:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(self._num_threads) as pool:
            yield from pool.map(function, inputs)
