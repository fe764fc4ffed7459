"""A feeder as a Ray actor: a Flight server on one node, over the builders of its service.

In:   the service actor's roster (``workers/service_actor.py``), blocks of builders by the object store
Out:  blocks for ranks, over Flight or from ``/dev/shm`` (``workers/flight_server.py``)

It serves and does nothing else. Its only state is open streams, which ranks open again elsewhere.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringfeed.workers.block_gate import BlockGate
from ringfeed.workers.builder_pool import BuilderPool
from ringfeed.workers.flight_server import FlightServer
from ringfeed.workers.metrics import WorkerMetrics
from ringfeed.workers.ray_builders import RayBuilderCalls, RosterLookup

if TYPE_CHECKING:
    from ringfeed.pipeline.flight_wire import Feeder
    from ringfeed.workers.flight_options import ServerOptions

__all__ = ["FeederActor", "FeederHello", "FeederSettings", "FeederStats"]

_COUNT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FeederSettings:
    """What one feeder is told; picklable."""

    service: str
    """Name of the service actor."""
    namespace: str
    server: ServerOptions
    most_blocks: int
    """Blocks on their way at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeederHello:
    """A feeder that listens."""

    node_id: str
    pid: int
    feeder: Feeder


@dataclass(frozen=True, kw_only=True, slots=True)
class FeederStats:
    """What a feeder does."""

    node_id: str
    pid: int
    num_streams: int
    num_retries: int
    """Times that it had to ask a builder again, or another one."""


class FeederActor:
    """Listens from ``hello`` to ``leave``."""

    def __init__(self, settings: FeederSettings) -> None:
        """Open no port yet: an error here would reach nobody as itself."""
        self._settings = settings
        self._pool: BuilderPool | None = None
        self._server: FlightServer | None = None
        self._gate: BlockGate | None = None
        self._is_leaving = threading.Event()

    def hello(self) -> FeederHello:
        """Listen.

        Raises:
            ValueError: if the port cannot be had.
        """
        settings = self._settings
        self._pool = BuilderPool(
            RosterLookup(settings.service, settings.namespace), RayBuilderCalls(), node_id=_node_id()
        )
        self._gate = BlockGate(self._pool, most_blocks=settings.most_blocks)
        self._server = FlightServer(self._gate, settings.server)
        threading.Thread(target=self._count, name="ringfeed-count", daemon=True).start()
        return FeederHello(node_id=_node_id(), pid=os.getpid(), feeder=self._server.feeder)

    def leave(self) -> None:
        """Tell ranks to ask elsewhere, and stop listening."""
        self._is_leaving.set()
        if self._server is not None:
            self._server.stop(grace_seconds=1.0)
        if self._pool is not None:
            self._pool.close()

    def stats(self) -> FeederStats:
        """Say what it does."""
        return FeederStats(
            node_id=_node_id(),
            pid=os.getpid(),
            num_streams=0 if self._server is None else self._server.num_streams,
            num_retries=0 if self._pool is None else self._pool.num_retries,
        )

    def watch(self) -> None:
        """Never return; see ``BuilderActor.watch``."""
        threading.Event().wait()

    def _count(self) -> None:
        """Show what it does, once a second: nothing is counted while a block goes out."""
        metrics = WorkerMetrics("feeder", service=self._settings.service)
        while not self._is_leaving.wait(_COUNT_SECONDS):
            stats = self.stats()
            given = 0 if self._gate is None else self._gate.bytes_given
            metrics.see(bytes=given, retries=stats.num_retries)
            metrics.set_streams(stats.num_streams)


def _node_id() -> str:
    import ray

    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id
