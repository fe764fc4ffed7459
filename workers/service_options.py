"""What a service is told, checked as a whole before anything starts.

In:   flags of ``ringfeed serve``, or keywords of ``ringfeed.workers.serve``
Out:  ``ServiceOptions``, and what becomes of a node's bytes (``NodeBudget``)
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ringfeed.pipeline.environment import available_cpus
from ringfeed.pipeline.feed_facts import DEFAULT_BLOCK_BYTES
from ringfeed.pipeline.manifest import MANIFEST_NAME
from ringfeed.workers.flight_options import ServerOptions

if TYPE_CHECKING:
    from pathlib import Path

    from ringfeed.pipeline.planner.options import PlanOptions
    from ringfeed.workers.plan_opening import PlanChoice

__all__ = [
    "DEFAULT_NAME",
    "DEFAULT_NAMESPACE",
    "DEFAULT_NODE_BYTES",
    "NodeBudget",
    "ServiceOptions",
    "is_wildcard",
]

DEFAULT_NODE_BYTES = 2 << 30
DEFAULT_NAME = "feed"
DEFAULT_NAMESPACE = "ringfeed"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Ray starts no smaller one.
_LEAST_STORE_BYTES = 75 << 20
_LEAST_BLOCKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeBudget:
    """What becomes of the bytes that the service may take on a node."""

    shared_bytes: int
    """A half: files under ``/dev/shm`` of the node's feeder, for ranks on the same machine."""
    keep_bytes: int
    """A quarter, over all builders, as if they were all on one node: what each keeps of built blocks."""
    store_bytes: int
    """A quarter: blocks on their way from builders, in Ray's object store. A local Ray is started with it."""
    most_blocks: int
    """Blocks that a feeder holds at a time: they fill half of ``store_bytes``; gaps and ranks on Ray have the
    other half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceOptions:
    """One service.

    Raises:
        ValueError: if a number is out of range or a name is none.
    """

    views: PlanChoice
    server: ServerOptions = field(default_factory=ServerOptions)
    """Of the directory; feeders take over all but the port."""
    feeder_port: int = 0
    """The same on every node; 0 takes any that is free."""
    builders: int | None = None
    """None: one for each CPU that this process may use."""
    block_bytes: int = DEFAULT_BLOCK_BYTES
    node_bytes: int = DEFAULT_NODE_BYTES
    metrics_port: int = 0
    """Of a Ray that the service starts; 0 takes any that is free."""
    name: str = DEFAULT_NAME
    namespace: str = DEFAULT_NAMESPACE
    plan_from: PlanOptions | None = None
    """What to plan while ranks train; None serves a plan that is there, or that another process makes."""

    def __post_init__(self) -> None:
        for name in ("name", "namespace"):
            value = getattr(self, name)
            if not _NAME.fullmatch(value):
                raise ValueError(
                    f"{name}={value!r}: letters, digits, '_', '.' and '-', at most 64; it is part of a URL"
                )
        if self.plan_from is not None and self.plan_from.output != self.views.plan:
            raise ValueError(
                f"output={str(self.plan_from.output)!r} of the plan to make is not {str(self.views.plan)!r}, "
                "the plan to serve; leave the output out"
            )
        # Before anything of the plan is written.
        if self.plan_from is not None and self.views.skip is not None and not _is_finished(self.views.plan):
            raise ValueError(
                f"skip={str(self.views.skip)!r} with plan_from: each step must keep a supervised token, and "
                f"{self.views.plan} is still to be planned; plan it first, or leave skip out"
            )
        if self.builders is not None and self.builders < 1:
            raise ValueError(f"builders={self.builders} must be at least 1")
        for name in ("feeder_port", "metrics_port"):
            if not 0 <= getattr(self, name) < 1 << 16:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 to 65535")
        if self.feeder_port and self.feeder_port == self.server.port:
            raise ValueError(f"feeder_port={self.feeder_port} is the directory's port; take another one")
        if self.block_bytes < 1:
            raise ValueError(f"block_bytes={self.block_bytes} must be at least 1")
        self.budget(self.block_bytes)

    @property
    def num_builders(self) -> int:
        """Builders in all."""
        return self.builders or available_cpus()

    def budget(self, block_bytes: int) -> NodeBudget:
        """Return how ``node_bytes`` is split.

        Args:
            block_bytes: of the largest block of the run, which may be one micro-batch.

        Raises:
            ValueError: if it is too little for such blocks.
        """
        store = self.node_bytes // 4
        most_blocks = store // 2 // max(1, block_bytes)
        if store < _LEAST_STORE_BYTES or most_blocks < _LEAST_BLOCKS:
            least = 4 * max(_LEAST_STORE_BYTES, 2 * _LEAST_BLOCKS * block_bytes)
            raise ValueError(
                f"node_bytes={self.node_bytes} must be at least {least}: a quarter of it is Ray's object "
                f"store, where blocks of {block_bytes} bytes are on their way"
            )
        return NodeBudget(
            shared_bytes=self.node_bytes // 2,
            keep_bytes=self.node_bytes // 4 // self.num_builders,
            store_bytes=store,
            most_blocks=most_blocks,
        )

    @property
    def directory(self) -> ServerOptions:
        """The directory's server: it gives no blocks."""
        return replace(self.server, shared_bytes=0)

    def feeder(self, *, host: str, public_host: str, shared_bytes: int) -> ServerOptions:
        """Return the server of a feeder that listens on ``host``."""
        return replace(
            self.server,
            host=host,
            public_host=public_host,
            port=self.feeder_port,
            shared_bytes=shared_bytes,
            # Half of what ``BlockGate`` lets through: the other half is for the first block of each stream.
            ready_bytes=self.node_bytes // 16,
            # Each waits for a builder most of the time.
            num_threads=min(32, max(4, 2 * self.num_builders)),
        )


def _is_finished(plan: Path) -> bool:
    return (plan / MANIFEST_NAME).is_file()


def is_wildcard(host: str) -> bool:
    """Return whether a server on ``host`` listens on every address of its machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
