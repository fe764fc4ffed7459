"""Fetch blocks over Arrow Flight: with fail-over, retries and credits.

In:   ``flight://host:port`` or ``grpc+tls://host:port``, and requests of one rank
Out:  a ``BlockFetcher`` (``pipeline/block_fetcher.py``)

The URL is a directory; it names feeders. One on this machine is taken first, then by a hash of the dp rank,
so that cp peers ask the same one. When a stream breaks, all that was asked and has not come is asked again,
from the next feeder: a block is a pure function of its request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ringfeed.pipeline.block_fetcher import FetcherStatus
from ringfeed.pipeline.feed_token import find_token
from ringfeed.pipeline.flight_choice import RESTART_SECONDS, FeederChoice, FlightPatience, Troubles
from ringfeed.pipeline.flight_link import Credentials, Failure, FlightLink, LinkError, flight_location
from ringfeed.pipeline.flight_replies import ReplyReader
from ringfeed.pipeline.flight_wire import Ask, DirectoryQuestion, Hello
from ringfeed.pipeline.shm_files import host_mark, read_proof

if TYPE_CHECKING:
    from ringfeed.pipeline.block_fetcher import FeedQuestion
    from ringfeed.pipeline.digest_report import DigestReport
    from ringfeed.pipeline.feed_facts import FeedFacts
    from ringfeed.pipeline.feed_request import BlockRequest
    from ringfeed.pipeline.flight_link import FlightStream
    from ringfeed.pipeline.step_block import EncodedBlock

__all__ = ["FlightFetcher", "open_fetcher"]

_LOG = logging.getLogger("ringfeed.flight")


def open_fetcher(url: str, question: FeedQuestion) -> FlightFetcher:
    """Connect to the directory at ``url``.

    Raises:
        ValueError: if the URL or the token is none, or the service refuses the rank's place.
        ConnectionError: if nobody answers, or token or certificate are refused.
    """
    flight_location(url)
    return FlightFetcher(url, question)


class FlightFetcher:
    """A ``BlockFetcher`` over Flight. A thread of its own reads, and asks again what was lost."""

    def __init__(self, url: str, question: FeedQuestion, *, patience: FlightPatience | None = None) -> None:
        """Ask the directory what is served; ``open_fetcher`` says which errors there are."""
        self._url = url
        self._question = question
        self._credentials = Credentials(token=find_token(question.token), tls=question.tls)
        self._patience = patience or FlightPatience()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._asked: dict[int, tuple[BlockRequest, Future[EncodedBlock]]] = {}
        """By number, in the order asked: what has not come."""
        self._next = 0
        self._released: deque[int] = deque()
        """Numbers of blocks whose files may go; added to while memory is given back, so nothing may wait."""
        self._stream: FlightStream | None = None
        self._thread: threading.Thread | None = None
        self._troubles = Troubles(self._patience, tls_seconds=RESTART_SECONDS)
        self._choice = FeederChoice(url, dp_rank=question.place.dp_rank, host=host_mark())
        self._heard = time.monotonic()
        self._retries = 0
        self._facts = self._first_facts()

    def facts(self) -> FeedFacts:
        try:
            self._facts = self._ask_directory(self._facts.fingerprint)
        except LinkError as error:
            if error.failure in (Failure.REFUSED, Failure.TOKEN):
                raise _as_builtin(error) from None
            # What is known stays right. Whoever waits for more asks again, and tells how long it took.
            _LOG.info("the directory does not answer: %s", error)
        return self._facts

    def fetch(self, request: BlockRequest) -> Future[EncodedBlock]:
        future: Future[EncodedBlock] = Future()
        with self._changed:
            if self._closed.is_set():
                raise ValueError("the fetcher is closed; open another")
            number, self._next = self._next, self._next + 1
            self._asked[number] = (request, future)
            self._heard = time.monotonic() if len(self._asked) == 1 else self._heard
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ringfeed-flight", daemon=True)
                self._thread.start()
                threading.Thread(target=self._watch, name="ringfeed-flight-watch", daemon=True).start()
            self._send_releases()
            self._send(Ask.ASK, number, request.to_json())
            self._changed.notify_all()
        future.add_done_callback(lambda done: self._drop(number) if done.cancelled() else None)
        return future

    def compare(self, report: DigestReport) -> DigestReport | None:
        link = FlightLink(self._url, self._credentials)
        try:
            return link.compare(report)
        except LinkError as error:
            raise _as_builtin(error) from None
        finally:
            link.close()

    def status(self) -> FetcherStatus:
        waiting = len(self._asked)
        asked = f"feeder {self._choice.last}, {waiting} blocks asked for{self._troubles.text()}"
        return FetcherStatus(asked=asked, bytes_held={}, retries=self._retries)

    def close(self) -> None:
        with self._changed:
            self._closed.set()
            stream, thread = self._stream, self._thread
            asked = list(self._asked.values())
            self._asked.clear()
            self._changed.notify_all()
        for _, future in asked:
            future.cancel()
        if stream is not None:
            stream.cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _first_facts(self) -> FeedFacts:
        """Ask the directory, again and again for a while: a service may still be starting."""
        troubles = Troubles(self._patience, tls_seconds=0.0)
        while True:
            try:
                return self._ask_directory(None)
            except LinkError as error:
                troubles.add(error)
                if troubles.are_final or troubles.seconds > self._patience.open_seconds:
                    raise _as_builtin(error) from None
                time.sleep(troubles.wait_seconds)

    def _ask_directory(self, fingerprint: str | None) -> FeedFacts:
        """Ask who gives blocks of the run with ``fingerprint``, or of any if it is None; LinkError."""
        # Anew each time: a name may stand for another address after a restart.
        link = FlightLink(self._url, self._credentials)
        try:
            answer = link.ask(self._directory_question(fingerprint))
        finally:
            link.close()
        self._choice.update(answer.feeders)
        return answer.facts

    def _directory_question(self, fingerprint: str | None) -> DirectoryQuestion:
        return DirectoryQuestion(
            place=self._question.place, columns=self._question.columns, fingerprint=fingerprint
        )

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._serve_from(self._choice.next())
            except LinkError as error:
                self._recover(error)
            except Exception as error:
                _LOG.exception("the fetcher failed")
                self._fail(error)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self._asked and not self._closed.is_set():
                self._changed.wait()
            return not self._closed.is_set()

    def _serve_from(self, url: str) -> None:
        """Ask one feeder for all that has not come, and read until its stream ends or breaks."""
        link = FlightLink(url, self._credentials)
        try:
            # With a deadline, which a stream has not: who is asked on it answers.
            answer = link.ask(self._directory_question(self._facts.fingerprint))
            folder = next((feeder.folder for feeder in answer.feeders if feeder.url is None), None)
            proof = None if folder is None else read_proof(folder)
            columns = self._question.columns
            stream = link.open(Hello(fingerprint=self._facts.fingerprint, columns=columns, proof=proof))
            try:
                self._attach(stream)
                self._read(stream, folder if proof else None)
            finally:
                with self._changed:
                    self._stream = None
                stream.finish()
        finally:
            link.close()

    def _attach(self, stream: FlightStream) -> None:
        with self._changed:
            for number in [n for n, (_, future) in self._asked.items() if future.cancelled()]:
                del self._asked[number]
            for number, (request, _) in self._asked.items():
                stream.send(Ask.ASK, number, request.to_json())
            self._stream = stream
            self._heard = time.monotonic()
        if self._closed.is_set():
            stream.cancel()

    def _read(self, stream: FlightStream, folder: str | None) -> None:
        reader = ReplyReader(stream, folder=folder, release=self._released.append)
        while True:
            self._take(*reader.next())
            self._choice.is_good(stream.url)

    def _take(self, number: int, outcome: EncodedBlock | Exception) -> None:
        with self._changed:
            self._heard = time.monotonic()
            self._send_releases()
            _, future = self._asked.pop(number, (None, None))
        self._troubles.clear()
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _recover(self, error: LinkError) -> None:
        """Wait a little and see who else there is; fail all that was asked when there is no hope.

        What a feeder refuses is not final: one of another service may have its address by now. The
        directory knows who is who, and is asked right after.
        """
        if self._closed.is_set():
            return
        self._troubles.add(_not_final(error))
        self._retries += len(self._asked)
        self._choice.is_bad(self._choice.last)
        if self._troubles.are_final or self._troubles.seconds > self._patience.retry_seconds:
            self._fail(_as_builtin(error))
            return
        _LOG.info("asking again: %s", error)
        if not self._choice.has_other():
            self._closed.wait(self._troubles.wait_seconds)
        try:
            self._ask_directory(self._facts.fingerprint)
        except LinkError as other:
            if other.failure in (Failure.REFUSED, Failure.TOKEN):
                self._fail(_as_builtin(other))

    def _fail(self, error: Exception) -> None:
        with self._changed:
            asked = list(self._asked.values())
            self._asked.clear()
        self._troubles.clear()
        for _, future in asked:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _drop(self, number: int) -> None:
        with self._changed:
            if number in self._asked:
                self._send(Ask.DROP, number)

    def _send(self, kind: Ask, number: int, body: bytes = b"") -> None:
        """Send on the open stream, if there is one; what is lost is asked again with the next."""
        if self._stream is not None:
            try:
                self._stream.send(kind, number, body)
            except LinkError as error:
                _LOG.debug("%s", error)

    def _send_releases(self) -> None:
        while self._released:
            self._send(Ask.RELEASE, self._released.popleft())

    def _watch(self) -> None:
        """Break a stream that stays silent although it was asked."""
        while not self._closed.wait(min(1.0, self._patience.reply_seconds / 4)):
            with self._changed:
                is_late = bool(self._asked) and time.monotonic() - self._heard > self._patience.reply_seconds
                stream = self._stream if is_late else None
            if stream is not None:
                _LOG.warning(
                    "%s has been silent for %.0f s; asking elsewhere",
                    stream.url,
                    self._patience.reply_seconds,
                )
                stream.cancel()


def _not_final(error: LinkError) -> LinkError:
    """Return what the error of a feeder means: to ask the directory, then elsewhere or again."""
    is_refused = error.failure in (Failure.REFUSED, Failure.TOKEN)
    return LinkError(Failure.UNAVAILABLE, str(error)) if is_refused else error


def _as_builtin(error: LinkError) -> Exception:
    return ValueError(str(error)) if error.failure is Failure.REFUSED else ConnectionError(str(error))
