"""One connection to one Flight server: TLS, token, deadlines, and what its errors mean.

In:   a URL, a token and files of certificates
Out:  what a directory says, streams of replies, and ``LinkError``s in one line that say what to do next
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.flight as fl

from ringfeed.pipeline.digest_report import DigestReport
from ringfeed.pipeline.feed_facts import FeedFacts
from ringfeed.pipeline.flight_wire import (
    COMPARE,
    REFUSED,
    Ask,
    DirectoryQuestion,
    Feeder,
    Hello,
    pack_message,
)

if TYPE_CHECKING:
    from ringfeed.pipeline.block_fetcher import TlsFiles

__all__ = ["Credentials", "Failure", "FlightLink", "FlightStream", "LinkError", "flight_location"]

_CALL_SECONDS = 10.0
"""For a directory to answer; blocks have no deadline of gRPC's, they are waited for on an open stream."""
_CONNECTING = re.compile(r"failed to connect to all addresses; last error: \w+: (?:ipv\d:\S+: )?(.*)")
_TLS_WORDS = re.compile(r"handshake|certificate|\bSSL|\bTLS|peer name", re.IGNORECASE)
_SSL_REASON = re.compile(r"SSL routines::(.*)")
# What a rank sees when the other side breaks off a handshake, which does not say why.
_CLOSED = "Socket closed"
_NOISE = re.compile(r"\.? (Detail: |gRPC client debug context|Client context: )")


class Failure(Enum):
    """What to do about an error."""

    REFUSED = "refused"
    """Nothing: what was asked does not fit what is served."""
    TOKEN = "token"  # noqa: S105 - no token
    """Nothing: the token is wrong or missing."""
    TLS = "tls"
    """Hardly anything: a certificate does not fit. A server that dies in the handshake looks alike."""
    UNAVAILABLE = "unavailable"
    """Ask again, or elsewhere."""


class LinkError(Exception):
    """A call failed. ``str`` is one line for a human."""

    def __init__(self, failure: Failure, text: str) -> None:
        """Say what to do about it, and what happened."""
        super().__init__(text)
        self.failure = failure

    @classmethod
    def of(cls, error: Exception, url: str) -> LinkError:
        """Return what an error of pyarrow's means; ``url`` is who was asked."""
        text = _NOISE.split(str(error).splitlines()[0])[0].removesuffix(".")
        if getattr(error, "extra_info", None) == REFUSED:
            return cls(Failure.REFUSED, text)
        if isinstance(error, fl.FlightUnauthenticatedError):
            return cls(
                Failure.TOKEN,
                f"{url} refuses this rank: {text}; pass token=, or set RINGFEED_TOKEN or RINGFEED_TOKEN_FILE",
            )
        connecting = _CONNECTING.search(text)
        reason = connecting[1] if connecting else text or type(error).__name__
        if connecting and (_TLS_WORDS.search(reason) or _CLOSED in reason):
            return cls(Failure.TLS, f"no secure connection to {url}: {_tls_advice(reason)}")
        return cls(Failure.UNAVAILABLE, f"{url}: {reason}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """What a rank shows."""

    token: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a directory says."""

    facts: FeedFacts
    feeders: tuple[Feeder, ...]


def flight_location(url: str, *, is_secure: bool = False) -> str:
    """Return pyarrow's name of ``flight://host:port`` or ``grpc+tls://host:port``.

    Raises:
        ValueError: if the URL has no host or port, or anything beside.
    """
    parts = urlsplit(url)
    schemes = {"flight": "grpc+tcp", "grpc+tcp": "grpc+tcp", "grpc+tls": "grpc+tls"}
    try:
        port = parts.port
    except ValueError:
        port = None
    is_whole = parts.scheme in schemes and parts.hostname and port
    if not is_whole or parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"source={url!r}: need flight://HOST:PORT or grpc+tls://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    return f"{'grpc+tls' if is_secure else schemes[parts.scheme]}://{host}:{port}"


class FlightLink:
    """A connection. Calls from any thread."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        """Connect when the first call needs it.

        Raises:
            ValueError: if the URL is none.
            LinkError: if a certificate cannot be read.
        """
        self.url = url
        location = flight_location(url, is_secure=credentials.tls is not None)
        token = credentials.token
        self._headers = [] if token is None else [(b"authorization", b"Bearer " + token.encode())]
        try:
            self._client = fl.FlightClient(location, **_certificates(credentials.tls))
        except (OSError, pa.ArrowException) as error:
            raise LinkError.of(error, url) from None

    def ask(self, question: DirectoryQuestion) -> Answer:
        """Ask a directory for the facts and the feeders.

        Raises:
            LinkError: if it does not answer, or refuses.
        """
        descriptor = fl.FlightDescriptor.for_command(question.to_json())
        try:
            info = self._client.get_flight_info(descriptor, self._options(timeout=_CALL_SECONDS))
        except (pa.ArrowException, OSError) as error:
            raise LinkError.of(error, self.url) from None
        try:
            return Answer(
                facts=FeedFacts.from_json(info.app_metadata),
                feeders=tuple(feeder for endpoint in info.endpoints for feeder in _feeders(endpoint)),
            )
        except ValueError as error:
            raise LinkError(Failure.REFUSED, f"{self.url}: {error}") from None

    def compare(self, report: DigestReport) -> DigestReport | None:
        """Ask a directory whether another rank said something else.

        Raises:
            LinkError: if it does not answer, or does not compare.
        """
        try:
            action = fl.Action(COMPARE, pa.py_buffer(report.to_json()))
            found = list(self._client.do_action(action, self._options(timeout=_CALL_SECONDS)))
            return DigestReport.from_json(found[0].body.to_pybytes()) if found else None
        except (pa.ArrowException, OSError) as error:
            raise LinkError.of(error, self.url) from None
        except ValueError as error:
            raise LinkError(Failure.REFUSED, f"{self.url}: {error}") from None

    def open(self, hello: Hello) -> FlightStream:
        """Begin a stream of blocks. Whether the feeder takes it shows when the first reply is read.

        Raises:
            LinkError: if it cannot be begun.
        """
        descriptor = fl.FlightDescriptor.for_command(hello.to_json())
        try:
            writer, reader = self._client.do_exchange(descriptor, self._options())
        except (pa.ArrowException, OSError) as error:
            raise LinkError.of(error, self.url) from None
        return FlightStream(self.url, writer, reader)

    def close(self) -> None:
        """End the connection; its streams should have ended."""
        self._client.close()

    def _options(self, *, timeout: float | None = None) -> Any:
        # What gRPC receives lies at any address; kernels and copies want cache lines.
        aligned = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)
        return fl.FlightCallOptions(timeout=timeout, headers=self._headers, read_options=aligned)


class FlightStream:
    """One ``DoExchange``. One thread reads, any may send."""

    def __init__(self, url: str, writer: Any, reader: Any) -> None:
        """Use ``FlightLink.open``."""
        self.url = url
        self._writer = writer
        self._reader = reader

    def send(self, kind: Ask, number: int, body: bytes = b"") -> None:
        """Send one message. An error shows where replies are read, too, so that one place handles it."""
        try:
            self._writer.write_metadata(pa.py_buffer(pack_message(kind, number, body)))
        except (pa.ArrowException, OSError) as error:
            raise LinkError.of(error, self.url) from None

    def receive(self) -> tuple[Any, pa.RecordBatch | None]:
        """Wait for the next message; return its app_metadata (a buffer or None) and its rows.

        Raises:
            LinkError: if the stream breaks, or the feeder ends it.
        """
        try:
            chunk = self._reader.read_chunk()
        except StopIteration:
            raise LinkError(Failure.UNAVAILABLE, f"{self.url} ended the stream") from None
        except (pa.ArrowException, OSError) as error:
            raise LinkError.of(error, self.url) from None
        return chunk.app_metadata, chunk.data

    def cancel(self) -> None:
        """Break the stream, from any thread; ``receive`` fails."""
        self._reader.cancel()

    def finish(self) -> None:
        """Give back what the stream holds, once ``receive`` has failed; errors are told there."""
        for end in (self._reader.cancel, self._writer.close):
            try:
                end()
            except (pa.ArrowException, OSError):
                continue


def _certificates(tls: TlsFiles | None) -> dict[str, Any]:
    if tls is None:
        return {}
    files: dict[str, Any] = {"tls_root_certs": tls.ca.read_bytes()}
    if tls.cert is not None and tls.key is not None:
        files |= {"cert_chain": tls.cert.read_bytes(), "private_key": tls.key.read_bytes()}
    return files


def _feeders(endpoint: Any) -> list[Feeder]:
    """Return the feeder of an endpoint, once for each of its addresses."""
    urls = [location.uri.decode() for location in endpoint.locations]
    return [Feeder.from_json(endpoint.app_metadata, url=url) for url in urls or [None]]


def _tls_advice(reason: str) -> str:
    """Return what is wrong, and what to try, from the reason that gRPC gives."""
    known = _SSL_REASON.search(reason)
    if _CLOSED in reason:
        return (
            "it closes the connection; it may speak TLS (use grpc+tls://), or want a certificate of this "
            "rank that it knows (tls= with cert and key)"
        )
    if "wrong version number" in reason:
        return "it does not speak TLS; use flight:// without tls="
    return f"{known[1] if known else reason}; check the ca of tls= and that the certificate names this host"
