"""A builder as a Ray actor: a shell around ``BlockBuilder``, with JSON in and Arrow out.

In:   requests as JSON (``workers/ray_builders.py``)
Out:  record batches that Ray carries without a copy on one node; ``BuilderHello`` when it can build

Its only state is a cache. Ray never restarts it: the supervisor makes another one.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringfeed.pipeline.feed_request import BlockRequest
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.workers.block_builder import BlockBuilder
from ringfeed.workers.metrics import WorkerMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from ringfeed.pipeline.feed_facts import FeedFacts
    from ringfeed.pipeline.view_source import ViewSource

__all__ = ["BuilderActor", "BuilderHello", "BuilderSettings", "BuilderStats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuilderSettings:
    """What all builders of a service have in common; picklable."""

    open_source: Callable[[], ViewSource]
    block_bytes: int
    """Part of the run's fingerprint: the same for all."""
    keep_bytes: int
    service: str = ""
    """Its name, for metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuilderHello:
    """A builder that is ready."""

    node_id: str
    pid: int
    facts_json: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BuilderStats:
    """What a builder has done."""

    node_id: str
    pid: int
    num_builds: int
    bytes_kept: int
    highest_step: int
    """Of all that was asked for; -1 before the first request."""


class BuilderActor:
    """Builds blocks, one at a time."""

    def __init__(self, settings: BuilderSettings) -> None:
        """Open nothing yet: an error here would reach nobody as itself."""
        self._settings = settings
        self._builder: BlockBuilder | None = None
        self._metrics = WorkerMetrics("builder", service=settings.service)
        self._highest_step = -1
        _use_one_thread()

    def hello(self) -> BuilderHello:
        """Open plan and corpora, and build once.

        Raises:
            ValueError: if they are not there, or not what was planned.
            CorruptDataError: if they are damaged.
        """
        builder = self._open()
        facts = builder.facts()
        if facts.num_steps:
            # Compiled code is loaded before anybody waits for a block.
            builder.build(_first_request(facts))
        return BuilderHello(node_id=_node_id(), pid=os.getpid(), facts_json=facts.to_json())

    def facts(self) -> bytes:
        """Return ``FeedFacts`` as JSON."""
        return self._open().facts().to_json()

    def block(self, request_json: bytes) -> pa.RecordBatch:
        """Return the block that a ``BlockRequest`` asks for, as one batch.

        Raises:
            ValueError: if the request does not fit the run.
            CorruptDataError: if the data behind the block is damaged.
        """
        request = BlockRequest.from_json(request_json)
        builder = self._open()
        block = builder.block(request)
        self._metrics.see(builds=builder.num_builds, tokens=builder.tokens_built, bytes=builder.bytes_built)
        self._highest_step = max(self._highest_step, request.first_step)
        return block.to_batch()

    def stats(self) -> BuilderStats:
        """Say what was done so far."""
        builder = self._open()
        return BuilderStats(
            node_id=_node_id(),
            pid=os.getpid(),
            num_builds=builder.num_builds,
            bytes_kept=builder.bytes_kept,
            highest_step=self._highest_step,
        )

    def watch(self) -> None:
        """Never return: whoever waits for this learns at once that the process has died."""
        threading.Event().wait()

    def _open(self) -> BlockBuilder:
        if self._builder is None:
            settings = self._settings
            self._builder = BlockBuilder(
                settings.open_source, block_bytes=settings.block_bytes, keep_bytes=settings.keep_bytes
            )
        return self._builder


def _first_request(facts: FeedFacts) -> BlockRequest:
    """Return a request for as little as possible."""
    place = RankPlace(dp_rank=0, dp_size=facts.packs_per_step, cp_rank=0, cp_size=facts.spec.cp_size)
    return BlockRequest(place=place, first_step=0, first_micro_batch=0, num_micro_batches=1)


def _use_one_thread() -> None:
    # One builder a CPU is enough; Arrow would start a thread for each of them again.
    import pyarrow as pa

    pa.set_cpu_count(1)


def _node_id() -> str:
    import ray

    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id
