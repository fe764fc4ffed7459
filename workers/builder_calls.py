"""The seam between a pool and its builders: how one is called, and what an error means.

In:   a member of a roster (``workers/roster.py``), a request in JSON
Out:  the answer, or an error that says whether asking elsewhere is of any use (``workers/builder_pool.py``)

Over Ray it is ``workers/ray_builders.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import threading

    from ringfeed.workers.roster import BuilderMember

__all__ = ["BuilderCalls", "BuilderError", "BuilderLostError"]


class BuilderLostError(Exception):
    """A builder is dead, silent, or has no memory for an answer now: ask another one."""


class BuilderError(BuilderLostError):
    """A builder is alive and cannot make the answer, for a reason that is not the request's."""


class BuilderCalls(Protocol):
    """How builders are called. From any thread.

    Both methods wait for the answer, at most ``seconds``, and give up once ``stop`` is set.

    Raises:
        ValueError: if the builder refuses the request, with its text.
        CorruptDataError: if the data behind the answer is damaged.
        BuilderLostError: for everything that another builder, or the same one later, may do better.
    """

    def facts(self, builder: BuilderMember, *, seconds: float, stop: threading.Event) -> bytes:
        """Return the ``FeedFacts`` of the builder as JSON."""
        ...

    def block(self, builder: BuilderMember, request: bytes, *, seconds: float, stop: threading.Event) -> Any:
        """Return the record batch (``EncodedBlock.to_batch``) that a ``BlockRequest`` in JSON asks for."""
        ...
