"""The named actor of a service: whoever is on Ray finds the members of it here.

In:   rosters from the supervisor's loop (``workers/service_loop.py``)
Out:  the newest one, for feeders and for ranks on the object store; what ranks said that they train on

A restart loses nothing that counts: the loop tells the roster again, and ranks compare again in a while.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from ringfeed.workers.digest_table import DigestTable
from ringfeed.workers.roster import Roster

__all__ = ["ServiceActor", "ServiceHello"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceHello:
    """The actor is ready."""

    node_id: str
    pid: int


class ServiceActor:
    """Holds what others look up."""

    def __init__(self) -> None:
        """Know nobody yet."""
        self._roster = Roster(version=-1, facts_json=b"")
        self._digests = DigestTable()

    def hello(self) -> ServiceHello:
        """Say where it runs."""
        import ray

        return ServiceHello(node_id=ray.get_runtime_context().get_node_id(), pid=os.getpid())

    def set_roster(self, roster: Roster) -> None:
        """Take over who is there; what is older than what is known is no news."""
        if roster.version > self._roster.version:
            self._roster = roster

    def roster(self) -> Roster:
        """Return who is there."""
        return self._roster

    def compare(self, report: bytes) -> bytes | None:
        """Compare what a rank trains on with what others said (``DigestTable.compare_json``)."""
        return self._digests.compare_json(report)

    def watch(self) -> None:
        """Never return; see ``BuilderActor.watch``."""
        threading.Event().wait()
