"""What a rank says while it waits for data, and when it gives up (law L11).

In:   how long it has waited, for what, and who holds how many bytes (``pipeline/feed_source.py``)
Out:  a line in the log after a while, and again at twice the time; a ``TimeoutError`` in the end
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ringfeed.pipeline.ranks import RankPlace

__all__ = ["Patience", "Stall", "StallWatch", "stall_text"]

_LOG = logging.getLogger("ringfeed.feed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a rank waits.

    Raises:
        ValueError: if a time is not above 0.
    """

    warn_seconds: float = 15.0
    """After this long a line is logged, and again whenever the time has doubled."""
    fail_seconds: float = 1800.0
    """After this long the wait fails. A service that is being started again must fit in."""
    poll_seconds: float = 0.5
    """Between questions whether a growing plan has got further."""

    def __post_init__(self) -> None:
        for name in ("warn_seconds", "fail_seconds", "poll_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """One wait, at one moment."""

    seconds: float
    step: int
    what: str
    """What is waited for: "micro-batch 3", "its facts", "the planner"."""
    place: RankPlace
    asked: str
    """Who was asked, and how it went (``FetcherStatus``)."""
    bytes_held: Mapping[str, int]
    """Bytes by holder."""


def stall_text(stall: Stall) -> str:
    """Return what a human needs to find out who is at fault, in one line."""
    place = stall.place
    held = ", ".join(f"{who} {_size(count)}" for who, count in stall.bytes_held.items()) or "nobody any"
    return (
        f"waited {stall.seconds:.0f} s for step {stall.step}, {stall.what} (dp rank {place.dp_rank} of "
        f"{place.dp_size}, cp rank {place.cp_rank} of {place.cp_size}); asked {stall.asked}; bytes "
        f"held: {held}"
    )


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count:,} B"


class StallWatch:
    """Watches one wait. ``check`` is called now and then while it lasts."""

    def __init__(self, patience: Patience, describe: Callable[[float], Stall]) -> None:
        """Begin to count.

        Args:
            patience: when to speak, and when to give up.
            describe: gives the stall after so many seconds; called only when there is something to say.
        """
        self._patience = patience
        self._describe = describe
        self._began = time.monotonic()
        self._warn_after = patience.warn_seconds
        self.num_warnings = 0

    @property
    def seconds(self) -> float:
        """Time since the wait began."""
        return time.monotonic() - self._began

    def check(self) -> None:
        """Log, or give up, when it is time to.

        Raises:
            TimeoutError: with ``stall_text``, after ``fail_seconds``.
        """
        waited = self.seconds
        if waited >= self._patience.fail_seconds:
            raise TimeoutError(f"{stall_text(self._describe(waited))}; gave up. Is the service alive?")
        if waited >= self._warn_after:
            self._warn_after *= 2
            self.num_warnings += 1
            _LOG.warning("%s", stall_text(self._describe(waited)))
