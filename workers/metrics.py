"""Counters of the service's actors and of its supervisor, shown by Ray's own metrics port.

In:   what builders, feeders, planner and supervisor tell: a build, bytes sent, a retry, a restart
Out:  ``http://node:MetricsExportPort/metrics``, every name with Ray's prefix ``ray_``

A call takes some 15 us: once per block, never per document. Trainer ranks that are no Ray processes count for
themselves, under the same names (``pipeline/rank_metrics.py``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.util.metrics import Counter

__all__ = ["Role", "WorkerMetrics"]


class Role(StrEnum):
    """Which part of the service counts, or was started again."""

    BUILDER = "builder"
    FEEDER = "feeder"
    PLANNER = "planner"
    SUPERVISOR = "supervisor"
    SERVICE = "service"
    """The actor that knows who is there."""


class WorkerMetrics:
    """The counters of one Ray process: an actor, or the driver. Made where Ray runs already.

    Ray counts nothing that is 0: a counter is on the port once it has been moved.
    """

    def __init__(self, role: Role, *, service: str = "") -> None:
        """Make the counters.

        Args:
            role: of this process.
            service: name of the service, to tell two on one cluster apart.
        """
        from ray.util.metrics import Counter, Gauge

        own = {"role": role.value, "service": service}
        keys = tuple(own)
        self._builds = Counter("ringfeed_builds_total", "Blocks built, of all cp ranks at once.", keys)
        self._tokens = Counter("ringfeed_tokens_total", "Tokens in built blocks, padding included.", keys)
        self._bytes = Counter(
            "ringfeed_bytes_total", "Bytes of blocks built (builder) or sent (feeder).", keys
        )
        self._retries = Counter("ringfeed_retries_total", "Requests that had to be made again.", keys)
        self._streams = Gauge("ringfeed_streams", "Streams of ranks that are open.", keys)
        # Its tag says who was started again, not who counts: that is always the supervisor.
        self._restarts = Counter("ringfeed_restarts_total", "Actors started again.", keys)
        self._service = service
        for metric in (self._builds, self._tokens, self._bytes, self._retries, self._streams):
            metric.set_default_tags(own)

    def built(self, *, tokens: int, nbytes: int) -> None:
        """Note a block that was built: tokens and bytes of all cp ranks together."""
        self._builds.inc(1)
        _add(self._tokens, tokens)
        _add(self._bytes, nbytes)

    def sent(self, *, nbytes: int) -> None:
        """Note a block that went out to a rank."""
        _add(self._bytes, nbytes)

    def retried(self, count: int = 1) -> None:
        """Note requests that were made again, because whoever was asked first did not answer."""
        _add(self._retries, count)

    def restarted(self, role: Role) -> None:
        """Note that an actor of this role was started again."""
        self._restarts.inc(1, tags={"role": role.value, "service": self._service})

    def streams(self, count: int) -> None:
        """Say how many streams are open now; again and again, for Ray forgets a gauge after 20 s."""
        self._streams.set(count)


def _add(counter: Counter, count: int) -> None:
    if count:
        counter.inc(count)
