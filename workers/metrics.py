"""Counters of the service's actors and of its supervisor, shown by Ray's own metrics port.

In:   how much a builder, a feeder or the supervisor has done so far
Out:  ``http://node:MetricsExportPort/metrics``, every name with Ray's prefix ``ray_``

A counter takes some 15 us to move: once per block or second, never per document. Trainer ranks that are no
Ray processes count for themselves, under the same names (``pipeline/rank_metrics.py``).
"""

from __future__ import annotations

from collections import Counter as Counts
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["WorkerMetrics"]

_COUNTERS = {
    "builds": ("ringfeed_builds_total", "Blocks built, of all cp ranks at once."),
    "tokens": ("ringfeed_tokens_total", "Local tokens in built blocks, padding included."),
    "bytes": (
        "ringfeed_bytes_total",
        "Bytes of blocks that were built (builder) or given to ranks (feeder).",
    ),
    "retries": ("ringfeed_retries_total", "Requests that had to be made again."),
}


class WorkerMetrics:
    """The counters of one Ray process: an actor, or the driver. Used by one thread.

    Ray shows nothing that is 0: a counter is on the port once it has been moved.
    """

    def __init__(self, role: str, *, service: str) -> None:
        """Make the counters; Ray must be connected.

        Args:
            role: of this process: builder, feeder or supervisor.
            service: its name, which tells two on one cluster apart.
        """
        from ray.util.metrics import Counter, Gauge

        self._tags = {"role": role, "service": service}
        keys = tuple(self._tags)
        self._counters = {name: Counter(*told, keys) for name, told in _COUNTERS.items()}
        self._restarts = Counter("ringfeed_restarts_total", "Actors started again, by their role.", keys)
        self._streams = Gauge("ringfeed_streams", "Streams of ranks that are open.", keys)
        self._seen: Counts[str] = Counts()
        self._seen_restarts: Counts[str] = Counts()

    def see(self, **totals: int) -> None:
        """Take over how many builds, tokens, bytes or retries there were so far; what is new is counted."""
        for name, total in totals.items():
            if new := total - self._seen[name]:
                self._counters[name].inc(new, self._tags)
        self._seen.update(Counts(totals) - self._seen)

    def see_restarts(self, totals: Mapping[str, int]) -> None:
        """Take over how many actors of each role were started again so far."""
        for role, total in totals.items():
            if new := total - self._seen_restarts[role]:
                # Whose restart it was, not who counts.
                self._restarts.inc(new, {**self._tags, "role": role})
        self._seen_restarts.update(Counts(totals) - self._seen_restarts)

    def set_streams(self, count: int) -> None:
        """Say how many streams are open now; again and again, for Ray forgets a gauge after 20 s."""
        self._streams.set(count, self._tags)
