"""A service in this process: Ray, its actors, and the directory that ranks are told of.

In:   ``ServiceOptions`` (``workers/service_options.py``)
Out:  a ``Service`` that gives blocks until it is stopped; ``ringfeed serve`` waits for it

    this process      directory (``flight_server.py``) and supervisor (``service_loop.py``)
    on Ray            service actor, builders, a feeder on each node that has builders

This process holds nothing that a restart would lose. When it dies its actors die with it, and ranks wait
until another one listens where it did.
"""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.feed_facts import FeedFacts
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.pipeline.shm_files import sweep
from ringfeed.workers.builder_actor import BuilderSettings
from ringfeed.workers.environment import WORKER_THREADS
from ringfeed.workers.flight_server import FlightServer
from ringfeed.workers.plan_opening import open_checked
from ringfeed.workers.planner_actor import open_session
from ringfeed.workers.ray_session import ray_session
from ringfeed.workers.service_directory import DirectorySupply
from ringfeed.workers.service_options import is_wildcard
from ringfeed.workers.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from ringfeed.pipeline.planner.options import PlanOptions
    from ringfeed.pipeline.progress import Progress
    from ringfeed.workers.block_builder import PlanOpener
    from ringfeed.workers.members import MemberView
    from ringfeed.workers.ray_session import RaySession
    from ringfeed.workers.service_loop import ServiceLoop
    from ringfeed.workers.service_options import NodeBudget, ServiceOptions

__all__ = ["MemberStatus", "Service", "ServiceStatus"]

_TOKEN_BYTES = 8
_NOTICE_SECONDS = 0.1


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """One actor of a service."""

    name: str
    role: str
    phase: str
    life: int
    """Rises with every start of any member; -1 before its first."""
    pid: int | None
    """Of its process on its node, once it is ready."""
    node_id: str | None
    num_restarts: int
    last_loss: str | None
    """Why it was lost the last time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceStatus:
    """A service, for whoever looks."""

    url: str
    ray_url: str
    members: tuple[MemberStatus, ...]
    num_restarts: dict[str, int]
    """By role, over the life of the service."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return asdict(self)


class Service:
    """Gives blocks from ``start`` to ``stop``; ``with`` stops it."""

    def __init__(self, options: ServiceOptions) -> None:
        """Use ``Service.start``."""
        self._options = options
        self._end = ExitStack()
        self._loop: ServiceLoop | None = None
        self._directory: FlightServer | None = None
        self._num_planners = 0
        self._stopping = threading.Lock()
        self.ray_address = ""
        """What ``RAY_ADDRESS`` must be for ranks that load from ``ray_url``."""

    @classmethod
    def start(
        cls,
        options: ServiceOptions,
        *,
        progress: Progress | None = None,
        is_unwanted: threading.Event | None = None,
        on_connected: Callable[[], object] = _nothing,
    ) -> Self:
        """Start everything, and return once ranks are served.

        Args:
            options: what to serve, to whom.
            progress: is told who comes and goes.
            is_unwanted: ends the start when it is set, from a signal or another thread.
            on_connected: called once Ray is connected: it takes signals for itself then.

        Raises:
            ValueError: if plan, layout, sizes or skip list do not fit, or a port or name is taken.
            CorruptDataError: if plan or corpora are damaged.
            JobFailedError: if Ray cannot be had, or its workers die again and again.
            InterruptedError: if it was unwanted before it was ready.
        """
        service = cls(options)
        try:
            tell = (progress or SilentProgress()).log
            service._start(tell, is_unwanted or threading.Event(), on_connected)
        except BaseException:
            service.stop()
            raise
        return service

    @property
    def url(self) -> str:
        """What a ``Loader`` takes as its source."""
        return "" if self._directory is None else self._directory.url

    @property
    def ray_url(self) -> str:
        """The same for ranks on Ray."""
        return f"ray-actor://{self._options.namespace}/{self._options.name}"

    def status(self) -> ServiceStatus:
        """Say who is there."""
        seen = None if self._loop is None else self._loop.status
        return ServiceStatus(
            url=self.url,
            ray_url=self.ray_url,
            members=() if seen is None else tuple(_status(member, pid) for member, pid in seen.members),
            num_restarts={} if seen is None else dict(seen.num_restarts),
        )

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the service has ended by itself; return whether it has.

        Raises:
            Exception: why it has: see ``start``.
        """
        loop = self._loop
        if loop is None or not loop.has_ended.wait(seconds):
            return loop is None
        if loop.error is not None:
            raise loop.error
        return True

    def stop(self) -> None:
        """Tell ranks to wait, and end everything; a second call does nothing."""
        with self._stopping:
            self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(
        self,
        tell: Callable[[str], object],
        is_unwanted: threading.Event,
        on_connected: Callable[[], object],
    ) -> None:
        options = self._options
        self._num_planners = _announce(options.plan_from)
        opener = open_checked(options.views)
        facts = _facts_of(opener, options.block_bytes)
        budget = options.budget(max(options.block_bytes, facts.local_tokens * _TOKEN_BYTES))
        # The port before anything that takes time.
        directory = self._listen(facts)
        _check_wanted(is_unwanted)
        cpus, store = options.num_builders + self._num_planners, budget.store_bytes
        session = self._end.enter_context(
            ray_session(num_cpus=cpus, object_store_bytes=store, metrics_port=options.metrics_port)
        )
        on_connected()
        tell(f"serve: {options.num_builders} builders on Ray ({session.address})")
        self._loop = loop = self._make_loop(opener, facts, budget, session, tell)
        directory.follow(loop, options)
        self._end.callback(loop.stop)
        loop.start()
        while not loop.is_up.wait(_NOTICE_SECONDS):
            self.wait(0)
            _check_wanted(is_unwanted)

    def _listen(self, facts: FeedFacts) -> DirectorySupply:
        """Serve a directory, which has nobody in it yet."""
        directory = DirectorySupply(facts)
        server = self._options.directory
        if is_wildcard(server.host) and server.public_host is None:
            server = replace(server, public_host=socket.getfqdn())
        self._directory = FlightServer(
            directory, server, feeders=lambda: directory.roster().feeders, compare=directory.compare
        )
        self._end.enter_context(self._directory)
        self._end.callback(_sweep_shared_memory)
        return directory

    def _make_loop(
        self,
        opener: PlanOpener,
        facts: FeedFacts,
        budget: NodeBudget,
        session: RaySession,
        tell: Callable[[str], object],
    ) -> ServiceLoop:
        """Say who is to be there; nobody is started yet."""
        # Imports ray, whose settings the session has just made.
        from ringfeed.workers.service_crew import Crew, connected_address
        from ringfeed.workers.service_loop import ServiceLoop

        options = self._options
        settings = BuilderSettings(
            open_source=opener,
            block_bytes=options.block_bytes,
            keep_bytes=budget.keep_bytes,
            service=options.name,
        )
        crew = Crew(options, settings, budget, variables={} if session.address == "local" else WORKER_THREADS)
        self.ray_address = connected_address()
        supervisor = Supervisor(
            num_builders=options.num_builders,
            num_planners=self._num_planners,
            feeder_node=crew.feeder_node,
        )
        return ServiceLoop(supervisor, crew, facts, tell=tell)


def _announce(plan_from: PlanOptions | None) -> int:
    """Begin a plan, so that it can be opened; return how many planners have something to do."""
    if plan_from is None:
        return 0
    with open_session(plan_from) as session:
        return int(session.manifest is None)


def _facts_of(opener: PlanOpener, block_bytes: int) -> FeedFacts:
    source = opener()
    try:
        return FeedFacts.of_source(source, block_bytes=block_bytes)
    finally:
        source.close()


def _check_wanted(is_unwanted: threading.Event) -> None:
    if is_unwanted.is_set():
        raise InterruptedError("stopped before it was ready")


def _sweep_shared_memory() -> None:
    """Remove files of feeders that had no time to do it."""
    with suppress(OSError):
        sweep()


def _status(member: MemberView, pid: int | None) -> MemberStatus:
    return MemberStatus(
        name=member.name,
        role=str(member.role),
        phase=str(member.phase),
        life=member.life,
        pid=pid,
        node_id=member.node_id,
        num_restarts=member.num_restarts,
        last_loss=member.last_loss,
    )
