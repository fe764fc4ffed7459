"""From messages of a feeder to blocks, or to the errors that a future fails with.

In:   app_metadata and rows of one stream (``pipeline/flight_link.py``)
Out:  (number of the request, block or exception), for ``pipeline/flight_client.py``
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ringfeed.pipeline.flight_link import Failure, LinkError
from ringfeed.pipeline.flight_wire import Reply, Trouble, read_error, read_file_body, split_message
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.shm_slots import SlotMaps
from ringfeed.pipeline.step_block import EncodedBlock

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfeed.pipeline.flight_link import FlightStream
    from ringfeed.pipeline.shm_slots import SlotNote

__all__ = ["ReplyReader"]

_NO_ROWS = pa.RecordBatch.from_arrays([], schema=pa.schema([]))


class ReplyReader:
    """Reads the replies of one stream; one thread at a time."""

    def __init__(self, stream: FlightStream, *, folder: str | None, release: Callable[[int], object]) -> None:
        """Read nothing yet.

        Args:
            stream: of the feeder.
            folder: of the feeder under ``/dev/shm``, if this rank can read it.
            release: called, from any thread, with the number of a block whose file is not needed any more.
        """
        self._stream = stream
        self._maps = None if folder is None else SlotMaps(folder)
        self._release = release

    def next(self) -> tuple[int, EncodedBlock | Exception]:
        """Wait for the next reply. What it returns is referred to from nowhere else: memory is budgeted.

        Raises:
            LinkError: if the stream breaks, the feeder leaves or cannot give a block now, or what it sends
                is no reply. All of them mean to ask elsewhere.
        """
        metadata, rows = self._stream.receive()
        kind, number, body = self._split(metadata)
        if kind == Reply.LEAVE:
            raise LinkError(Failure.UNAVAILABLE, f"{self._stream.url} stops")
        if kind == Reply.DROPPED:
            return number, LinkError(Failure.UNAVAILABLE, "dropped")
        return number, self._outcome(kind, number, body, rows)

    def _split(self, metadata: Any) -> tuple[int, int, memoryview]:
        try:
            return split_message(b"" if metadata is None else memoryview(metadata))
        except ValueError as error:
            raise self._no_reply(str(error)) from None

    def _outcome(
        self, kind: int, number: int, body: memoryview, rows: pa.RecordBatch | None
    ) -> EncodedBlock | Exception:
        if kind == Reply.BLOCK and rows is not None:
            return EncodedBlock(header=bytes(body), rows=rows)
        if kind == Reply.FACTS and rows is None:
            return EncodedBlock(header=bytes(body), rows=_NO_ROWS)
        try:
            if kind == Reply.FILE and self._maps is not None:
                return self._map(self._maps, read_file_body(bytes(body)), number)
            if kind != Reply.ERROR:
                raise self._no_reply(f"a message of kind {kind}")
            trouble, text = read_error(bytes(body))
        except ValueError as error:
            raise self._no_reply(str(error)) from None
        if trouble is Trouble.UNAVAILABLE:
            raise LinkError(Failure.UNAVAILABLE, f"{self._stream.url}: {text}")
        return CorruptDataError(text) if trouble is Trouble.DAMAGED else ValueError(text)

    def _map(self, maps: SlotMaps, note: SlotNote, number: int) -> EncodedBlock | Exception:
        try:
            return maps.open(note, on_release=partial(self._release, number))
        except CorruptDataError as error:
            return error

    def _no_reply(self, what: str) -> LinkError:
        return LinkError(Failure.UNAVAILABLE, f"{self._stream.url} sent no reply: {what}")
