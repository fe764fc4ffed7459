"""Who belongs to a service now: builders to ask, feeders that serve ranks.

In:   what the supervisor's loop sees (``workers/service_loop.py``)
Out:  ``Roster``s, for pools of builders (``workers/builder_pool.py``) and for the directory

A roster can be made again from nothing: it is news, not state. A newer one replaces an older one whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringfeed.pipeline.flight_wire import Feeder

__all__ = ["BuilderMember", "Roster"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuilderMember:
    """A builder that answered."""

    name: str
    """The same after a restart: requests go by it, so a new builder takes over the old one's share."""
    node_id: str
    """Of Ray; a pool asks builders of its own node first."""
    actor: Any
    """Ray's handle of a ``BuilderActor`` (``workers/builder_actor.py``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roster:
    """All members at one time."""

    version: int
    """Rises with every change while a service runs."""
    facts_json: bytes
    """``FeedFacts`` of the run; empty before any builder has answered."""
    builders: tuple[BuilderMember, ...] = ()
    feeders: tuple[Feeder, ...] = ()
