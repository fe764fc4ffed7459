"""The Ray side of a service's members: make an actor, end it, ask it, and say what an error of it means.

In:   ``Start`` of a supervisor (``workers/supervisor.py``)
Out:  ``Life``: an actor, its hello and its watch, which ends only with it (``workers/service_loop.py``)
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ringfeed.pipeline.executor import JobFailedError
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.workers.builder_actor import BuilderActor, BuilderSettings
from ringfeed.workers.feeder_actor import FeederActor, FeederSettings
from ringfeed.workers.flight_options import is_loopback
from ringfeed.workers.members import Loss, LossKind, Role
from ringfeed.workers.metrics import WorkerMetrics
from ringfeed.workers.planner_actor import PlannerActor
from ringfeed.workers.service_actor import ServiceActor
from ringfeed.workers.service_options import is_wildcard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfeed.workers.members import Start
    from ringfeed.workers.roster import Roster
    from ringfeed.workers.service_options import NodeBudget, ServiceOptions

__all__ = ["Crew", "Life", "connected_address", "loss_of"]

_WATCH = {"watch": 1}
_MOST_TEXT = 400
_HEAD_SECONDS = 5.0
# In a row, a second apart: a loaded machine may miss one.
_MISSES = 3
_WAY_OUT = "; start the service again, its ranks wait for it"


@dataclass(slots=True)
class Life:
    """One actor, from its start to its end."""

    start: Start
    actor: Any
    hello: Any
    """Reference to what it says once it is ready."""
    watch: Any
    """Reference to what never comes: an error as soon as the actor is dead."""
    said: Any = None
    """Its hello, such as ``BuilderHello``, once it is ready."""
    loss: Loss | None = field(default=None)
    """Why it is being ended."""


class Crew:
    """Makes the actors of one service. Used by one thread."""

    def __init__(
        self,
        options: ServiceOptions,
        builder: BuilderSettings,
        budget: NodeBudget,
        *,
        variables: Mapping[str, str],
    ) -> None:
        """Start nothing yet; Ray must be connected.

        Args:
            options: of the service.
            builder: what every builder is told.
            budget: of a node.
            variables: environment of builders, where this process did not start their Ray.
        """
        self._variables = dict(variables)
        self._options = options
        self._builder = builder
        self._budget = budget
        self.node_id: str = ray.get_runtime_context().get_node_id()
        """Of this process."""
        self.metrics = WorkerMetrics("supervisor", service=options.name)
        self._addresses: dict[str, str] = {}
        self._misses = 0

    @property
    def feeder_node(self) -> str | None:
        """The only node that may have a feeder: what listens on loopback serves its own machine alone."""
        return self.node_id if is_loopback(self._options.server.host) else None

    def nodes(self) -> frozenset[str] | None:
        """Return the nodes that live now, None if Ray's head did not answer this once.

        Raises:
            JobFailedError: if this process can do nothing with its Ray any more. Ray itself would wait for a
                minute, and then end the process without a word to anybody.
        """
        host, _, port = connected_address().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_HEAD_SECONDS).close()
        except OSError as error:
            self._misses += 1
            if self._misses < _MISSES:
                return None
            raise JobFailedError(f"Ray's head at {host}:{port} does not answer: {error}{_WAY_OUT}") from None
        self._misses = 0
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        self._addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        if self.node_id not in self._addresses:
            raise JobFailedError(f"the Ray node of this process is dead{_WAY_OUT}")
        return frozenset(self._addresses)

    def make(self, start: Start) -> Life:
        """Begin to start a member.

        Raises:
            ValueError: if another service has this one's name.
        """
        if start.role is Role.SERVICE:
            actor = self._make_service()
        elif start.role is Role.BUILDER:
            actor = self._make_builder()
        elif start.role is Role.PLANNER:
            actor = _remote(PlannerActor, self._options.plan_from, num_cpus=1)
        else:
            actor = self._make_feeder(str(start.node_id))
        watch = actor.watch.options(concurrency_group="watch").remote()
        return Life(start=start, actor=actor, hello=actor.hello.remote(), watch=watch)

    def end(self, life: Life) -> None:
        """Kill a member, unless it is dead; ``life.watch`` tells when it is."""
        ray.kill(life.actor, no_restart=True)

    def tell(self, life: Life, roster: Roster) -> Any:
        """Give the service actor a roster; return the reference to its answer."""
        return life.actor.set_roster.remote(roster)

    def _make_service(self) -> Any:
        name, namespace = self._options.name, self._options.namespace
        near = NodeAffinitySchedulingStrategy(self.node_id, soft=True)
        try:
            return _remote(ServiceActor, num_cpus=0, name=name, namespace=namespace, scheduling_strategy=near)
        except ValueError as error:
            if "already taken" not in str(error):
                raise
            raise ValueError(
                f"name={name!r}: a service of this name runs in namespace {namespace!r} of this Ray; stop "
                "it, or take another --name"
            ) from None

    def _make_builder(self) -> Any:
        more: dict[str, Any] = {"runtime_env": {"env_vars": self._variables}} if self._variables else {}
        return _remote(BuilderActor, self._builder, num_cpus=1, scheduling_strategy="SPREAD", **more)

    def _make_feeder(self, node_id: str) -> Any:
        host = self._options.server.host
        address = self._addresses.get(node_id, host)
        if is_wildcard(host):
            public_host = self._options.server.public_host if node_id == self.node_id else None
            public_host = public_host or address
        elif node_id == self.node_id:
            public_host = self._options.server.public_host or host
        else:
            host = public_host = address
        settings = FeederSettings(
            service=self._options.name,
            namespace=self._options.namespace,
            server=self._options.feeder(
                host=host, public_host=public_host, shared_bytes=self._budget.shared_bytes
            ),
            most_blocks=self._budget.most_blocks,
        )
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return _remote(FeederActor, settings, num_cpus=0, scheduling_strategy=here)


def _remote(kind: type, *arguments: Any, **options: Any) -> Any:
    # Ray's overloads know no options that are put together.
    remote: Any = ray.remote
    return remote(max_restarts=0, concurrency_groups=_WATCH, **options)(kind).remote(*arguments)


def connected_address() -> str:
    """Return the address of the Ray that this process is connected to."""
    address: str = ray.get_runtime_context().gcs_address
    return address


def loss_of(error: Exception) -> Loss:
    """Return what an error of an actor, or of starting it, means."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    kind = LossKind.DIED
    if isinstance(cause, CorruptDataError):
        kind = LossKind.DAMAGED
    elif isinstance(cause, ValueError):
        kind = LossKind.MISTAKE
    text = " ".join(str(cause).split())[:_MOST_TEXT]
    return Loss(kind=kind, text=text or type(cause).__name__)
