"""Ranks of one dp coordinate compare what they train on through their service, now and then.

In:   the step digest of each batch that is handed out (``pipeline/loader_node.py``), a ``DigestComparer``
Out:  nothing, or ``RankMismatchError`` with both digests

Without a process group there is somebody else whom all ranks know: the service. It remembers what the first
rank said of a step, and tells the others if they say something else. That costs a rank no time: the answer is
looked at when the next batch is handed out. A service that does not answer stops nobody.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from ringfeed.pipeline.digest_check import CHECK_EVERY, RankMismatchError
from ringfeed.pipeline.digest_report import DigestReport

if TYPE_CHECKING:
    from ringfeed.pipeline.batch import BatchInfo
    from ringfeed.pipeline.block_fetcher import DigestComparer
    from ringfeed.pipeline.ranks import RankPlace

__all__ = ["ServiceCheck", "make_service_check"]

_LOG = logging.getLogger("ringfeed.feed")


def make_service_check(comparer: DigestComparer | None, place: RankPlace) -> ServiceCheck | None:
    """Return a check through ``comparer``, if there is one."""
    return None if comparer is None else ServiceCheck(comparer, place)


class ServiceCheck:
    """Compares the first batch of an iteration, and the first one of every so many steps."""

    def __init__(self, comparer: DigestComparer, place: RankPlace, *, every: int = CHECK_EVERY) -> None:
        """Compare nothing yet.

        Args:
            comparer: knows what other ranks said.
            place: of this rank.
            every: steps between two comparisons, at least 1; all ranks compare at its multiples.

        Raises:
            ValueError: if ``every`` is below 1.
        """
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self._comparer = comparer
        self._place = place
        self._every = every
        self._following: int | None = None
        self._asking: threading.Thread | None = None
        self._found: str | None = None
        self.num_checks = 0
        """Comparisons that were answered."""

    def restart(self) -> None:
        """Compare the next batch: an iteration begins."""
        self._following = None
        self._found = None

    def see(self, info: BatchInfo) -> None:
        """Take note of a batch that is about to be handed out.

        Raises:
            RankMismatchError: if an earlier one was not what other ranks have.
        """
        if self._found is not None:
            raise RankMismatchError(self._found)
        if self._following is not None and info.step < self._following:
            return
        self._following = (info.step // self._every + 1) * self._every
        if self._asking is not None and self._asking.is_alive():
            # The service is slow, and this is no reason to be, too.
            return
        report = DigestReport.of(self._place, step=info.step, digest=info.step_digest)
        self._asking = threading.Thread(
            target=self._ask, args=(report,), name="ringfeed-compare", daemon=True
        )
        self._asking.start()

    def _ask(self, own: DigestReport) -> None:
        try:
            other = self._comparer.compare(own)
        except (ConnectionError, ValueError) as error:
            _LOG.info("step %d was not compared with other ranks: %s", own.step, error)
            return
        self.num_checks += 1
        if other is not None:
            self._found = _text(own, other)


def _text(own: DigestReport, other: DigestReport) -> str:
    return (
        f"ranks that share packs do not agree on step {own.step} (dp rank {own.dp_rank} of {own.dp_size}): "
        f"{own.who} has step digest {own.digest}, but {other.who} has {other.digest}: they follow different "
        "plans or skip lists; start all ranks with the same ones"
    )
