"""Where a Flight server listens, who may talk to it, and how much.

In:   flags or keywords of whoever starts a server
Out:  ``ServerOptions``, checked as a whole before a port is opened (``workers/flight_server.py``)
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - a dataclass field

from ringfeed.pipeline.feed_token import check_token

__all__ = [
    "DEFAULT_MAX_STREAMS",
    "DEFAULT_READY_BYTES",
    "DEFAULT_SHARED_BYTES",
    "Exposure",
    "ServerOptions",
    "ServerTls",
    "is_loopback",
]

DEFAULT_MAX_STREAMS = 256
"""A stream is a rank: two nodes of 8 GPUs with 16 ranks each stay far below; it costs two threads."""

DEFAULT_READY_BYTES = 512 << 20
"""Enough for blocks ahead of 32 streams; others get theirs one by one."""

DEFAULT_SHARED_BYTES = 1 << 30
"""It counts as memory of the container; what does not fit is sent."""


class Exposure(StrEnum):
    """Who may reach a server that has no token."""

    LOOPBACK = "loopback"
    """Only this machine: any other address needs a token."""
    OPEN = "open"
    """Whoever reaches the port. The network has to keep out who is not meant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerTls:
    """PEM files of an encrypted server.

    Raises:
        ValueError: if a file is missing.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None
    """Whose signature a rank's certificate must bear (mTLS). None: ranks need no certificate."""

    def __post_init__(self) -> None:
        for name in ("cert", "key", "client_ca"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"tls: {name}={str(path)!r} is not a file")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """How one server runs.

    Raises:
        ValueError: if a number is out of range, the token is none, or an address that others can reach has
            no token and ``exposure`` does not say that it needs none.
    """

    host: str = "127.0.0.1"
    """Name or address to listen on."""
    port: int = 0
    """0 takes any that is free."""
    public_host: str | None = None
    """Where ranks find it, if not at ``host``: that may stand for every address of the machine."""
    token: str | None = field(default=None, repr=False)
    """Bearer token that every call must bear (``feed_token.find_token``)."""
    tls: ServerTls | None = None
    exposure: Exposure = Exposure.LOOPBACK
    max_streams: int = DEFAULT_MAX_STREAMS
    """Ranks that are served at once; one more is sent elsewhere."""
    num_threads: int = 4
    """Requests that the supply is asked at once."""
    blocks_ahead: int = 2
    """Blocks of one stream that are got ready before the one that goes out is through."""
    ready_bytes: int = DEFAULT_READY_BYTES
    """For blocks that are got ready, over all streams, beside one that each may always have."""
    stall_seconds: float = 60.0
    """For a reply to go out while another rank waits for its block; then the connection is broken."""

    shared_bytes: int = DEFAULT_SHARED_BYTES
    """For files under ``/dev/shm``, for ranks on this machine; 0 sends them everything."""

    def __post_init__(self) -> None:
        for name in ("shared_bytes", "ready_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if not self.stall_seconds > 0:
            raise ValueError(f"stall_seconds={self.stall_seconds} must be above 0")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port={self.port} must be 0 to 65535")
        for name in ("max_streams", "num_threads", "blocks_ahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.token is not None:
            check_token(self.token, "token")
        elif self.exposure is Exposure.LOOPBACK and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host!r} can be reached from other machines and there is no token: give one "
                "(--token-file, RINGFEED_TOKEN_FILE or RINGFEED_TOKEN), listen on 127.0.0.1, or say that "
                "anyone may read the data (--open, exposure=open)"
            )


def is_loopback(host: str) -> bool:
    """Return whether a server on ``host`` can be reached from its own machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
