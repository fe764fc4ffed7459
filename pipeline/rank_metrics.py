"""A trainer rank's counters for Prometheus, and a port to scrape them from.

In:   what the loader tells (``pipeline/loader_metrics.py``)
Out:  ``http://host:port/metrics``; needs the extra ``metrics``

    metrics = RankMetrics(labels={"rank": "3"})
    server = metrics.serve(9403, host="0.0.0.0")
    loader = Loader(url, ..., metrics=metrics)

The names are those that the service's own actors have (``workers/metrics.py``), without Ray's prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from ringfeed.pipeline.loader_metrics import StallCause
from ringfeed.sharding.optional import load_optional

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping
    from types import TracebackType

    from prometheus_client import CollectorRegistry

__all__ = ["MetricsServer", "RankMetrics"]

_COUNTERS = {
    "ringfeed_tokens": "Local tokens handed to the training loop, padding included.",
    "ringfeed_batches": "Batches handed to the training loop.",
    "ringfeed_bytes": "Bytes of the blocks that came from a service.",
    "ringfeed_wait_seconds": "Time in which the training loop stood still for a batch.",
    "ringfeed_retries": "Requests that had to be made again.",
}
_BY_CAUSE = {
    "ringfeed_stall_seconds": "Time in which the loader's thread waited for the service.",
    "ringfeed_stalls": "Waits so long that the log tells of them.",
}


class RankMetrics:
    """The counters of one process. Safe from any thread."""

    def __init__(
        self, *, labels: Mapping[str, str] | None = None, registry: CollectorRegistry | None = None
    ) -> None:
        """Make the counters, at 0.

        Args:
            labels: names and values that every counter bears, such as the rank.
            registry: where they are registered; None makes one of their own, which ``serve`` shows.

        Raises:
            MissingDependencyError: if ``prometheus_client`` is not installed.
            ValueError: if ``registry`` has counters of these names already, or a label is no label.
        """
        client = _client()
        self.registry: CollectorRegistry = client.CollectorRegistry() if registry is None else registry
        own = dict(labels or {})
        if "cause" in own:
            raise ValueError("labels: 'cause' is taken by the counters of stalls; choose another name")

        def counter(name: str, text: str, *more: str) -> Any:
            made = client.Counter(name, text, [*own, *more], registry=self.registry)
            return made.labels(**own) if own and not more else made

        self._counters = {name: counter(name, text) for name, text in _COUNTERS.items()}
        # Every cause from the beginning: a rate over a counter that appears at 5 s is wrong.
        self._by_cause = {
            (name, cause): made.labels(**own, cause=cause.value)
            for name, text in _BY_CAUSE.items()
            for made in [counter(name, text, "cause")]
            for cause in StallCause
        }

    def batch(self, *, tokens: int, seconds: float) -> None:
        self._counters["ringfeed_tokens"].inc(tokens)
        self._counters["ringfeed_batches"].inc()
        self._counters["ringfeed_wait_seconds"].inc(seconds)

    def block(self, *, nbytes: int) -> None:
        self._counters["ringfeed_bytes"].inc(nbytes)

    def wait(self, cause: StallCause, *, seconds: float, num_stalls: int) -> None:
        self._by_cause["ringfeed_stall_seconds", cause].inc(seconds)
        self._by_cause["ringfeed_stalls", cause].inc(num_stalls)

    def retries(self, count: int) -> None:
        self._counters["ringfeed_retries"].inc(count)

    def serve(self, port: int, *, host: str = "127.0.0.1") -> MetricsServer:
        """Answer scrapes in a thread, until the server is closed.

        Args:
            port: to listen at; 0 takes any free one. Ranks of one machine need one each.
            host: address to listen at. There is no token: outside of this machine, let a firewall or a
                NetworkPolicy say who may ask.

        Raises:
            OSError: if the port is taken.
        """
        server, thread = _client().start_http_server(port, addr=host, registry=self.registry)
        return MetricsServer(server, thread)


class MetricsServer:
    """A port that is open. Closed at the end of its ``with`` block, or with the process."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        """Use ``RankMetrics.serve``."""
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Give the port back. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _client() -> Any:
    return load_optional("prometheus_client", extra="metrics", needed_for="metrics of a trainer rank")
