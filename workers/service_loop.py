"""The supervisor's loop: what happens on Ray goes in, what it decides is done.

In:   deaths and hellos of actors, nodes that come and go (``workers/service_crew.py``)
Out:  ``Roster``s, told to the service actor and kept for the directory; an error that ends the service

It is the only one that starts and ends actors of a service.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ringfeed.pipeline.executor import JobFailedError
from ringfeed.pipeline.feed_facts import FeedFacts
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.workers.builder_actor import BuilderHello
from ringfeed.workers.feeder_actor import FeederHello
from ringfeed.workers.members import Loss, LossKind, Role, Start
from ringfeed.workers.plan_keeper import PlanKeeper
from ringfeed.workers.planner_actor import PlannerHello
from ringfeed.workers.roster import BuilderMember, Roster
from ringfeed.workers.service_actor import ServiceHello
from ringfeed.workers.service_crew import loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ringfeed.workers.members import MemberView
    from ringfeed.workers.service_crew import Crew, Life
    from ringfeed.workers.supervisor import Supervisor

__all__ = ["LoopStatus", "ServiceLoop"]

_LOG = logging.getLogger("ringfeed.service")
_TICK_SECONDS = 0.2
_NODES_SECONDS = 1.0
_NOT_NEEDED = Loss(kind=LossKind.DIED, text="it has nothing left to do")
_LEAVE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopStatus:
    """The members of a service at one time."""

    members: tuple[tuple[MemberView, int | None], ...]
    """Each with its process, if it is ready."""
    num_restarts: Mapping[str, int]
    """Members that were started again, by role."""


class ServiceLoop:
    """A thread that keeps the members of a service alive."""

    def __init__(
        self,
        supervisor: Supervisor,
        crew: Crew,
        facts: FeedFacts,
        *,
        tell: Callable[[str], object],
    ) -> None:
        """Start nothing yet.

        Args:
            supervisor: decides.
            crew: does.
            facts: of the run, as this process sees it; a builder that sees another one is refused.
            tell: is told who comes and goes, in the loop's thread.
        """
        self._supervisor = supervisor
        self._crew = crew
        self._fingerprint = facts.fingerprint
        self._tell = tell
        self._metrics = crew.metrics
        self._lives: dict[int, Life] = {}
        self._nodes_seen = float("-inf")
        self._telling: Any = None
        self._planning = PlanKeeper()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringfeed-supervisor", daemon=True)
        self.roster = Roster(version=0, facts_json=facts.to_json())
        """Who is there now; replaced whole, so any thread may look."""
        self.status = LoopStatus(members=(), num_restarts={})
        """Replaced whole, too: supervisor and lives are the loop's thread's alone."""
        self.is_up = threading.Event()
        """Set when ranks are served for the first time."""
        self.has_ended = threading.Event()
        self.error: Exception | None = None
        """Why it ended, if nobody stopped it."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End all members, feeders after their ranks were told; a second call does nothing."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and self.error is None:
                self._look_at_nodes()
                for action in self._supervisor.act(time.monotonic()):
                    if isinstance(action, Start):
                        self._begin(action)
                    else:
                        self._end(self._lives[action.life], _NOT_NEEDED)
                self._plan_on()
                self._hear()
                self._show()
                self._check()
        except JobFailedError as error:
            # Without Ray every call of it waits for long; its processes end with it.
            self.error, self._lives = error, {}
        except Exception as error:
            _LOG.exception("the supervisor failed")
            self.error = JobFailedError(f"the service's supervisor failed: {type(error).__name__}: {error}")
        finally:
            self._leave()
            self.has_ended.set()

    def _look_at_nodes(self) -> None:
        if time.monotonic() - self._nodes_seen >= _NODES_SECONDS:
            self._nodes_seen = time.monotonic()
            nodes = self._crew.nodes()
            if nodes is not None:
                self._supervisor.see_nodes(nodes)
            self._metrics.see_restarts(self.status.num_restarts)

    def _plan_on(self) -> None:
        ready = [life for life in self._lives.values() if life.said is not None]
        planner = next((life for life in ready if life.start.role is Role.PLANNER), None)
        self._planning.act(planner, [life for life in ready if life.start.role is Role.BUILDER])
        if self._planning.is_finished:
            self._supervisor.dismiss("planner")

    def _begin(self, start: Start) -> None:
        try:
            self._lives[start.life] = self._crew.make(start)
        except (ValueError, RayError) as error:
            self._supervisor.lost(start.name, start.life, loss_of(error), now=time.monotonic())

    def _end(self, life: Life, loss: Loss | None) -> None:
        life.loss = loss
        self._crew.end(life)

    def _hear(self) -> None:
        """Wait a little for news of any member, and take it."""
        heard: dict[Any, Callable[[], None]] = {}
        for life in self._lives.values():
            heard[life.watch] = partial(self._bury, life)
            if life.said is None and life.loss is None:
                heard[life.hello] = partial(self._welcome, life)
        for reference in self._planning.references:
            heard[reference] = partial(self._planning.hear, reference)
        if not heard:
            self._stop.wait(_TICK_SECONDS)
            return
        ready, _ = ray.wait(list(heard), num_returns=1, timeout=_TICK_SECONDS)
        for reference in ready:
            heard[reference]()

    def _bury(self, life: Life) -> None:
        """Take note that an actor is dead."""
        loss = life.loss
        if loss is None:
            try:
                ray.get(life.watch)
                loss = Loss(kind=LossKind.DIED, text="it stopped watching")
            except RayError as error:
                loss = loss_of(error)
        # Dead for Ray may be alive on a node that cannot be reached.
        self._crew.end(life)
        start = life.start
        del self._lives[start.life]
        self._tell(f"{start.name} is gone: {loss.text}")
        self._supervisor.lost(start.name, start.life, loss, now=time.monotonic())
        self._change()

    def _welcome(self, life: Life) -> None:
        """Take note that an actor is ready, or end it if it says that it cannot be."""
        try:
            said = ray.get(life.hello)
        except RayError as error:
            # Its watch tells when it is gone: the next one must not meet it.
            self._end(life, loss_of(error))
            return
        if isinstance(said, BuilderHello) and (wrong := self._difference(said)):
            self._end(life, Loss(kind=LossKind.MISTAKE, text=f"{life.start.name}: {wrong}"))
            return
        if isinstance(said, PlannerHello):
            self._planning.planned(said)
        life.said = said
        start = life.start
        self._tell(f"{start.name} is ready: process {said.pid} on node {said.node_id[:12]}")
        self._supervisor.ready(start.name, start.life, node_id=said.node_id, now=time.monotonic())
        self._change()

    def _difference(self, said: BuilderHello) -> str | None:
        found = FeedFacts.from_json(said.facts_json).fingerprint
        if found == self._fingerprint:
            return None
        return (
            f"on node {said.node_id} plan and corpora make run {found}, here they make {self._fingerprint}; "
            "all nodes need the same files and the same ringfeed"
        )

    def _change(self) -> None:
        """Tell who is there now."""
        lives = [self._lives[number] for number in sorted(self._lives)]
        self.roster = replace(
            self.roster,
            version=self.roster.version + 1,
            builders=tuple(
                BuilderMember(name=life.start.name, node_id=life.said.node_id, actor=life.actor)
                for life in lives
                if isinstance(life.said, BuilderHello)
            ),
            feeders=tuple(life.said.feeder for life in lives if isinstance(life.said, FeederHello)),
        )
        for life in lives:
            if isinstance(life.said, ServiceHello):
                self._telling = self._crew.tell(life, self.roster)

    def _show(self) -> None:
        """Let other threads see how the members are."""
        pids = {life.start.life: life.said.pid for life in self._lives.values() if life.said is not None}
        restarts = {str(role): count for role, count in self._supervisor.num_restarts.items()}
        members = tuple((member, pids.get(member.life)) for member in self._supervisor.members)
        self.status = LoopStatus(members=members, num_restarts=restarts)

    def _check(self) -> None:
        """See whether the service is up, or cannot be."""
        if self._supervisor.is_up:
            self.is_up.set()
        failure = self._planning.loss or self._supervisor.failure
        if failure is not None:
            kinds = {LossKind.MISTAKE: ValueError, LossKind.DAMAGED: CorruptDataError}
            self.error = kinds.get(failure.kind, JobFailedError)(failure.text)

    def _leave(self) -> None:
        """End all members; ranks are told before."""
        self.roster = replace(self.roster, version=self.roster.version + 1, builders=(), feeders=())
        lives = list(self._lives.values())
        try:
            leaving = [life.actor.leave.remote() for life in lives if isinstance(life.said, FeederHello)]
            if leaving:
                ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_SECONDS)
            for life in lives:
                self._crew.end(life)
            if lives:
                watches = [life.watch for life in lives]
                ray.wait(watches, num_returns=len(watches), timeout=_LEAVE_SECONDS)
        except RayError as error:
            _LOG.info("members were left to Ray: %s", error)
