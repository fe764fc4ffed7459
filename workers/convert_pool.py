"""The actors that convert: started, given batches, listened to, and started again when they die.

In:   a ``ConvertQueue`` that says which batch goes where
Out:  the queue told what became of each; results copied out of the object store

Everything here happens in the consumer's thread, when it asks for what comes next.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from ringfeed.pipeline.conversion import own_views
from ringfeed.pipeline.executor import JobFailedError
from ringfeed.workers.convert_actor import ConvertActor
from ringfeed.workers.convert_queue import Assignment, ConvertQueue
from ringfeed.workers.convert_starts import StartRules, WorkerStarts

if TYPE_CHECKING:
    from ringfeed.pipeline.conversion import ConvertOptions
    from ringfeed.pipeline.views import RankView

__all__ = ["BatchQueue", "ConvertPool"]

BatchQueue = ConvertQueue[Any, Any]
"""Of references to batches in the object store, and to their views there."""

_LOG = logging.getLogger("ringfeed.convert")
# So that a start that became due, or a signal, is not waited past.
_LONGEST_WAIT = 1.0
_SECONDS_TO_WARN = 60.0


@dataclass(kw_only=True, slots=True, eq=False)
class _Worker:
    actor: Any
    is_ready: bool = False


class ConvertPool:
    """Actors for one conversion. ``close`` ends them."""

    def __init__(
        self, queue: BatchQueue, options: ConvertOptions, *, num_workers: int, num_cpus: float
    ) -> None:
        """Start nothing yet.

        Args:
            queue: of this conversion.
            options: what batches are converted to.
            num_workers: actors to keep alive.
            num_cpus: that each of them takes of the cluster's.
        """
        self._queue = queue
        self._make: Any = ray.remote(num_cpus=num_cpus, max_restarts=0, max_task_retries=0)(ConvertActor)
        self._options = options
        self._starts = WorkerStarts(StartRules(num_workers=num_workers))
        self._names = (f"worker {number}" for number in count())
        self._workers: dict[str, _Worker] = {}
        self._starting: dict[Any, str] = {}
        """Worker of each call that returns when it is ready."""
        self._running: dict[Any, tuple[Assignment[Any], Any]] = {}
        """By the reference that tells the end of it: the try, and the reference to the views."""
        self._last_ready = time.monotonic()

    @property
    def num_restarts(self) -> int:
        """Actors that took the place of dead ones."""
        return self._starts.num_restarts

    @property
    def actors(self) -> list[Any]:
        """Handles of the actors that are ready."""
        return [worker.actor for worker in self._workers.values() if worker.is_ready]

    def work(self) -> None:
        """Start what is due, give out what waits, and hear what is done; nothing here waits.

        Raises:
            JobFailedError: if actors cannot be started.
        """
        self._start_due()
        self._give_out()
        calls = [*self._starting, *self._running]
        if calls:
            # All that is there by now: one of them would be a call of Ray for each.
            done, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
            for call in done:
                self._hear(call)

    def wait_for_news(self) -> None:
        """Wait a short while for something that ``work`` would do."""
        calls = [*self._starting, *self._running]
        if calls:
            ray.wait(calls, num_returns=1, timeout=self._seconds_to_wait())
        else:
            time.sleep(self._seconds_to_wait())

    def collect(self, reference: Any) -> list[list[RankView]] | None:
        """Return the first batch's views as own memory; None if they are lost, and have to be made again."""
        try:
            # The object store is mapped writable: nobody may get an array over it.
            return own_views(ray.get(reference))
        except RayError as error:
            _LOG.warning("the views of a batch were lost (%s); it is converted again", _text(error))
            self._queue.redo()
            return None

    def close(self) -> None:
        """End all actors, whatever they are at."""
        for worker in self._workers.values():
            ray.kill(worker.actor)
        self._workers.clear()
        self._starting.clear()
        self._running.clear()

    def _start_due(self) -> None:
        for _ in range(self._starts.due(time.monotonic())):
            name = next(self._names)
            actor = self._make.remote(self._options)
            self._workers[name] = _Worker(actor=actor)
            self._starting[actor.pid.remote()] = name
            self._starts.started()
        if self._starting and not self.actors and time.monotonic() - self._last_ready > _SECONDS_TO_WARN:
            self._last_ready = time.monotonic()
            _LOG.warning(
                "no actor became ready in %d s: are CPUs of the cluster free? (workers=)", _SECONDS_TO_WARN
            )

    def _give_out(self) -> None:
        while (task := self._queue.assign()) is not None:
            worker = self._workers[task.worker]
            finished, views = worker.actor.convert.options(num_returns=2).remote(task.batch)
            self._running[finished] = (task, views)

    def _hear(self, call: Any) -> None:
        if call in self._starting:
            name = self._starting.pop(call)
            try:
                ray.get(call)
            except RayError as error:
                self._bury(name, error)
                return
            self._workers[name].is_ready = True
            self._last_ready = time.monotonic()
            self._starts.became_ready()
            self._queue.add_worker(name)
            return
        task, views = self._running.pop(call)
        try:
            fault = ray.get(call)
        except RayTaskError as error:
            self._queue.fail(task, JobFailedError(f"batch {task.index} cannot be converted: {error.cause!r}"))
        except RayError as error:
            self._bury(task.worker, error)
        else:
            if fault is None:
                self._queue.finish(task, views)
            else:
                self._queue.fail(task, ValueError(f"batch {task.index}: {fault}"))

    def _bury(self, name: str, error: RayError) -> None:
        worker = self._workers.pop(name, None)
        if worker is None:
            # Each of its calls tells the same death.
            return
        ray.kill(worker.actor)
        reason = _text(error)
        _LOG.warning("%s died (%s); what it had is converted again", name, reason)
        self._queue.lose_worker(name, reason=reason)
        self._starts.died(time.monotonic(), was_ready=worker.is_ready, reason=reason)

    def _seconds_to_wait(self) -> float:
        due = self._starts.seconds_to_wait(time.monotonic())
        return _LONGEST_WAIT if due is None else min(_LONGEST_WAIT, due)


def _text(error: RayError) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
