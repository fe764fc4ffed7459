"""From messages of a feeder to blocks, or to the errors that a future fails with.

In:   app_metadata and rows of one stream (``pipeline/flight_link.py``)
Out:  (number of the request, block or exception), for ``pipeline/flight_client.py``
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ringfeed.pipeline.flight_link import Failure, LinkError
from ringfeed.pipeline.flight_wire import Reply, Trouble, read_error, split_message
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.step_block import EncodedBlock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfeed.pipeline.flight_link import FlightStream

__all__ = ["ReplyReader"]

_NO_ROWS = pa.RecordBatch.from_arrays([], schema=pa.schema([]))


class ReplyReader:
    """Iterates over the replies of one stream until the feeder ends it.

    ``next`` raises LinkError when the stream breaks, the feeder leaves or cannot give a block now, or what
    it sends is no reply: all of them mean to ask elsewhere.
    """

    def __init__(self, stream: FlightStream) -> None:
        """Read nothing yet."""
        self._stream = stream

    def __iter__(self) -> Iterator[tuple[int, EncodedBlock | Exception]]:
        for metadata, rows in self._stream.replies():
            kind, number, body = self._split(metadata)
            if kind == Reply.LEAVE:
                raise LinkError(Failure.UNAVAILABLE, f"{self._stream.url} stops")
            if kind != Reply.DROPPED:
                yield number, self._outcome(kind, body, rows)
            else:
                yield number, LinkError(Failure.UNAVAILABLE, "dropped")
        raise LinkError(Failure.UNAVAILABLE, f"{self._stream.url} ended the stream")

    def _split(self, metadata: Any) -> tuple[int, int, memoryview]:
        try:
            return split_message(memoryview(metadata))
        except ValueError as error:
            raise self._no_reply(str(error)) from None

    def _outcome(self, kind: int, body: memoryview, rows: pa.RecordBatch | None) -> EncodedBlock | Exception:
        if kind == Reply.BLOCK and rows is not None:
            return EncodedBlock(header=bytes(body), rows=rows)
        if kind == Reply.FACTS and rows is None:
            return EncodedBlock(header=bytes(body), rows=_NO_ROWS)
        if kind != Reply.ERROR:
            raise self._no_reply(f"a message of kind {kind}")
        try:
            trouble, text = read_error(bytes(body))
        except ValueError as error:
            raise self._no_reply(str(error)) from None
        if trouble is Trouble.UNAVAILABLE:
            raise LinkError(Failure.UNAVAILABLE, f"{self._stream.url}: {text}")
        return CorruptDataError(text) if trouble is Trouble.DAMAGED else ValueError(text)

    def _no_reply(self, what: str) -> LinkError:
        return LinkError(Failure.UNAVAILABLE, f"{self._stream.url} sent no reply: {what}")
