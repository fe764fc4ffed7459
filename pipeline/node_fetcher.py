"""A member of a node group: it maps the blocks that one of them fetches for all.

In:   the socket and the folder of a hub (``pipeline/node_hub.py``), requests of one rank
Out:  a ``BlockFetcher`` (``pipeline/block_fetcher.py``) over read-only mapped files

The hub fetches what some member wants; a member that wants less leaves columns out here.
"""

from __future__ import annotations

import queue
import socket
import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ringfeed.pipeline.block_columns import narrow_block
from ringfeed.pipeline.block_fetcher import FetcherStatus
from ringfeed.pipeline.digest_report import DigestReport
from ringfeed.pipeline.feed_facts import FeedFacts
from ringfeed.pipeline.flight_wire import Trouble, read_error, read_file_body
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.node_wire import Outbox, Reply, Say, read_message, read_status, send_all
from ringfeed.pipeline.shm_files import SHARED_MEMORY, sweep
from ringfeed.pipeline.shm_slots import SlotMaps
from ringfeed.pipeline.step_block import EncodedBlock

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfeed.pipeline.feed_request import BlockRequest

__all__ = ["HubAddress", "NodeFetcher"]

_NO_ROWS = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
# Longer than any transport takes to find out that nobody answers.
_ANSWER_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HubAddress:
    """Where a group's hub is, as its leader tells the others."""

    folder: str
    """Under ``/dev/shm``; its socket and files are in it."""
    proof: str
    leader: int
    """Rank of the member that fetches."""
    pid: int
    """Of its process."""


class NodeFetcher:
    """A ``BlockFetcher`` of one member. One thread reads what the hub says, one sends."""

    def __init__(
        self,
        address: HubAddress,
        *,
        member: int,
        socket_name: str,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Connect.

        Args:
            address: of the hub.
            member: which one this is, from 0.
            socket_name: of the hub's socket in its folder.
            on_close: called when this fetcher is closed, by the leader's.

        Raises:
            ConnectionError: if the hub is gone.
        """
        self._address = address
        self._on_close = on_close
        self._lock = threading.Lock()
        self._is_closed = False
        self._gone: str | None = None
        """What happened to the hub."""
        self._next = 0
        self._asked: dict[int, tuple[BlockRequest | None, Future[Any]]] = {}
        """By number; a question for the facts of the run has no request."""
        self._facts: FeedFacts | None = None
        self._status = FetcherStatus(asked="", bytes_held={})
        self._outbox: Outbox = queue.SimpleQueue()
        self._maps = SlotMaps(address.folder)
        self._end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._end.connect(str(SHARED_MEMORY / address.folder / socket_name))
        except OSError as error:
            self._end.close()
            raise ConnectionError(f"{self._who} cannot be reached: {error}") from None
        self._outbox.put((Say.HELLO, member, address.proof.encode()))
        for work in (self._read_all, partial(send_all, self._end, self._outbox)):
            threading.Thread(target=work, name="ringfeed-member", daemon=True).start()

    def facts(self) -> FeedFacts:
        try:
            self._facts = self._answer(Say.RUN, b"")
        except TimeoutError as error:
            # What is known stays right; a rank that waits for more asks again, and tells how long it took.
            if self._facts is None:
                raise ConnectionError(str(error)) from None
        facts: FeedFacts = self._facts
        return facts

    def compare(self, report: DigestReport) -> DigestReport | None:
        try:
            other: DigestReport | None = self._answer(Say.COMPARE, report.to_json())
        except TimeoutError as error:
            raise ConnectionError(str(error)) from None
        return other

    def fetch(self, request: BlockRequest) -> Future[EncodedBlock]:
        future: Future[EncodedBlock] = Future()
        number = self._ask(Say.ASK, request.to_json(), future, request=request)
        future.add_done_callback(lambda done: self._drop(number) if done.cancelled() else None)
        return future

    def status(self) -> FetcherStatus:
        behind = self._status
        asked = f"{self._who}, which asks {behind.asked or 'nobody yet'}"
        return replace(behind, asked=asked)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            asked = list(self._asked.values())
            self._asked.clear()
        self._outbox.put(None)
        for _, future in asked:
            future.cancel()
        if self._on_close is not None:
            self._on_close()

    @property
    def _who(self) -> str:
        return f"rank {self._address.leader} (pid {self._address.pid}), which fetches for this node group"

    def _answer(self, kind: Say, body: bytes) -> Any:
        """Ask something beside blocks, and wait; TimeoutError after a while."""
        future: Future[Any] = Future()
        self._ask(kind, body, future)
        try:
            return future.result(timeout=_ANSWER_SECONDS)
        except FutureTimeoutError:
            raise TimeoutError(f"{self._who} has been silent for {_ANSWER_SECONDS:.0f} s") from None
        except CancelledError:
            raise ConnectionError("closed while it waited for an answer") from None

    def _ask(
        self, kind: Say, body: bytes, future: Future[Any], *, request: BlockRequest | None = None
    ) -> int:
        with self._lock:
            if self._gone is not None:
                raise ConnectionError(self._gone)
            if self._is_closed:
                raise ValueError("the fetcher is closed; open another")
            number, self._next = self._next, self._next + 1
            self._asked[number] = (request, future)
            self._outbox.put((kind, number, body))
        return number

    def _drop(self, number: int) -> None:
        if self._asked.pop(number, None) is not None:
            self._release(number)

    def _release(self, number: int) -> None:
        self._outbox.put((Say.LET_GO, number, b""))

    def _read_all(self) -> None:
        try:
            while True:
                self._take(*read_message(self._end))
        except Exception as error:
            # Whatever it was, nobody reads on: no future may wait for it.
            self._is_over(error)
        finally:
            self._end.close()

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == Reply.STATUS:
            self._status = read_status(body)
            return
        request, future = self._asked.pop(number, (None, None))
        if future is None or not future.set_running_or_notify_cancel():
            # Nobody wants it any more. Whoever cancelled it has said so, or says so now.
            self._release(number)
            return
        try:
            future.set_result(self._outcome(kind, number, body, request))
        except Exception as error:
            future.set_exception(error)

    def _outcome(self, kind: int, number: int, body: bytes, request: BlockRequest | None) -> Any:
        if kind == Reply.RUN:
            return FeedFacts.from_json(body)
        if kind == Reply.COMPARED:
            return DigestReport.from_json(body) if body else None
        if kind == Reply.FACTS:
            return EncodedBlock(header=body, rows=_NO_ROWS)
        if kind == Reply.BLOCK and request is not None and self._facts is not None:
            try:
                block = self._maps.open(read_file_body(body), on_release=partial(self._release, number))
            except CorruptDataError:
                self._release(number)
                raise
            try:
                return narrow_block(block, request, self._facts)
            except CorruptDataError:
                # Told, and asked for again, where blocks are checked.
                return block
        trouble, text = read_error(body)
        if trouble is Trouble.UNAVAILABLE:
            raise ConnectionError(text)
        raise CorruptDataError(text) if trouble is Trouble.DAMAGED else ValueError(text)

    def _is_over(self, error: Exception) -> None:
        with self._lock:
            is_wanted, self._is_closed = not self._is_closed, True
            if is_wanted:
                self._gone = f"{self._who}, is gone ({error}); start the ranks of this node again"
            asked = list(self._asked.values())
            self._asked.clear()
        self._outbox.put(None)
        for _, future in asked:
            if future.set_running_or_notify_cancel():
                future.set_exception(ConnectionError(self._gone))
        if is_wanted:
            # Killed, most likely: what it left is in nobody's use.
            with suppress(OSError):
                sweep()
