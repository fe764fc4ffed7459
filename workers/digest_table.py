"""What ranks said that they train on: the first word on each step is remembered.

In:   ``DigestReport``s of ranks (``pipeline/digest_report.py``)
Out:  the report that another one contradicts, if there is any

A bounded table, kept at a service. Losing it costs comparisons, nothing else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from ringfeed.pipeline.digest_report import DigestReport

__all__ = ["DEFAULT_MOST_REPORTS", "DigestTable"]

DEFAULT_MOST_REPORTS = 1 << 14
"""A few MB: 64 comparisons each of 256 dp ranks."""


class DigestTable:
    """Compares reports of ranks that share packs. Safe from any thread."""

    def __init__(self, *, most_reports: int = DEFAULT_MOST_REPORTS) -> None:
        """Remember nothing yet.

        Args:
            most_reports: reports that are kept; the one that was not asked about for longest goes first.

        Raises:
            ValueError: if it is below 1.
        """
        if most_reports < 1:
            raise ValueError(f"most_reports={most_reports} must be at least 1")
        self._most_reports = most_reports
        self._lock = threading.Lock()
        self._first: OrderedDict[tuple[int, ...], DigestReport] = OrderedDict()

    def compare(self, report: DigestReport) -> DigestReport | None:
        """Return what another rank said of the same packs, if it is something else."""
        with self._lock:
            first = self._first.setdefault(report.key, report)
            self._first.move_to_end(report.key)
            if len(self._first) > self._most_reports:
                self._first.popitem(last=False)
        return None if first.digest == report.digest else first

    def compare_json(self, data: bytes) -> bytes | None:
        """Do the same between bytes.

        Raises:
            ValueError: if ``data`` is no report.
        """
        other = self.compare(DigestReport.from_json(data))
        return None if other is None else other.to_json()
