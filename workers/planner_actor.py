"""A planner as a Ray actor: plans block by block, ahead of the ranks that read the plan.

In:   ``PlanOptions`` (``pipeline/planner/options.py``), and how far to plan (``workers/plan_ahead.py``)
Out:  blocks in ``PLAN.partial`` that builders follow (``PlanOpener``); the finished plan in the end

    service loop                                        this actor
    hello()               after it builders may open    PlannerHello: the plan is announced
    advance(until_step)   whenever ``PlanAhead`` says   PlannerHello: how far it is now

Only finished blocks are kept, in files: a planner that was killed goes on at the last of them. A mistake of
the user comes back as the ValueError that ``ringfeed plan`` would tell; going on is of no use then.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringfeed.pipeline.planner.session import PlanSession
from ringfeed.pipeline.staging import FolderBusyError

if TYPE_CHECKING:
    from ringfeed.pipeline.planner.options import PlanOptions

__all__ = ["PlannerActor", "PlannerHello", "open_session"]

# A planner that was killed may take a moment to be gone.
_BUSY_SECONDS = 30.0
_RETRY_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerHello:
    """A planner that is ready, and how far it is."""

    node_id: str
    pid: int
    num_steps: int
    """Steps that can be read now."""
    is_finished: bool


class PlannerActor:
    """Plans when it is told to, one call at a time."""

    def __init__(self, options: PlanOptions) -> None:
        """Open nothing yet: an error here would reach nobody as itself."""
        self._options = options
        self._session: PlanSession | None = None

    def hello(self) -> PlannerHello:
        """Become the planner and announce the plan, or find it finished.

        Raises:
            ValueError: if corpora or options cannot be planned, or another process plans this one.
            CorruptDataError: if a corpus is damaged.
        """
        return self._told(self._open())

    def advance(self, until_step: int | None) -> PlannerHello:
        """Plan until so many steps can be read, or to the end, which finishes the plan.

        Args:
            until_step: how many steps must be in finished blocks; None plans all.

        Raises:
            ValueError: if a step or a document cannot be planned. The partial plan is deleted.
        """
        session = self._open()
        session.advance(until_step=until_step)
        return self._told(session)

    def watch(self) -> None:
        """Never return: whoever waits for this learns at once that the process has died."""
        threading.Event().wait()

    def _open(self) -> PlanSession:
        if self._session is None:
            self._session = open_session(self._options)
        return self._session

    def _told(self, session: PlanSession) -> PlannerHello:
        import ray

        return PlannerHello(
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            num_steps=session.num_steps,
            is_finished=session.manifest is not None,
        )


def open_session(options: PlanOptions) -> PlanSession:
    """Become the planner of a plan; one that was killed is given some time to be gone.

    Raises:
        ValueError: if corpora or options cannot be planned, or another process plans this one.
        CorruptDataError: if a corpus is damaged.
    """
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return PlanSession.open(options)
        except FolderBusyError:
            if time.monotonic() > until:
                raise
            time.sleep(_RETRY_SECONDS)
