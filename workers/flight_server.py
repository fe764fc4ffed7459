"""A Flight server of blocks: a feeder, a directory of feeders, or both.

In:   a ``BlockSupply`` (``pipeline/block_fetcher.py``): a builder in this process, or actors behind it
Out:  ``GetFlightInfo``: the facts of the run and who gives its blocks; ``DoExchange``: blocks, as asked for

A block is a pure function of its request: the server keeps nothing of a rank beside its open stream. Serve
from a process that does nothing else: a busy Python thread beside it raises the slowest answers from 10 ms
to over a second.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as fl

from ringfeed.pipeline.digest_report import MAX_REPORT_BYTES
from ringfeed.pipeline.feed_window import BlockGrid
from ringfeed.pipeline.flight_wire import COMPARE, REFUSED, DirectoryQuestion, Feeder, Hello
from ringfeed.pipeline.shm_files import BlockFolder, host_mark
from ringfeed.pipeline.shm_slots import SlotPool
from ringfeed.pipeline.step_block import block_schema
from ringfeed.workers.digest_table import DigestTable
from ringfeed.workers.flight_auth import BearerCheck
from ringfeed.workers.flight_budget import ReadyBudget
from ringfeed.workers.flight_exchange import BlockExchange, ExchangeParts
from ringfeed.workers.flight_options import ServerOptions
from ringfeed.workers.flight_stalls import StallWatch, break_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from ringfeed.pipeline.block_fetcher import BlockSupply
    from ringfeed.pipeline.feed_facts import FeedFacts

__all__ = ["FlightServer"]

_LOG = logging.getLogger("ringfeed.flight")


class FlightServer(fl.FlightServerBase):  # type: ignore[misc]
    """Listens from construction on, in gRPC's own threads. ``stop`` ends it; so does ``with``."""

    def __init__(
        self,
        supply: BlockSupply,
        options: ServerOptions | None = None,
        *,
        feeders: Callable[[], Sequence[Feeder]] | None = None,
        compare: Callable[[bytes], bytes | None] | None = None,
    ) -> None:
        """Open the port.

        Args:
            supply: gives facts and blocks; called from several threads.
            options: where to listen, for whom.
            feeders: who gives blocks now, for a directory; None is this server alone.
            compare: where ranks compare digests (``DigestTable.compare_json``); None is a table of its own.

        Raises:
            ValueError: if the port cannot be had, or key and certificate cannot be used.
        """
        self._options = options = options or ServerOptions()
        self._supply = supply
        self._feeders = feeders or self._only_me
        self._compare = compare or DigestTable().compare_json
        self._lock = threading.Lock()
        self._exchanges: set[BlockExchange] = set()
        self._ready = ReadyBudget(options.ready_bytes)
        self._is_stopping = False
        self._pool = ThreadPoolExecutor(options.num_threads, thread_name_prefix="ringfeed-get")
        _check_free(options)
        self._folder: BlockFolder | None = None
        try:
            super().__init__(_location(options), **_security(options))
        except pa.ArrowException as error:
            files = "" if options.tls is None else f", or {options.tls.cert} and {options.tls.key} do not fit"
            raise ValueError(
                f"cannot listen on {options.host}:{options.port}: {str(error).splitlines()[0]}; the address "
                f"is none of this machine{files}"
            ) from None
        self._folder = _make_folder(options.shared_bytes)
        self._stalls = StallWatch(
            lambda: self._streams,
            lambda stream: break_connection(stream.peer, port=self.port),
            stall_seconds=options.stall_seconds,
        )

    @property
    def url(self) -> str:
        """Where ranks find it."""
        scheme = "flight" if self._options.tls is None else "grpc+tls"
        return f"{scheme}://{_bracketed(self._options.public_host or self._options.host)}:{self.port}"

    @property
    def num_streams(self) -> int:
        """Ranks that are served now."""
        return len(self._streams)

    @property
    def bytes_ready(self) -> int:
        """Bytes of the blocks that are ready for streams, or being got, at most."""
        return self._ready.bytes_ready

    @property
    def feeder(self) -> Feeder:
        """This server, as another directory names it."""
        return replace(self._only_me()[0], url=self.url)

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:  # noqa: ARG002
        with _refusals():
            question = DirectoryQuestion.from_json(descriptor.command or b"")
            facts = self._supply.facts()
            _check_run(question.fingerprint, facts)
            facts.check_place(question.place)
            return fl.FlightInfo(
                block_schema(facts, question.columns),
                descriptor,
                [_endpoint(feeder) for feeder in self._feeders()],
                app_metadata=facts.to_json(),
            )

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with _refusals():
            hello = Hello.from_json(descriptor.command or b"")
            facts = self._supply.facts()
            _check_run(hello.fingerprint, facts)
        parts = ExchangeParts(
            hello=hello,
            schema=block_schema(facts, hello.columns),
            get=lambda request: self._pool.submit(self._supply.block, request),
            size_of=lambda request: BlockGrid.of(facts, request.place, request.columns).bytes_of(request),
            blocks_ahead=self._options.blocks_ahead,
            budget=self._ready,
            peer=context.peer(),
            pool=self._pool_for(hello.proof),
        )
        exchange = BlockExchange(parts, reader, writer)
        self._enter(exchange)
        try:
            exchange.run()
        finally:
            with self._lock:
                self._exchanges.discard(exchange)

    def do_action(self, context: Any, action: Any) -> list[Any]:  # noqa: ARG002
        if action.type != COMPARE:
            raise NotImplementedError(f"no action {action.type[:80]!r}")
        with _refusals():
            other = self._compare(bytes(memoryview(action.body)[: MAX_REPORT_BYTES + 1]))
        return [] if other is None else [other]

    def stop(self, *, grace_seconds: float = 10.0) -> bool:
        """Tell all ranks to ask elsewhere, and end. A second call does nothing.

        Args:
            grace_seconds: for ranks to leave. One that is frozen does not.

        Returns:
            Whether all have left.
        """
        with self._lock:
            self._is_stopping = True
        self._stalls.close()
        for exchange in self._streams:
            exchange.leave()
        # Waits for open calls as long as they last, hence in a thread that may be left behind.
        thread = threading.Thread(target=self.shutdown, name="ringfeed-shutdown", daemon=True)
        thread.start()
        thread.join(grace_seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._folder is not None:
            self._folder.close()
        return not thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _streams(self) -> list[BlockExchange]:
        with self._lock:
            return list(self._exchanges)

    def _enter(self, exchange: BlockExchange) -> None:
        with self._lock:
            if self._is_stopping:
                raise fl.FlightUnavailableError("this feeder stops")
            if len(self._exchanges) >= self._options.max_streams:
                raise fl.FlightUnavailableError(
                    f"this feeder has {len(self._exchanges)} streams, its maximum (max_streams)"
                )
            self._exchanges.add(exchange)

    def _only_me(self) -> list[Feeder]:
        return [
            Feeder(url=None, host=host_mark(), folder=None if self._folder is None else self._folder.name)
        ]

    def _pool_for(self, proof: str | None) -> SlotPool | None:
        """Return files for a rank that can read them."""
        if self._folder is None or proof is None:
            return None
        is_right = hmac.compare_digest(proof.encode(), self._folder.proof.encode())
        return SlotPool(self._folder) if is_right else None


def _make_folder(budget: int) -> BlockFolder | None:
    if not budget:
        return None
    try:
        return BlockFolder(budget=budget)
    except OSError as error:
        _LOG.warning("no files under /dev/shm (%s): blocks are sent to ranks on this machine, too", error)
        return None


def _check_run(fingerprint: str | None, facts: FeedFacts) -> None:
    if fingerprint not in (None, facts.fingerprint):
        raise ValueError(
            f"this service serves run {facts.fingerprint}, this rank follows {fingerprint}; start a service "
            "of the same plan, layout and skip list, or load from the beginning"
        )


@contextmanager
def _refusals() -> Iterator[None]:
    """Send what a ValueError says and nothing else: pyarrow would send the traceback along."""
    try:
        yield
    except ValueError as error:
        raise fl.FlightServerError(str(error), REFUSED) from None
    except Exception as error:
        _LOG.exception("a call failed")
        raise fl.FlightUnavailableError(f"{type(error).__name__} behind this server") from None


def _endpoint(feeder: Feeder) -> Any:
    # No location at all means: where you asked.
    locations = [] if feeder.url is None else [feeder.url.replace("flight://", "grpc+tcp://", 1)]
    return fl.FlightEndpoint(b"blocks", locations, None, feeder.to_json())


def _check_free(options: ServerOptions) -> None:
    """Refuse a port that somebody listens on: gRPC would share it, and half of the calls go astray."""
    if not options.port:
        return
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family) as probe:
        # What an ended server leaves behind for a minute is no one who listens.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host.strip("[]"), options.port))
        except OSError as error:
            raise ValueError(
                f"cannot listen on {options.host}:{options.port}: {error.strerror or error}; take another "
                "port (0 for any that is free)"
            ) from None


def _location(options: ServerOptions) -> str:
    scheme = "grpc+tcp" if options.tls is None else "grpc+tls"
    return f"{scheme}://{_bracketed(options.host)}:{options.port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _security(options: ServerOptions) -> dict[str, Any]:
    security: dict[str, Any] = {}
    if options.token is not None:
        security["middleware"] = {"token": BearerCheck(options.token)}
    if options.tls is not None:
        security["tls_certificates"] = [(options.tls.cert.read_bytes(), options.tls.key.read_bytes())]
        if options.tls.client_ca is not None:
            security["verify_client"] = True
            security["root_certificates"] = options.tls.client_ca.read_bytes()
    return security
