"""Which builder is asked for a block: pure arithmetic, without Ray and without a clock.

In:   builders of a roster (``workers/roster.py``), what a request has in common with its cp peers'
Out:  the builders in the order in which they are tried (``workers/builder_pool.py``)

Each builder and key hash to a number, and the least number wins (rendezvous hashing): cp peers choose the
same builder without a word between them, and one that goes or comes moves its own share of blocks alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["REST_SECONDS", "BuilderChoice"]

REST_SECONDS = 5.0
"""How long a builder that failed is asked last: about as long as a new one takes to start."""


class _Placed(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def node_id(self) -> str: ...


Builder = TypeVar("Builder", bound=_Placed)


class BuilderChoice:
    """Remembers who failed just now; everything else is a function of its arguments."""

    def __init__(self, *, node_id: str | None = None, rest_seconds: float = REST_SECONDS) -> None:
        """Know of no failure.

        Args:
            node_id: whose builders come first; None knows no neighbours.
            rest_seconds: how long one that failed comes last.
        """
        self._node_id = node_id
        self._rest_seconds = rest_seconds
        self._failed: dict[str, float] = {}
        """Name -> when."""

    def order(self, builders: Iterable[Builder], key: Sequence[object], *, now: float) -> list[Builder]:
        """Return the builders, the one to ask first at the front.

        Args:
            builders: all there are, in any order.
            key: equal for requests that share a build (``BlockRequest.share_key``).
            now: seconds on the clock that ``failed`` was told.
        """
        text = ",".join(map(str, key))

        def rank(builder: Builder) -> tuple[bool, float, bool, int]:
            is_resting = self.is_resting(builder.name, now=now)
            # Of those that failed, the one that has rested longest.
            since = self._failed.get(builder.name, 0.0) if is_resting else 0.0
            is_far = self._node_id is None or builder.node_id != self._node_id
            return is_resting, since, is_far, xxhash.xxh3_64_intdigest(f"{text} {builder.name}".encode())

        return sorted(builders, key=rank)

    def is_resting(self, name: str, *, now: float) -> bool:
        """Return whether this builder failed so lately that any other one comes before it."""
        return now - self._failed.get(name, float("-inf")) < self._rest_seconds

    def failed(self, name: str, *, now: float) -> None:
        """Ask this builder last for a while."""
        self._failed[name] = now

    def forgive(self, name: str) -> None:
        """Take it as if it had never failed: it answered, or another process has its name now."""
        self._failed.pop(name, None)
