"""Which feeder a rank asks next, and how long it goes on asking.

In:   feeders that a directory names, and how asking them went
Out:  the next one's URL, and the time to wait before
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from ringfeed.pipeline.flight_link import Failure
from ringfeed.pipeline.flight_wire import Feeder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfeed.pipeline.flight_link import LinkError

__all__ = ["RESTART_SECONDS", "FeederChoice", "FlightPatience", "Troubles"]

# A server that dies in the middle of a handshake looks like one whose certificate is wrong: a few tries.
# While one is started again, whatever stands before it may break off connections for some time.
_TLS_TRIES = 3
RESTART_SECONDS = 30.0
"""How long a server that was reached before may fail in handshakes."""
_AVOID_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FlightPatience:
    """How long a fetcher tries.

    Raises:
        ValueError: if a time is not above 0.
    """

    open_seconds: float = 10.0
    """For a directory to answer the first time: a service may still be starting."""
    retry_seconds: float = 1800.0
    """For anybody to answer later on: a service that is started again must fit in."""
    reply_seconds: float = 120.0
    """For the next block, before a stream is taken to be dead."""
    first_wait: float = 0.05
    """Before the second try; doubled each time."""
    most_wait: float = 2.0

    def __post_init__(self) -> None:
        for name in ("open_seconds", "retry_seconds", "reply_seconds", "first_wait", "most_wait"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")


class Troubles:
    """Failures since the last thing that went well. Written by one thread."""

    def __init__(self, patience: FlightPatience, *, tls_seconds: float) -> None:
        """Begin without any.

        Args:
            patience: how long to wait between two tries.
            tls_seconds: how long handshakes may fail, beside three tries.
        """
        self._patience = patience
        self._tls_seconds = tls_seconds
        self._began = time.monotonic()
        self._errors: list[LinkError] = []
        self._count = 0

    def add(self, error: LinkError) -> None:
        """Note a failure."""
        if not self._count:
            self._began = time.monotonic()
        self._count += 1
        self._errors = [*self._errors[1 - _TLS_TRIES :], error]

    def clear(self) -> None:
        """Note that something went well."""
        if self._count:
            self._count, self._errors = 0, []

    @property
    def are_final(self) -> bool:
        """Whether trying again is of no use: refused, or a certificate that never fits."""
        failures = [error.failure for error in self._errors]
        is_tls = failures[-_TLS_TRIES:] == [Failure.TLS] * _TLS_TRIES
        return (is_tls and self.seconds >= self._tls_seconds) or any(
            failure in (Failure.REFUSED, Failure.TOKEN) for failure in failures
        )

    @property
    def seconds(self) -> float:
        """Time since the first of them."""
        return time.monotonic() - self._began if self._count else 0.0

    @property
    def wait_seconds(self) -> float:
        """Time to wait before the next try."""
        longest = self._patience.most_wait
        return min(longest, self._patience.first_wait * 2.0 ** min(20, max(0, self._count - 1)))

    def text(self) -> str:
        """Return ", failed 3 times, the last: ..." for a human, or nothing."""
        errors, count = self._errors, self._count
        return f", failed {count} times, the last: {errors[-1]}" if errors else ""


class FeederChoice:
    """The feeders there are, in the order in which this rank takes them. Safe from any thread."""

    def __init__(self, url: str, *, dp_rank: int, host: str | None = None) -> None:
        """Know only the directory yet.

        Args:
            url: of the directory; stands for feeders without one of their own.
            dp_rank: cp peers have the same, and choose alike.
            host: mark of this machine; feeders that bear it come first.
        """
        self._url = url
        self._dp_rank = dp_rank
        self._host = host
        self._lock = threading.Lock()
        self._feeders: tuple[Feeder, ...] = (Feeder(url=None),)
        self._bad: dict[str, float] = {}
        """URL -> until when it is only taken if there is no other."""
        self.last = url
        """The one that was taken last."""

    def update(self, feeders: Sequence[Feeder]) -> None:
        """Take over what a directory says; an empty list is no news."""
        if feeders:
            with self._lock:
                self._feeders = tuple(feeders)
                self._bad = {url: until for url, until in self._bad.items() if url in self._urls()}

    def next(self) -> str:
        """Return the URL of the feeder to ask now."""
        with self._lock:
            self.last = min(self._feeders, key=self._rank).url or self._url
            return self.last

    def is_bad(self, url: str) -> None:
        """Take another one for a while, if there is any."""
        with self._lock:
            self._bad[url] = time.monotonic() + _AVOID_SECONDS

    def is_good(self, url: str) -> None:
        """Forget that it failed."""
        if url in self._bad:
            with self._lock:
                self._bad.pop(url, None)

    def has_other(self) -> bool:
        """Return whether there is a feeder that has not failed just now."""
        with self._lock:
            return any(not self._is_avoided(url) for url in self._urls())

    def _urls(self) -> list[str]:
        return [feeder.url or self._url for feeder in self._feeders]

    def _is_avoided(self, url: str) -> bool:
        return self._bad.get(url, 0.0) > time.monotonic()

    def _rank(self, feeder: Feeder) -> tuple[bool, float, bool, int]:
        url = feeder.url or self._url
        is_avoided = self._is_avoided(url)
        is_far = self._host is None or feeder.host != self._host
        # Of those that failed, the one that has rested longest.
        return is_avoided, self._bad[url] if is_avoided else 0.0, is_far, _hash(url, self._dp_rank)


def _hash(url: str, dp_rank: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{dp_rank} {url}".encode())
