"""What members of a node group and the one of them that fetches say to each other, over a Unix socket.

In:   messages of ``pipeline/node_fetcher.py`` and ``pipeline/node_hub.py``
Out:  the same at the other end, whole and in order

    member                        hub
    HELLO member, proof     ->
      ASK number, request   ->    BLOCK | FACTS | ERROR
      LET_GO number         ->    (had or not, the member does not want it any more)
      RUN number            ->    RUN | ERROR
      COMPARE number, json  ->    COMPARED | ERROR
                            <-    STATUS, once a second while the member waits

The socket lies in a folder that no other user can enter, and a hello shows the folder's proof.
"""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from ringfeed.pipeline.block_fetcher import FetcherStatus
from ringfeed.pipeline.flight_wire import Trouble, error_body, pack_message, split_message
from ringfeed.pipeline.manifest import CorruptDataError, canonical_json

if TYPE_CHECKING:
    import queue

__all__ = [
    "Outbox",
    "Reply",
    "Say",
    "read_message",
    "read_status",
    "send_all",
    "send_message",
    "status_body",
    "trouble_body",
]

Outbox: TypeAlias = "queue.SimpleQueue[tuple[IntEnum, int, bytes] | None]"
"""What a thread of its own sends: safe to put into at any moment, also while memory is given back."""
_LENGTH = struct.Struct("<I")
_MOST = 64 << 20


class Say(IntEnum):
    """First byte of what a member sends."""

    HELLO = 1
    ASK = 2
    LET_GO = 3
    RUN = 4
    """Asks what the service serves now."""
    COMPARE = 5
    """JSON of a ``DigestReport``."""


class Reply(IntEnum):
    """First byte of what the hub sends."""

    BLOCK = 1
    """JSON of a ``SlotNote`` in the hub's folder."""
    FACTS = 2
    """The header of a block without columns."""
    RUN = 3
    """JSON of ``FeedFacts``."""
    ERROR = 4
    """As in ``flight_wire.error_body``."""
    STATUS = 5
    """Who is asked for what this member waits for, and who holds what."""
    COMPARED = 6
    """JSON of a ``DigestReport`` that says otherwise; nothing if there is none."""


def send_message(end: socket.socket, kind: IntEnum, number: int, body: bytes = b"") -> None:
    """Send one message; OSError if the other end is gone. One thread at a time."""
    message = pack_message(kind, number, body)
    end.sendall(_LENGTH.pack(len(message)) + message)


def read_message(end: socket.socket) -> tuple[int, int, bytes]:
    """Wait for a message; return first byte, number and body.

    Raises:
        EOFError: if the other end is gone.
        ValueError: if it is no message.
    """
    (length,) = _LENGTH.unpack(_read(end, _LENGTH.size))
    if length > _MOST:
        raise ValueError(f"a message of a node group has {length} bytes; at most {_MOST}")
    kind, number, body = split_message(_read(end, length))
    return kind, number, bytes(body)


def status_body(status: FetcherStatus) -> bytes:
    """Return the body of ``Reply.STATUS``."""
    values = {"asked": status.asked, "bytes_held": dict(status.bytes_held), "retries": status.retries}
    return canonical_json(values).encode()


def read_status(body: bytes) -> FetcherStatus:
    """Read the body of ``Reply.STATUS``."""
    return FetcherStatus(**json.loads(body))


def send_all(end: socket.socket, outbox: Outbox) -> None:
    """Send what is put into ``outbox`` until None is; then tell the other end that this one is done."""
    with suppress(OSError):
        # An error shows where messages are read, too.
        while (message := outbox.get()) is not None:
            send_message(end, *message)
        end.shutdown(socket.SHUT_RDWR)


def trouble_body(error: BaseException) -> bytes:
    """Return the body of ``Reply.ERROR`` that makes a member raise what a fetcher raised."""
    if isinstance(error, CorruptDataError):
        return error_body(Trouble.DAMAGED, str(error))
    kind = Trouble.REFUSED if isinstance(error, ValueError) else Trouble.UNAVAILABLE
    return error_body(kind, str(error) or type(error).__name__)


def _read(end: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        try:
            part = end.recv(min(size, 1 << 20))
        except OSError as error:
            raise EOFError(str(error)) from None
        if not part:
            raise EOFError("the other end is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
