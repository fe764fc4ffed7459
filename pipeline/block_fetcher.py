"""The seams of the service: who gives blocks, who fetches them, and how a URL becomes a fetcher.

In:   ``BlockRequest``s (``pipeline/feed_request.py``)
Out:  ``EncodedBlock``s (``pipeline/step_block.py``)

    builder or feeder          transport                 trainer rank
    BlockSupply      ->   server ... BlockFetcher   ->   FeedSource (``pipeline/feed_source.py``)

A block is a pure function of its request, so anyone may be asked for anything, as often as needed. The rank
owns the cursor: a supply and a fetcher keep nothing that a restart would lose.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from ringfeed.pipeline.digest_report import DigestReport
    from ringfeed.pipeline.feed_facts import FeedFacts
    from ringfeed.pipeline.feed_request import BlockRequest
    from ringfeed.pipeline.ranks import RankPlace
    from ringfeed.pipeline.step_block import EncodedBlock

__all__ = [
    "BlockFetcher",
    "BlockSupply",
    "DigestComparer",
    "FeedQuestion",
    "FetcherStatus",
    "OpenFetcher",
    "TlsFiles",
]


class BlockSupply(Protocol):
    """Gives blocks in this process: what a server puts on the wire."""

    def facts(self) -> FeedFacts:
        """Return what is served now; ``num_steps`` may grow from call to call."""
        ...

    def block(self, request: BlockRequest) -> EncodedBlock:
        """Return the block that ``request`` asks for, with its columns alone.

        Raises:
            ValueError: if the request does not fit what is served.
            CorruptDataError: if the data behind the block is damaged.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FetcherStatus:
    """Who is asked and who holds what, for a rank that waits (law L11)."""

    asked: str
    """Who was asked last, and how it went, in words for a human: "feeder grpc://10.0.0.7:8815, asked 3
    times, last error: connection refused"."""
    bytes_held: Mapping[str, int]
    """Bytes that this fetcher holds or knows of beside those it has handed over, by holder."""
    retries: int = 0
    """Requests that were made again so far, because whoever was asked first did not answer them."""


class BlockFetcher(Protocol):
    """Gets blocks from somewhere else. Owned by one ``FeedSource``; every method from any thread.

    Several requests are under way at once and may end in any order. Retries and fail-over happen in here: a
    future fails only with what asking elsewhere would not mend. A fetcher asks no more than it was asked,
    so the caller's requests are the credits: it never has more under way than its byte budget allows.
    """

    def facts(self) -> FeedFacts:
        """Ask the service what it serves now. A rank at the end of a growing plan asks once a second.

        Raises:
            ValueError: if it serves another run than before.
            ConnectionError: if nobody can be asked.
        """
        ...

    def fetch(self, request: BlockRequest) -> Future[EncodedBlock]:
        """Begin to get a block; returns at once.

        The arrays of the block must stay valid and unchanged as long as they are referenced. The bytes are
        not trusted: the caller checks digests. Whoever calls ``cancel`` on the future wants it no more.

        The future raises:
            ValueError: if the service refuses the request.
            CorruptDataError: if the data behind the block is damaged.
            ConnectionError: if nobody can be asked for it.
        """
        ...

    def status(self) -> FetcherStatus:
        """Say who is asked now. Never waits: it is called when things are stuck."""
        ...

    def close(self) -> None:
        """Cancel what is under way and give back connections and memory. A second call does nothing."""
        ...


@runtime_checkable
class DigestComparer(Protocol):
    """What a fetcher can do beside, if all ranks of a run ask one service: compare what they train on."""

    def compare(self, report: DigestReport) -> DigestReport | None:
        """Return what another rank said of the same packs, if it is something else. May take a while.

        Raises:
            ConnectionError: if the service does not answer.
            ValueError: if it does not compare.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """Files of PEM text for an encrypted connection.

    Raises:
        ValueError: if a file is missing, or a certificate has no key.
    """

    ca: Path
    """Whose signature the service's certificate must bear."""
    cert: Path | None = None
    """This rank's own certificate, where the service asks for one (mTLS)."""
    key: Path | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"tls: {name}={str(path)!r} is not a file")
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls: a certificate and its key go together; give cert and key, or neither")

    @classmethod
    def of(cls, files: TlsFiles | str | Path | Mapping[str, str | Path]) -> TlsFiles:
        """Return what a user means: these files, the CA's alone, or names ``ca``, ``cert``, ``key``.

        Raises:
            ValueError: if a file is missing, or a name is not known.
        """
        if isinstance(files, TlsFiles):
            return files
        named = {"ca": files} if isinstance(files, str | Path) else dict(files)
        unknown = sorted(named.keys() - {"ca", "cert", "key"})
        if unknown or "ca" not in named:
            raise ValueError(f"tls={sorted(named)}: need ca, and for mTLS cert and key; unknown {unknown}")
        return cls(**{name: Path(path) for name, path in named.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedQuestion:
    """What a rank wants of a service: enough to name feeders for it, or to refuse it."""

    place: RankPlace
    columns: tuple[str, ...]
    """As in ``BlockRequest``: the columns of all blocks that will be asked for."""
    token: str | None = None
    """Bearer token. None: the transport takes that of its environment variable, if there is one."""
    tls: TlsFiles | None = None


class OpenFetcher(Protocol):
    """A transport: an entry point of the group ``ringfeed.transports``, by the scheme of its URLs."""

    def __call__(self, url: str, question: FeedQuestion) -> BlockFetcher:
        """Connect to the service at ``url``.

        Raises:
            ValueError: if the URL is not understood.
            ConnectionError: if there is nobody, or the token or certificate is refused.
        """
        ...
