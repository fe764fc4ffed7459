"""What a service's directory tells ranks: the facts of the run and who feeds them, and no blocks.

In:   the supervisor's loop (``workers/service_loop.py``), builders where a plan grows
Out:  a ``BlockSupply`` for the directory's Flight server (``workers/flight_server.py``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfeed.workers.builder_pool import BuilderPool
from ringfeed.workers.roster import Roster

if TYPE_CHECKING:
    from ringfeed.pipeline.feed_facts import FeedFacts
    from ringfeed.pipeline.feed_request import BlockRequest
    from ringfeed.pipeline.step_block import EncodedBlock
    from ringfeed.workers.ray_builders import RosterLookup
    from ringfeed.workers.service_loop import ServiceLoop
    from ringfeed.workers.service_options import ServiceOptions

__all__ = ["DirectorySupply"]


class DirectorySupply:
    """What the directory's server is supplied with: facts, and no blocks."""

    def __init__(self, facts: FeedFacts) -> None:
        """Know of nobody yet, but of the run."""
        self._facts = facts
        self._loop: ServiceLoop | None = None
        self._pool: BuilderPool | None = None
        self._lookup: RosterLookup | None = None

    def follow(self, loop: ServiceLoop, options: ServiceOptions) -> None:
        """From now on, ask builders what there is, and the loop who is there."""
        from ringfeed.workers.ray_builders import RayBuilderCalls, RosterLookup

        self._pool = BuilderPool(lambda: loop.roster, RayBuilderCalls())
        self._lookup = RosterLookup(options.name, options.namespace)
        self._loop = loop

    def compare(self, report: bytes) -> bytes | None:
        """Compare where ranks on Ray do, too."""
        if self._lookup is None:
            raise ConnectionError("the service is starting")
        other: bytes | None = self._lookup.ask("compare", report)
        return other

    def roster(self) -> Roster:
        """Return who is there."""
        return Roster(version=-1, facts_json=b"") if self._loop is None else self._loop.roster

    def facts(self) -> FeedFacts:
        return self._facts if self._pool is None else self._pool.facts()

    def block(self, request: BlockRequest) -> EncodedBlock:  # noqa: ARG002 - it has none
        raise ConnectionError("no feeder of this service is ready; ask again")
