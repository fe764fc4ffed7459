"""When workers are started, and started again after they died: plain state, the time is an argument.

In:   workers that were started, became ready, or died (``workers/convert_pool.py``)
Out:  how many to start now, and when to ask again

The delay grows with deaths that follow each other closely, so that what cannot live is not started a hundred
times a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringfeed.pipeline.executor import JobFailedError

__all__ = ["StartRules", "WorkerStarts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRules:
    """How patient one is with workers that die."""

    num_workers: int
    first_delay: float = 0.1
    """Seconds before the first restart; doubled with each death that follows."""
    longest_delay: float = 5.0
    calm_seconds: float = 20.0
    """Without a death in this time, the next one is a first one again."""
    max_failed_starts: int = 6
    """Workers in a row that may die before they were ready."""


class WorkerStarts:
    """Keeps as many workers as the rules say."""

    def __init__(self, rules: StartRules) -> None:
        self._rules = rules
        self._num_alive = 0
        self._num_deaths = 0
        """That followed each other closely."""
        self._num_failed_starts = 0
        self._last_death = float("-inf")
        self._not_before = float("-inf")
        self.num_restarts = 0
        """Workers that were started in place of dead ones."""

    def due(self, now: float) -> int:
        """Return how many workers are to be started at ``now``."""
        return self._rules.num_workers - self._num_alive if now >= self._not_before else 0

    def seconds_to_wait(self, now: float) -> float | None:
        """Return how long to wait for the next start; None where all are alive."""
        missing = self._num_alive < self._rules.num_workers
        return max(0.0, self._not_before - now) if missing else None

    def started(self) -> None:
        """Count a worker that was started."""
        self._num_alive += 1
        self.num_restarts += self._last_death > float("-inf")

    def became_ready(self) -> None:
        """Note that workers can start here at all."""
        self._num_failed_starts = 0

    def died(self, now: float, *, was_ready: bool, reason: str) -> None:
        """Note a death.

        Raises:
            JobFailedError: if it is one too many of workers that were never ready.
        """
        rules = self._rules
        self._num_alive -= 1
        self._num_deaths = self._num_deaths + 1 if now - self._last_death < rules.calm_seconds else 1
        self._last_death = now
        delay = min(rules.longest_delay, rules.first_delay * 2.0 ** min(self._num_deaths - 1, 30))
        self._not_before = now + delay
        if not was_ready:
            self._num_failed_starts += 1
            if self._num_failed_starts >= rules.max_failed_starts:
                raise JobFailedError(
                    f"{self._num_failed_starts} workers in a row died before they were ready: {reason}"
                )
