"""What a trainer rank counts while it loads, and who may want to know.

In:   what the loader and its source tell: batches handed out, blocks that came, waits by cause, retries
Out:  calls of a ``LoaderMetrics``; ``pipeline/rank_metrics.py`` is the one for Prometheus
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

__all__ = ["LoaderMetrics", "NoMetrics", "StallCause"]


class StallCause(StrEnum):
    """What a rank waits for when the next batch is not here."""

    BUILDER = "builder"
    """A block that was asked for and has not come."""
    PLANNER = "planner"
    """A step that is not planned yet."""
    FACTS = "facts"
    """Whose packs a step has: asked for alone when a state is loaded or saved in the middle of a run."""


class LoaderMetrics(Protocol):
    """Counts for one rank. Called from the training loop and the loader's thread, once per batch or block.

    One object may be given to several loaders of a process, one after the other or at once.
    """

    def batch(self, *, tokens: int, seconds: float) -> None:
        """Note a batch that was handed out.

        Args:
            tokens: local tokens of this rank, padding included (L).
            seconds: time in which the training loop stood still for it.
        """
        ...

    def block(self, *, nbytes: int) -> None:
        """Note a block that came from a service."""
        ...

    def wait(self, cause: StallCause, *, seconds: float, num_stalls: int) -> None:
        """Note that the loader's thread waited for the service.

        Args:
            cause: what for.
            seconds: how long, also if it was next to nothing.
            num_stalls: 1 if it took so long that the log tells of it (``feed_stall.Patience``), else 0.
        """
        ...

    def retries(self, count: int) -> None:
        """Note how many requests had to be made again since the last call."""
        ...


class NoMetrics:
    """Counts nothing: what a loader has that was given no metrics."""

    def batch(self, *, tokens: int, seconds: float) -> None:
        pass

    def block(self, *, nbytes: int) -> None:
        pass

    def wait(self, cause: StallCause, *, seconds: float, num_stalls: int) -> None:
        pass

    def retries(self, count: int) -> None:
        pass
