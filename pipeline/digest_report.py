"""What one rank is about to train on, as bounded JSON for whoever compares ranks.

In:   the step digest of a batch (``pipeline/batch.py``)
Out:  ``DigestReport``, kept in a table at the service (``workers/digest_table.py``)
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ringfeed.pipeline.feed_request import read_object
from ringfeed.pipeline.manifest import canonical_json

if TYPE_CHECKING:
    from ringfeed.pipeline.ranks import RankPlace

__all__ = ["MAX_REPORT_BYTES", "DigestReport"]

MAX_REPORT_BYTES = 1024
_DIGEST = re.compile(r"[0-9a-f]{16}")
_WHO = re.compile(r"[\x20-\x7e]{1,200}")
_COUNTS = ("dp_rank", "dp_size", "packs_per_chunk", "step")
_MAX_COUNT = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestReport:
    """One rank at one step.

    Raises:
        ValueError: if a value is out of its range.
    """

    dp_rank: int
    dp_size: int
    packs_per_chunk: int
    step: int
    digest: str
    """``BatchInfo.step_digest``, 16 hex digits."""
    who: str
    """Names the rank for a human."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < _MAX_COUNT:
                raise ValueError(f"a digest report has {name}={value!r}; it is a small integer")
        if not isinstance(self.digest, str) or not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"a digest report has digest={self.digest!r:.80}; it is 16 hex digits")
        if not isinstance(self.who, str) or not _WHO.fullmatch(self.who):
            raise ValueError("a digest report has no who: a line of at most 200 visible characters")

    @classmethod
    def of(cls, place: RankPlace, *, step: int, digest: int) -> DigestReport:
        """Return the report of this process as the rank at ``place``."""
        host = re.sub(r"[^\x21-\x7e]", "?", socket.gethostname())[:64]
        return cls(
            dp_rank=place.dp_rank,
            dp_size=place.dp_size,
            packs_per_chunk=place.packs_per_chunk,
            step=step,
            digest=f"{digest:016x}",
            who=f"cp rank {place.cp_rank} of {place.cp_size} (process {os.getpid()} on {host})",
        )

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for ranks that share packs: their digests must be, too."""
        return self.dp_rank, self.dp_size, self.packs_per_chunk, self.step

    def to_json(self) -> bytes:
        """Return the report as it goes over the wire; ``from_json`` is the way back."""
        return canonical_json(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> DigestReport:
        """Read a report from a peer that nobody vouches for.

        Raises:
            ValueError: if it is too long, no JSON, or not exactly the fields of a report in their ranges.
        """
        values = read_object(data, most=MAX_REPORT_BYTES, what="a digest report")
        if set(values) != {*_COUNTS, "digest", "who"}:
            raise ValueError(f"a digest report has fields {sorted(values)[:12]}")
        return cls(**values)
