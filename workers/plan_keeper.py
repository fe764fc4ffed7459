"""Keep a service's planner ahead of its ranks: tell it how far to plan, from what builders were asked for.

In:   the planner and the builders that are ready (``workers/service_loop.py``)
Out:  calls of ``advance``, and how they went
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from ringfeed.workers.plan_ahead import PlanAhead
from ringfeed.workers.service_crew import loss_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfeed.workers.members import Loss
    from ringfeed.workers.planner_actor import PlannerHello
    from ringfeed.workers.service_crew import Life

__all__ = ["PlanKeeper"]

_ASK_SECONDS = 0.5


class PlanKeeper:
    """Used by the loop's thread alone."""

    def __init__(self) -> None:
        """Know of no plan."""
        self._ahead = PlanAhead()
        self._advance: Any = None
        self._stats: set[Any] = set()
        self._asked = float("-inf")
        self.is_finished = False
        self.loss: Loss | None = None
        """Why planning cannot go on, whoever plans."""

    @property
    def references(self) -> list[Any]:
        """What ``hear`` is to be called with, once it is there."""
        return [*self._stats, *([] if self._advance is None else [self._advance])]

    def act(self, planner: Life | None, builders: Sequence[Life]) -> None:
        """Ask builders how far ranks are, and the planner to go on."""
        if planner is None or self.is_finished:
            return
        if not self._stats and time.monotonic() - self._asked >= _ASK_SECONDS:
            self._asked = time.monotonic()
            self._stats = {life.actor.stats.remote() for life in builders}
        until = self._ahead.until_step
        if self._advance is None and until is not None:
            self._advance = planner.actor.advance.remote(until)

    def planned(self, said: PlannerHello) -> None:
        """Take over how far a planner is."""
        self._ahead.planned(said.num_steps, is_finished=said.is_finished)
        self.is_finished = said.is_finished

    def hear(self, reference: Any) -> None:
        """Take what one of ``references`` says. A death is told by the one who died."""
        is_advance = reference == self._advance
        if is_advance:
            self._advance = None
        self._stats.discard(reference)
        try:
            said = ray.get(reference)
        except RayError as error:
            if is_advance and isinstance(error, RayTaskError):
                self.loss = loss_of(error)
            return
        if is_advance:
            self.planned(said)
        else:
            self._ahead.asked(said.highest_step)
