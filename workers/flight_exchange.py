"""One rank's stream at a feeder: requests in, blocks out, in the order asked.

In:   messages of one ``DoExchange`` (``pipeline/flight_wire.py``), blocks of a ``BlockSupply``
Out:  one reply per request; nothing that was not asked for

The handler's own thread reads, a second one writes. Blocks are got ready in the server's few threads while an
earlier one goes out: at most ``blocks_ahead`` of a stream are in memory beside it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as fl

from ringfeed.pipeline.feed_request import BlockRequest
from ringfeed.pipeline.flight_wire import (
    MAX_MESSAGE_BYTES,
    REFUSED,
    Ask,
    Reply,
    Trouble,
    error_body,
    file_body,
    pack_message,
    split_message,
)
from ringfeed.pipeline.manifest import CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ringfeed.pipeline.flight_wire import Hello
    from ringfeed.pipeline.shm_slots import SlotPool
    from ringfeed.pipeline.step_block import EncodedBlock
    from ringfeed.workers.flight_budget import ReadyBudget

__all__ = ["BlockExchange", "ExchangeParts"]

_LOG = logging.getLogger("ringfeed.flight")
_NOTICE_SECONDS = 0.5
_LEAVE = -1
_END = -2


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeParts:
    """What the server gives to a stream."""

    hello: Hello
    schema: pa.Schema
    """Of the rows of all blocks with the columns of ``hello``."""
    get: Callable[[BlockRequest], Future[EncodedBlock]]
    """Begins to get a block."""
    size_of: Callable[[BlockRequest], int]
    """Bytes of a block at most; ValueError if the request does not fit the run."""
    blocks_ahead: int
    budget: ReadyBudget
    """For the blocks that all streams of the server get ready."""
    peer: str
    """Address of the rank, as gRPC writes it."""
    pool: SlotPool | None = None
    """Files for this stream alone, if the rank has shown that it can read them."""


class BlockExchange:
    """Serves one stream until its rank is done, vanishes, or the server stops."""

    def __init__(self, parts: ExchangeParts, reader: Any, writer: Any) -> None:
        """Take both ends of a ``do_exchange`` call."""
        self._parts = parts
        self._reader = reader
        self._writer = writer
        self._room = threading.Semaphore(parts.blocks_ahead + 1)
        self._waiting: queue.SimpleQueue[tuple[int, Future[EncodedBlock] | None, bool]] = queue.SimpleQueue()
        self._dropped: set[int] = set()
        self._files: dict[int, str] = {}
        """Files that the rank has not let go of, by number of their request."""
        self._is_leaving = threading.Event()
        self._is_broken = threading.Event()
        self._has_begun = False
        self._last_asked = -1
        self._last_written = -1
        self._writes_since: float | None = None
        self._waits_since: float | None = None

    @property
    def peer(self) -> str:
        return self._parts.peer

    @property
    def write_seconds(self) -> float:
        return _seconds_since(self._writes_since)

    @property
    def wait_seconds(self) -> float:
        return _seconds_since(self._waits_since)

    def run(self) -> None:
        """Serve; returns when the stream is over.

        Raises:
            FlightServerError: if the rank sends what is no message.
        """
        thread = threading.Thread(target=self._write_all, name="ringfeed-stream", daemon=True)
        thread.start()
        try:
            self._read_all()
        finally:
            self._waiting.put((_END, None, False))
            thread.join()
            self._parts.budget.forget(self)
            if self._parts.pool is not None:
                self._parts.pool.close()

    def leave(self) -> None:
        """Tell the rank to ask elsewhere. Called from any thread; returns at once."""
        self._is_leaving.set()
        self._waiting.put((_LEAVE, None, False))

    def _read_all(self) -> None:
        while True:
            try:
                chunk = self._reader.read_chunk()
            except (StopIteration, pa.ArrowException):
                # The rank is done, or it vanished.
                return
            try:
                self._take(chunk)
            except ValueError as error:
                raise fl.FlightServerError(str(error), REFUSED) from None
            if self._is_broken.is_set():
                return

    def _take(self, chunk: Any) -> None:
        if chunk.data is not None or chunk.app_metadata is None:
            raise ValueError("a rank sends requests, and no data")
        if len(chunk.app_metadata) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has {len(chunk.app_metadata)} bytes; at most {MAX_MESSAGE_BYTES}")
        kind, number, body = split_message(chunk.app_metadata.to_pybytes())
        if kind == Ask.ASK:
            self._ask(number, bytes(body))
        elif kind == Ask.DROP:
            if self._last_written < number <= self._last_asked:
                self._dropped.add(number)
        elif kind == Ask.RELEASE:
            self._release(number)
        else:
            raise ValueError(f"a message of kind {kind} is not known")

    def _ask(self, number: int, body: bytes) -> None:
        if number <= self._last_asked:
            raise ValueError(f"request {number} came after request {self._last_asked}")
        self._last_asked = number
        # Not read on until there is room: requests wait in the connection, blocks never pile up here.
        while not self._room.acquire(timeout=_NOTICE_SECONDS):
            if self._is_broken.is_set():
                return
        is_counted = False
        try:
            request = BlockRequest.from_json(body)
            if request.columns not in ((), self._parts.hello.columns):
                raise ValueError(  # noqa: TRY301 - the answer to all that is wrong with a request is below
                    f"columns={list(request.columns)}: this stream is for {list(self._parts.hello.columns)}"
                )
            if request.columns:
                is_counted = self._enter(self._parts.size_of(request))
            future = self._parts.get(request)
        except ValueError as error:
            future = Future()
            future.set_exception(error)
        self._waiting.put((number, future, is_counted))

    def _enter(self, size: int) -> bool:
        """Wait for room among the blocks of all streams; False if this stream broke meanwhile."""
        while not self._parts.budget.enter(self, size, timeout=_NOTICE_SECONDS):
            if self._is_broken.is_set():
                return False
        return True

    def _write_all(self) -> None:
        try:
            while self._write_next():
                pass
        except pa.ArrowException as error:
            _LOG.debug("a rank vanished: %s", error)
        except Exception:
            _LOG.exception("a stream failed")
        finally:
            self._is_broken.set()

    def _write_next(self) -> bool:
        """Write one reply and let go of it; return whether more may follow."""
        number, future, is_counted = self._waiting.get()
        if number == _END:
            return False
        if self._is_leaving.is_set():
            self._send(Reply.LEAVE, 0)
            return False
        if future is not None:
            self._reply(number, future)
            self._room.release()
            if is_counted:
                self._parts.budget.leave(self)
        return True

    def _reply(self, number: int, future: Future[EncodedBlock]) -> None:
        self._last_written = number
        if number in self._dropped:
            self._dropped.discard(number)
            future.cancel()
            self._send(Reply.DROPPED, number)
            return
        try:
            block = self._result(future)
        except CorruptDataError as error:
            self._send(Reply.ERROR, number, error_body(Trouble.DAMAGED, str(error)))
        except ValueError as error:
            self._send(Reply.ERROR, number, error_body(Trouble.REFUSED, str(error)))
        except Exception as error:
            _LOG.warning("a block could not be had", exc_info=True)
            text = f"{type(error).__name__} behind the feeder"
            self._send(Reply.ERROR, number, error_body(Trouble.UNAVAILABLE, text))
        else:
            self._send_block(number, block)

    def _result(self, future: Future[EncodedBlock]) -> EncodedBlock:
        self._waits_since = time.monotonic()
        try:
            return future.result()
        finally:
            self._waits_since = None

    def _send_block(self, number: int, block: EncodedBlock) -> None:
        if not block.rows.schema.names:
            self._send(Reply.FACTS, number, block.header)
            return
        if (pool := self._parts.pool) is not None and (note := pool.write(block)) is not None:
            self._files[number] = note.name
            self._send(Reply.FILE, number, file_body(note))
            return
        metadata = pa.py_buffer(pack_message(Reply.BLOCK, number, block.header))
        with self._writing():
            if not self._has_begun:
                self._writer.begin(self._parts.schema)
                self._has_begun = True
            self._writer.write_with_metadata(block.rows, metadata)

    def _release(self, number: int) -> None:
        name = self._files.pop(number, None)
        if name is not None and self._parts.pool is not None:
            self._parts.pool.free(name)

    def _send(self, kind: Reply, number: int, body: bytes = b"") -> None:
        with self._writing():
            self._writer.write_metadata(pa.py_buffer(pack_message(kind, number, body)))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._writes_since = time.monotonic()
        try:
            yield
        finally:
            self._writes_since = None


def _seconds_since(moment: float | None) -> float:
    return 0.0 if moment is None else time.monotonic() - moment
