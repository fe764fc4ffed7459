"""How long a pool of builders tries, and how one request fared so far.

In:   the errors of one request
Out:  times to wait, and whether to go on (``workers/builder_pool.py``)
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ringfeed.workers.builder_calls import BuilderError, BuilderLostError

__all__ = ["PoolPatience", "Tries"]

# Builders that raise what is neither a refusal nor damage: asking others is tried this often.
_MOST_ERRORS = 3
# A busy builder is not a dead one: each try waits twice as long, up to this many times.
_MOST_DOUBLINGS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPatience:
    """How long a pool tries.

    Raises:
        ValueError: if a time is not above 0.
    """

    open_seconds: float = 10.0
    """For the first facts: a service may still be starting."""
    retry_seconds: float = 1800.0
    """For any builder to answer later on: a service that is started again must fit in."""
    reply_seconds: float = 120.0
    """For one builder, which is then left; each further try of a request waits twice as long."""
    roster_seconds: float = 5.0
    """Between two looks at the roster while all goes well."""
    first_wait: float = 0.05
    """Before a second try, where there is nobody else; doubled each time."""
    most_wait: float = 2.0

    def __post_init__(self) -> None:
        for name in (
            "open_seconds",
            "retry_seconds",
            "reply_seconds",
            "roster_seconds",
            "first_wait",
            "most_wait",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")


class Tries:
    """How often one thing was asked for, and how it went."""

    def __init__(self, patience: PoolPatience) -> None:
        """Begin to count time and tries."""
        self._patience = patience
        self._began = time.monotonic()
        self._num_errors = 0
        self.count = 0

    def add(self, error: BuilderLostError) -> None:
        """Note a try that failed."""
        self.count += 1
        self._num_errors = self._num_errors + 1 if isinstance(error, BuilderError) else 0

    @property
    def are_final(self) -> bool:
        """Whether trying again is of no use: builders fail one after the other in the same way."""
        return self._num_errors >= _MOST_ERRORS

    @property
    def seconds(self) -> float:
        """Time since the first try."""
        return time.monotonic() - self._began

    @property
    def reply_seconds(self) -> float:
        """Time for the next builder to answer."""
        return self._patience.reply_seconds * 2.0 ** min(self.count, _MOST_DOUBLINGS)

    @property
    def wait_seconds(self) -> float:
        """Time before the next try, where there is nobody else to ask."""
        return min(self._patience.most_wait, self._patience.first_wait * 2.0 ** min(20, self.count - 1))
