"""Ranks that do not read are cut off, once others wait for blocks because of them.

In:   the open streams of a server, and for how long each has been writing or waiting
Out:  connections that are broken; a rank that lives asks again

A reply is in a stream's hands until the rank reads, and pyarrow has no way to end a call from this side. A
frozen process would hold its block for ever, a dead node until TCP gives up, a quarter of an hour later.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Protocol

    class Stream(Protocol):
        """One rank's stream."""

        @property
        def peer(self) -> str:
            """Address of the rank, as gRPC writes it."""

        @property
        def write_seconds(self) -> float:
            """How long the reply that goes out has been under way; 0 if there is none."""

        @property
        def wait_seconds(self) -> float:
            """How long it has been waiting for the block of its next reply; 0 if it does not."""


__all__ = ["StallWatch", "break_connection"]

_LOG = logging.getLogger("ringfeed.flight")
_STARVED = 0.25
"""Part of the time allowed for a write after which a stream that waits for its block counts as starved."""
_FILES = Path("/proc/self/fd")
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class StallWatch:
    """Looks at the streams of one server, in a thread of its own, until it is closed."""

    def __init__(
        self,
        streams: Callable[[], Iterable[Stream]],
        break_stream: Callable[[Stream], object],
        *,
        stall_seconds: float,
    ) -> None:
        """Begin to look.

        Args:
            streams: gives those that are open now.
            break_stream: breaks the connection of one.
            stall_seconds: for a reply to go out while others wait.
        """
        self._streams = streams
        self._break = break_stream
        self._stall_seconds = stall_seconds
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="ringfeed-stalls", daemon=True).start()

    def close(self) -> None:
        """Look no more; returns at once."""
        self._is_closed.set()

    def _run(self) -> None:
        while not self._is_closed.wait(min(1.0, self._stall_seconds / 8)):
            streams = list(self._streams())
            if any(stream.wait_seconds > self._stall_seconds * _STARVED for stream in streams):
                for stream in streams:
                    if stream.write_seconds > self._stall_seconds:
                        _LOG.warning(
                            "%s has not read a reply for %.0f s and others wait: its connection is broken",
                            stream.peer,
                            stream.write_seconds,
                        )
                        self._break(stream)


def break_connection(peer: str, *, port: int) -> bool:
    """Break the connection of this process's ``port`` to ``peer``; return whether there was one.

    Args:
        peer: as gRPC names it: ``ipv4:10.0.0.1:40000`` or ``ipv6:%5B::1%5D:40000``.
        port: that this process listens on.
    """
    rank = _rank_at(peer)
    for file in _FILES.iterdir():
        # It may be closed at any time.
        with suppress(OSError):
            if str(file.readlink()).startswith("socket:"):
                with _duplicate(int(file.name)) as found:
                    if found.family in _INTERNET and _ends(found) == (port, rank):
                        found.shutdown(socket.SHUT_RDWR)
                        return True
    return False


def _duplicate(number: int) -> socket.socket:
    """Return another file of the same socket: the number may stand for something else in a moment."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _ends(found: socket.socket) -> tuple[int, tuple[str, int]]:
    """Return the port at this end, and address and port of the other."""
    host, port = found.getpeername()[:2]
    return found.getsockname()[1], (_plain(host), port)


def _rank_at(peer: str) -> tuple[str, int] | None:
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """Return an address as text; an IPv4 one that IPv6 wraps is itself."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
