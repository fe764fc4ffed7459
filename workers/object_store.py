"""Fetch blocks through Ray's object store: for ranks that are Ray actors, or drivers beside a raylet.

In:   ``ray-actor://namespace/name`` of a service actor, and requests of one rank
Out:  a ``BlockFetcher`` (``pipeline/block_fetcher.py``)

The service actor names the builders, and the rank asks them itself, by the choice that its cp peers make.
A block lies in the object store, which a builder wrote and this process maps: nothing is copied until the
loader copies it into tensors of its own. The mapping is writable, so no array over it may reach a user.
"""

from __future__ import annotations

import queue
import re
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ringfeed.pipeline.block_fetcher import FetcherStatus
from ringfeed.pipeline.digest_report import DigestReport
from ringfeed.workers.builder_pool import BuilderPool
from ringfeed.workers.ray_session import join_ray

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfeed.pipeline.block_fetcher import FeedQuestion
    from ringfeed.pipeline.feed_facts import FeedFacts
    from ringfeed.pipeline.feed_request import BlockRequest
    from ringfeed.pipeline.step_block import EncodedBlock

__all__ = ["ObjectStoreFetcher", "open_fetcher", "split_url"]

_URL = re.compile(r"ray-actor://([\w.-]+)/([\w.-]+)/?", re.IGNORECASE)
# Blocks that one rank has builders make at a time. More would queue at them, before other ranks' blocks.
_NUM_THREADS = 4


def open_fetcher(url: str, question: FeedQuestion) -> ObjectStoreFetcher:
    """Find the service at ``url`` on the Ray that this process is connected to, or else can join.

    Raises:
        ValueError: if the URL is not understood, or token or certificates were given.
        ConnectionError: if no Ray can be joined, or no such service answers on it.
    """
    namespace, name = split_url(url)
    if question.token is not None or question.tls is not None:
        raise ValueError(
            f"token= and tls= are for flight:// and grpc+tls://, the source is {url!r}: Ray has a token of "
            "its own (RAY_AUTH_MODE); leave them out"
        )
    join_ray()
    import ray

    from ringfeed.workers.ray_builders import RayBuilderCalls, RosterLookup

    node_id = ray.get_runtime_context().get_node_id()
    lookup = RosterLookup(name, namespace)
    pool = BuilderPool(lookup, RayBuilderCalls(), node_id=node_id)
    pool.facts()
    return ObjectStoreFetcher(pool, compare=lambda report: lookup.ask("compare", report))


def split_url(url: str) -> tuple[str, str]:
    """Return namespace and name of a service actor.

    Raises:
        ValueError: if the URL has another form.
    """
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError(f"source={url!r} is no ray-actor://NAMESPACE/NAME; `ringfeed serve` prints its own")
    return found[1], found[2]


class ObjectStoreFetcher:
    """A ``BlockFetcher`` over a pool of builders. Requests begin in the order in which they were made."""

    def __init__(
        self,
        pool: BuilderPool,
        *,
        compare: Callable[[bytes], bytes | None] | None = None,
        num_threads: int = _NUM_THREADS,
    ) -> None:
        """Start no thread yet.

        Args:
            pool: whom to ask; closed with the fetcher.
            compare: where ranks compare digests (``ServiceActor.compare``).
            num_threads: blocks that are asked for at a time.
        """
        self._pool = pool
        self._compare = compare
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[BlockRequest, Future[EncodedBlock]] | None] = (
            queue.SimpleQueue()
        )
        self._asked: set[Future[EncodedBlock]] = set()
        """What has not come."""
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def facts(self) -> FeedFacts:
        return self._pool.facts()

    def fetch(self, request: BlockRequest) -> Future[EncodedBlock]:
        future: Future[EncodedBlock] = Future()
        with self._lock:
            if self._is_closed:
                raise ValueError("the fetcher is closed; open another")
            self._asked.add(future)
            if len(self._threads) < min(self._num_threads, len(self._asked)):
                self._threads.append(self._start())
        future.add_done_callback(self._forget)
        self._waiting.put((request, future))
        return future

    def compare(self, report: DigestReport) -> DigestReport | None:
        if self._compare is None:
            raise ValueError("there is no service to compare with")
        other = self._compare(report.to_json())
        return None if other is None else DigestReport.from_json(other)

    def status(self) -> FetcherStatus:
        asked = f"{self._pool.status()}, {len(self._asked)} blocks asked for"
        return FetcherStatus(asked=asked, bytes_held={}, retries=self._pool.num_retries)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            asked, threads = list(self._asked), self._threads
            self._threads = []
        self._pool.close()
        for future in asked:
            future.cancel()
        for _ in threads:
            self._waiting.put(None)

    def _start(self) -> threading.Thread:
        # A daemon: a program that ends does not wait for builders.
        thread = threading.Thread(target=self._run, name="ringfeed-object-store", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            self._answer(*entry)
            # Else the last block would stay in the object store until the next one is asked for.
            del entry

    def _answer(self, request: BlockRequest, future: Future[EncodedBlock]) -> None:
        if future.cancelled():
            return
        try:
            block = self._pool.block(request)
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            # Cancelled meanwhile: nobody wants it.
            if future.set_running_or_notify_cancel():
                future.set_result(block)

    def _forget(self, future: Future[EncodedBlock]) -> None:
        with self._lock:
            self._asked.discard(future)
