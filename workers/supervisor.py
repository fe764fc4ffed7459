"""Which members a service should have now: a state machine without Ray and without a clock.

In:   what happened and when (``workers/service_loop.py``): nodes seen, members ready or lost
Out:  ``Start`` and ``Stop``, and a ``failure`` once going on is of no use

    WAITING -> STARTING -> READY    one that is lost goes back to WAITING, each time longer
                   |         |      (once it was ready for a while, the next wait is short again)
                   +-> STOPPING     no longer wanted, or not ready in time: until it is gone

A name has at most one life at a time: the next one starts after the last one was told lost.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringfeed.workers.members import Loss, LossKind, MemberView, Phase, RestartPolicy, Role, Start, Stop

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Supervisor"]


@dataclass(slots=True)
class _Member:
    name: str
    role: Role
    node_id: str | None = None
    """Where it is, or was; where a feeder must be."""
    phase: Phase = Phase.WAITING
    life: int = -1
    since: float = -math.inf
    """When its phase began; of WAITING: when it ends."""
    num_losses: int = 0
    """In a row."""
    num_restarts: int = 0
    was_ready: bool = False
    is_done: bool = False
    """It has nothing left to do."""
    last_loss: Loss | None = None


class Supervisor:
    """Decides. Called by one thread, with times that never fall."""

    def __init__(
        self,
        *,
        num_builders: int,
        num_planners: int = 0,
        feeder_node: str | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        """Want the service actor, the builders and the planner at once.

        Args:
            num_builders: how many.
            num_planners: 1 if the plan is still being made, else 0.
            feeder_node: the only node that has a feeder; None is every node that has builders.
            policy: how patient to be.

        Raises:
            ValueError: if there is no builder.
        """
        if num_builders < 1:
            raise ValueError(f"builders={num_builders} must be at least 1")
        self._policy = policy or RestartPolicy()
        self._feeder_node = feeder_node
        self._nodes: frozenset[str] = frozenset()
        self._had_builders: dict[str, float] = {}
        """Node -> when a builder was last seen ready there."""
        self._lives = 0
        self.failure: Loss | None = None
        """What ended a member again and again before it was ever ready; then going on is of no use."""
        self.num_restarts: Counter[Role] = Counter()
        names = [("service", Role.SERVICE), *((f"builder-{i}", Role.BUILDER) for i in range(num_builders))]
        names += [("planner", Role.PLANNER)] * num_planners
        self._members = {name: _Member(name=name, role=role) for name, role in names}

    @property
    def is_up(self) -> bool:
        """Whether ranks are served: one member of each role is ready."""
        roles = {Role.FEEDER, *(member.role for member in self._members.values())}
        return all(map(self._has_ready, roles))

    @property
    def members(self) -> tuple[MemberView, ...]:
        """All members, in the order of their names."""
        return tuple(_view(self._members[name]) for name in sorted(self._members))

    def see_nodes(self, nodes: Iterable[str]) -> None:
        """Take over which nodes live now."""
        self._nodes = frozenset(nodes)

    def ready(self, name: str, life: int, *, node_id: str, now: float) -> None:
        """Note that a member answered."""
        member = self._living(name, life)
        if member is not None and member.phase is Phase.STARTING:
            member.phase, member.since, member.node_id = Phase.READY, now, node_id
            member.was_ready = True

    def lost(self, name: str, life: int, loss: Loss, *, now: float) -> None:
        """Note that a member is gone, by itself or because it was stopped."""
        member = self._living(name, life)
        if member is None:
            return
        if member.phase is not Phase.STOPPING:
            self._count_loss(member, loss, now)
        member.phase, member.since = Phase.WAITING, now + self._wait_seconds(member)
        self._give_up_on(member)

    def dismiss(self, name: str) -> None:
        """Want this member no more: its work is done."""
        if name in self._members:
            self._members[name].is_done = True

    def act(self, now: float) -> list[Start | Stop]:
        """Return what to do now, and take it as done. Call it after every event, and often."""
        if self.failure is not None:
            return []
        wanted = self._wanted_feeders(now)
        for name, node_id in wanted.items():
            if name not in self._members:
                self._members[name] = _Member(name=name, role=Role.FEEDER, node_id=node_id, since=now)
        actions: list[Start | Stop] = []
        for member in list(self._members.values()):
            is_wanted = member.name in wanted if member.role is Role.FEEDER else not member.is_done
            if member.phase is Phase.WAITING and not is_wanted:
                del self._members[member.name]
            elif member.phase is Phase.WAITING and member.since <= now:
                actions.append(self._start(member, now))
            elif member.phase is Phase.STARTING and now - member.since >= self._policy.start_seconds:
                text = f"{member.name} was not ready within {self._policy.start_seconds:g} s"
                self._count_loss(member, Loss(kind=LossKind.DIED, text=text), now)
                actions.append(_stop(member, now))
            elif member.phase in (Phase.STARTING, Phase.READY) and not is_wanted:
                actions.append(_stop(member, now))
        return actions

    def _wanted_feeders(self, now: float) -> dict[str, str]:
        """Return the nodes that should have a feeder, by its name."""
        for member in self._members.values():
            if member.role is Role.BUILDER and member.phase is Phase.READY and member.node_id is not None:
                self._had_builders[member.node_id] = now
        since = now - self._policy.linger_seconds
        nodes = {node for node, last in self._had_builders.items() if last >= since}
        if self._feeder_node is not None:
            nodes = {self._feeder_node}
        return {f"feeder-{node[:12]}": node for node in sorted(nodes & self._nodes)}

    def _start(self, member: _Member, now: float) -> Start:
        if member.life >= 0:
            self.num_restarts[member.role] += 1
            member.num_restarts += 1
        self._lives += 1
        member.phase, member.since, member.life = Phase.STARTING, now, self._lives
        node_id = member.node_id if member.role is Role.FEEDER else None
        return Start(name=member.name, role=member.role, life=member.life, node_id=node_id)

    def _count_loss(self, member: _Member, loss: Loss, now: float) -> None:
        if member.phase is Phase.READY and now - member.since >= self._policy.stable_seconds:
            member.num_losses = 0
        member.num_losses += 1
        member.last_loss = loss

    def _wait_seconds(self, member: _Member) -> float:
        if not member.num_losses:
            return 0.0
        # Far above most_wait, and still no overflow.
        doublings = min(member.num_losses - 1, 30)
        return min(self._policy.most_wait, self._policy.first_wait * 2.0**doublings)

    def _give_up_on(self, member: _Member) -> None:
        if member.was_ready or member.last_loss is None or member.num_losses < self._policy.max_tries:
            return
        # Others do its work: one bad node must not end a run.
        if self.failure is None and not self._has_ready(member.role):
            self.failure = member.last_loss

    def _has_ready(self, role: Role) -> bool:
        return any(m.role is role and m.phase is Phase.READY for m in self._members.values())

    def _living(self, name: str, life: int) -> _Member | None:
        """Return the member, if ``life`` is the one that it has now."""
        member = self._members.get(name)
        is_current = member is not None and member.life == life and member.phase is not Phase.WAITING
        return member if is_current else None


def _stop(member: _Member, now: float) -> Stop:
    member.phase, member.since = Phase.STOPPING, now
    return Stop(name=member.name, life=member.life)


def _view(member: _Member) -> MemberView:
    return MemberView(
        name=member.name,
        role=member.role,
        phase=member.phase,
        life=member.life,
        node_id=member.node_id,
        num_restarts=member.num_restarts,
        last_loss=None if member.last_loss is None else member.last_loss.text,
    )
