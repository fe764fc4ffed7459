"""The one of a node group that fetches: it puts each block into a file once, for all members to map.

In:   what members ask over a Unix socket (``pipeline/node_wire.py``), a ``BlockFetcher`` of the leader's
Out:  notes of files in a folder of its own under ``/dev/shm`` (``pipeline/shm_slots.py``)

``Shelf`` decides (``pipeline/node_shelf.py``), this carries it out. It lives in the leader's process and goes
on after the leader has closed its loader, until the last member left. A member that dies closes its socket.
"""

from __future__ import annotations

import atexit
import hmac
import logging
import queue
import socket
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ringfeed.pipeline.block_fetcher import FetcherStatus
from ringfeed.pipeline.feed_request import BlockRequest
from ringfeed.pipeline.feed_window import BlockGrid
from ringfeed.pipeline.flight_wire import file_body
from ringfeed.pipeline.node_questions import NodeQuestions
from ringfeed.pipeline.node_shelf import Cancel, Fetch, Free, Serve, Shelf, Want
from ringfeed.pipeline.node_wire import Outbox, Reply, Say, read_message, send_all, status_body, trouble_body
from ringfeed.pipeline.shm_files import BlockFolder
from ringfeed.pipeline.shm_slots import SlotPool, file_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ringfeed.pipeline.block_fetcher import BlockFetcher
    from ringfeed.pipeline.node_shelf import Action
    from ringfeed.pipeline.ranks import RankPlace
    from ringfeed.pipeline.step_block import EncodedBlock

__all__ = ["SOCKET", "HubOptions", "NodeHub"]

SOCKET = "members.sock"
"""In the hub's folder."""
_LOG = logging.getLogger("ringfeed.node")
_TICK_SECONDS = 1.0
_LINGER_SECONDS = 10.0
_Tasks: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubOptions:
    """For whom a hub fetches."""

    place: RankPlace
    """The same for all members."""
    columns: tuple[str, ...]
    """All that some member wants."""
    members: tuple[int, ...]
    """Their ranks, in the order of the group; the first one is the leader."""
    budget: int
    """Bytes of blocks that are in files or under way."""
    patience: float = 10.0
    """Seconds that a member which has nothing waits for those behind it, when the budget is full."""


class NodeHub:
    """Serves the members of one group. ``close`` is the leader's word that it is done itself."""

    def __init__(self, fetcher: BlockFetcher, options: HubOptions) -> None:
        """Make the folder and listen.

        Raises:
            OSError: if there is no memory under ``/dev/shm``.
        """
        self._fetcher = fetcher
        self._options = options
        facts = fetcher.facts()
        self._grid = BlockGrid.of(facts, options.place, options.columns)
        reach = max(2 * self._grid.batches_per_block, options.budget // self._grid.batch_bytes)
        count, patience = len(options.members), options.patience
        self._shelf = Shelf(count, budget=options.budget, reach=reach, patience=patience)
        # A member that has nothing gets a block whatever is there; what nobody uses is trimmed.
        self.folder = BlockFolder(budget=1 << 62)
        self._pool = SlotPool(self.folder)
        self._lock = threading.Lock()
        self._outboxes: dict[int, Outbox] = {}
        self._fetching: dict[int, Future[EncodedBlock]] = {}
        self._is_closing = False
        self._over = threading.Event()
        # No executor: it takes no more work once the process ends, and members may be behind.
        self._to_write: _Tasks = queue.SimpleQueue()
        self._questions = NodeQuestions(fetcher)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.folder.path_of(SOCKET)))
        self._listener.listen(len(options.members))
        for task in (self._accept, self._tick, partial(_run_all, self._to_write)):
            threading.Thread(target=task, name="ringfeed-node", daemon=True).start()
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Go on until all members have left; returns at once."""
        with self._lock:
            self._is_closing = True
            self._end_if_done()

    def abort(self) -> None:
        """End now, whoever is there."""
        with self._lock:
            self._end()

    def _at_exit(self) -> None:
        # After an error nobody should wait for this process; whoever is behind then is not missed.
        has_failed = getattr(sys, "last_type", None) is not None
        self.close()
        if not has_failed:
            self._over.wait(_LINGER_SECONDS)
        self.abort()

    def _end_if_done(self) -> None:
        if self._is_closing and not self._shelf.members:
            self._end()

    def _end(self) -> None:
        if self._over.is_set():
            return
        self._over.set()
        atexit.unregister(self._at_exit)
        # Closing alone would not end a thread that waits for members.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for outbox in self._outboxes.values():
            outbox.put(None)
        self._fetcher.close()
        self._questions.close()
        self._to_write.put(None)
        self._pool.close()
        self.folder.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(end,), name="ringfeed-node", daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        member = None
        outbox: Outbox = queue.SimpleQueue()
        try:
            member = self._greet(end)
            if member is None:
                return
            with self._lock:
                self._outboxes[member] = outbox
            threading.Thread(target=send_all, args=(end, outbox), name="ringfeed-node", daemon=True).start()
            while True:
                self._take(member, *read_message(end))
        except (EOFError, ValueError) as error:
            _LOG.debug("a member has left: %s", error)
        finally:
            if member is not None:
                self._leave(member)
            outbox.put(None)
            end.close()

    def _greet(self, end: socket.socket) -> int | None:
        kind, member, body = read_message(end)
        is_known = kind == Say.HELLO and member < len(self._options.members)
        return member if is_known and hmac.compare_digest(body, self.folder.proof.encode()) else None

    def _leave(self, member: int) -> None:
        with self._lock:
            self._outboxes.pop(member, None)
            if not self._over.is_set():
                self._do(self._shelf.leave(member, time.monotonic()))
                self._end_if_done()

    def _take(self, member: int, kind: int, number: int, body: bytes) -> None:
        if kind in (Say.RUN, Say.COMPARE):
            self._questions.put(kind, body, partial(self._tell_now, member, number))
        elif kind == Say.LET_GO:
            with self._lock:
                self._do(self._shelf.let_go(member, number, time.monotonic()))
        elif kind == Say.ASK:
            request = BlockRequest.from_json(body)
            if request.columns:
                self._ask(member, number, request)
            else:
                self._begin(request).add_done_callback(partial(self._tell_facts, member, number))

    def _ask(self, member: int, number: int, request: BlockRequest) -> None:
        whole = replace(request, columns=self._options.columns)
        want = Want(
            member=member,
            number=number,
            request=whole,
            index=self._grid.index(request.first_step, request.first_micro_batch),
            size=file_bytes(self._grid.bytes_of(whole)),
        )
        with self._lock:
            self._do(self._shelf.ask(want, time.monotonic()))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Serve(member, number, note):
                    self._tell(member, Reply.BLOCK, number, file_body(note))
                case Free(name, is_clean):
                    (self._pool.free if is_clean else self._pool.drop)(name)
                case Cancel(ticket):
                    self._fetching.pop(ticket).cancel()
                case Fetch(ticket, want):
                    self._fetch(ticket, want)
        self._pool.trim(self._options.budget)

    def _fetch(self, ticket: int, want: Want) -> None:
        future = self._fetching[ticket] = self._begin(want.request)
        # Not in the fetcher's thread, which has more to read; nor here, with the lock held.
        future.add_done_callback(partial(self._later, ticket))

    def _begin(self, request: BlockRequest) -> Future[EncodedBlock]:
        try:
            return self._fetcher.fetch(request)
        except Exception as error:
            failed: Future[EncodedBlock] = Future()
            failed.set_exception(error)
            return failed

    def _later(self, ticket: int, done: Future[EncodedBlock]) -> None:
        if not done.cancelled():
            self._to_write.put(partial(self._put, ticket, done))

    def _put(self, ticket: int, done: Future[EncodedBlock]) -> None:
        note, error = None, done.exception()
        try:
            note = None if error else self._pool.write(done.result())
        except Exception as found:
            error = found
        with self._lock:
            self._fetching.pop(ticket, None)
            if note is not None:
                size = self._pool.bytes_of(note)
                self._do(self._shelf.arrived(ticket, note, time.monotonic(), size=size))
                return
            waiting, actions = self._shelf.failed(ticket, time.monotonic())
            body = trouble_body(error or ConnectionError(f"no room under {self.folder.path_of('')}"))
            for member, number in waiting:
                self._tell(member, Reply.ERROR, number, body)
            self._do(actions)

    def _tell_facts(self, member: int, number: int, done: Future[EncodedBlock]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        with self._lock:
            if error is None:
                self._tell(member, Reply.FACTS, number, done.result().header)
            else:
                self._tell(member, Reply.ERROR, number, trouble_body(error))

    def _tell_now(self, member: int, number: int, kind: Reply, body: bytes) -> None:
        with self._lock:
            self._tell(member, kind, number, body)

    def _tell(self, member: int, kind: Reply, number: int, body: bytes) -> None:
        if member in self._outboxes:
            self._outboxes[member].put((kind, number, body))

    def _tick(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            with self._lock:
                if self._over.is_set():
                    return
                self._do(self._shelf.tick(time.monotonic()))
                body = status_body(self._status())
                for member in self._shelf.waiting_members():
                    self._tell(member, Reply.STATUS, 0, body)

    def _status(self) -> FetcherStatus:
        ranks = self._options.members
        behind = self._fetcher.status()
        held = {f"rank {ranks[m]} of the node": size for m, size in self._shelf.bytes_by_member().items()}
        shelf = f"node group's files (budget {self._options.budget:,} B)"
        return FetcherStatus(
            asked=behind.asked,
            bytes_held={shelf: self._shelf.bytes_used(), **held, **behind.bytes_held},
            retries=behind.retries,
        )


def _run_all(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:
            _LOG.exception("a node group's leader failed")
