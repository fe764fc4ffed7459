"""Run independent pieces of work as Ray tasks, a bounded number at a time.

In:   a function of this installation and its inputs
Out:  results, as an ``Executor`` (``pipeline/executor.py``) or as they finish

A task whose worker process dies is run again by Ray; an error of the function itself is raised here, as the
error that it was.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from ringfeed.pipeline.executor import JobFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["RayExecutor"]

Input = TypeVar("Input")
Output = TypeVar("Output")

_MAX_RETRIES = 5
"""Deaths of its worker that one task survives."""


class RayExecutor:
    """An executor over Ray, which must be connected (``ray_session.py``)."""

    def __init__(self, *, num_in_flight: int) -> None:
        """``num_in_flight`` bounds the tasks that Ray knows of: more inputs wait here."""
        self._num_in_flight = num_in_flight

    def map(self, function: Callable[[Input], Output], inputs: Iterable[Input], /) -> Iterator[Output]:
        """Yield the results in input order; see ``Executor.map``."""
        # Once for all tasks, not with each of them: a function may carry its settings (a partial).
        task, shipped = _as_task(), ray.put(function)
        waiting: deque[Any] = deque()
        try:
            for entry in inputs:
                waiting.append(task.remote(shipped, entry))
                if len(waiting) >= self._num_in_flight:
                    yield _get(waiting.popleft())
            while waiting:
                yield _get(waiting.popleft())
        finally:
            _cancel(waiting)

    def map_as_finished(
        self, function: Callable[[Input], Output], inputs: Iterable[Input]
    ) -> Iterator[Output]:
        """Yield the results in the order in which they are ready."""
        # Once for all tasks, not with each of them: a function may carry its settings (a partial).
        task, shipped = _as_task(), ray.put(function)
        rest = iter(inputs)
        running: list[Any] = []
        try:
            while True:
                while len(running) < self._num_in_flight:
                    try:
                        running.append(task.remote(shipped, next(rest)))
                    except StopIteration:
                        break
                if not running:
                    return
                [ready], running = ray.wait(running, num_returns=1)
                yield _get(ready)
        finally:
            _cancel(running)


def _as_task() -> Any:
    return ray.remote(num_cpus=1, max_retries=_MAX_RETRIES, retry_exceptions=False)(_call)


def _call(function: Callable[[Any], Any], entry: Any) -> Any:
    return function(entry)


def _get(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        # Ray wraps the error together with the worker's traceback; a user wants its one line.
        cause = error.cause
        raise (cause if isinstance(cause, Exception) else JobFailedError(str(error))) from None
    except RayError as error:
        raise JobFailedError(f"a Ray worker was lost {_MAX_RETRIES + 1} times or more: {error}") from error


def _cancel(references: Iterable[Any]) -> None:
    for reference in references:
        ray.cancel(reference, force=True)
