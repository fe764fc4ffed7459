"""What a stranger, a broken rank or a slow one can do to a server: nothing that others notice."""

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from ringfeed.pipeline.block_fetcher import FeedQuestion
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS, BlockRequest
from ringfeed.pipeline.flight_client import open_fetcher
from ringfeed.pipeline.flight_link import flight_location
from ringfeed.pipeline.flight_wire import MAX_MESSAGE_BYTES, Ask, DirectoryQuestion, Hello, pack_message
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.workers.flight_options import ServerOptions

PLACE = RankPlace(dp_rank=0, dp_size=2, cp_rank=0, cp_size=2)
QUESTION = FeedQuestion(place=PLACE, columns=BLOCK_COLUMNS)
REQUEST = BlockRequest(place=PLACE, first_step=0, first_micro_batch=0, num_micro_batches=1)


def works(url):
    fetcher = open_fetcher(url, QUESTION)
    try:
        return fetcher.fetch(REQUEST).result(timeout=60).rows.num_rows == 1
    finally:
        fetcher.close()


def exchange(server, *messages, command=None, replies=1):
    """Say ``messages`` on a stream of its own and read some replies."""
    hello = Hello(fingerprint=server._supply.facts().fingerprint, columns=BLOCK_COLUMNS).to_json()
    with fl.FlightClient(flight_location(server.url)) as client:
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(command or hello))
        try:
            for message in messages:
                writer.write_metadata(pa.py_buffer(message))
            for _ in range(replies):
                reader.read_chunk()
        finally:
            reader.cancel()


ASK = pack_message(Ask.ASK, 0, REQUEST.to_json())


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([b"x" * (MAX_MESSAGE_BYTES + 1)], "at most 4096"),
        ([b"x" * (32 << 20)], "at most 4096"),
        ([b"short"], "at least 9"),
        ([bytes([77]) + bytes(8)], "kind 77 is not known"),
        ([ASK, ASK], "request 0 came after request 0"),
    ],
)
def test_what_is_no_message_ends_the_stream_and_nothing_else(serve, messages, told, eventually):
    server = serve()
    with pytest.raises(fl.FlightServerError, match=told) as refused:
        exchange(server, *messages, replies=9)
    assert "Traceback" not in str(refused.value)
    assert works(server.url)
    eventually(lambda: server.num_streams == 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"first_step": 10**9}, "is not served"),
        ({"num_micro_batches": 10**9}, "at most"),
        ({"place": RankPlace(dp_rank=0, dp_size=3, cp_rank=0, cp_size=2)}, "dp_size"),
        ({"columns": ("pieces", "labels")}, "this stream is for"),
    ],
)
def test_a_request_out_of_bounds_fails_alone(serve, changes, told):
    fetcher = open_fetcher(serve().url, QUESTION)
    values: dict[str, Any] = {"place": PLACE, "first_step": 0, "first_micro_batch": 0, "num_micro_batches": 1}
    wrong = fetcher.fetch(BlockRequest(**{**values, **changes}))
    right = fetcher.fetch(REQUEST)
    with pytest.raises(ValueError, match=told):
        wrong.result(timeout=60)
    assert right.result(timeout=60).rows.num_rows == 1
    fetcher.close()


@pytest.mark.parametrize(
    "command",
    [
        b"",
        b"{}",
        b"\x80\x04K\x01.",
        b"[" * 5000,
        b"null",
        b'{"version":1,"place":{},"columns":[],"fingerprint":1}',
    ],
)
def test_a_question_that_is_none_is_refused_in_a_line(serve, command):
    server = serve()
    with fl.FlightClient(flight_location(server.url)) as client, pytest.raises(fl.FlightServerError) as told:
        client.get_flight_info(fl.FlightDescriptor.for_command(command))
    assert "Traceback" not in str(told.value)
    with pytest.raises(fl.FlightServerError):
        exchange(server, ASK, command=command or b"0")
    assert works(server.url)


def test_other_verbs_are_refused(serve):
    server = serve()
    with fl.FlightClient(flight_location(server.url)) as client:
        for call in (
            lambda: client.do_get(fl.Ticket(b"blocks")).read_all(),
            lambda: list(client.do_action("shutdown")),
            lambda: list(client.list_flights()),
        ):
            with pytest.raises(pa.ArrowException):
                call()
    assert works(server.url)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\x16\x03\x01" * 99, b""])
def test_a_port_scan_is_no_matter(serve, garbage):
    server = serve()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stranger:
            stranger.sendall(garbage)
    assert works(server.url)


def test_without_the_token_no_verb_reaches_the_server(serve):
    server = serve(ServerOptions(token="correct-horse"))  # noqa: S106 - of this test alone
    facts = server._supply.facts().fingerprint
    question = DirectoryQuestion(place=PLACE, columns=(), fingerprint=facts).to_json()
    with fl.FlightClient(flight_location(server.url)) as client:
        for call in (
            lambda: client.get_flight_info(fl.FlightDescriptor.for_command(question)),
            lambda: client.do_get(fl.Ticket(b"blocks")),
            lambda: list(client.list_actions()),
        ):
            with pytest.raises(fl.FlightUnauthenticatedError):
                call()
    with pytest.raises(fl.FlightUnauthenticatedError):
        exchange(server, ASK)


def test_a_rank_that_vanishes_in_the_middle_leaves_nothing(serve, eventually):
    server = serve()
    for _ in range(5):
        fetcher = open_fetcher(server.url, QUESTION)
        for _ in range(50):
            fetcher.fetch(REQUEST)
        fetcher.close()
    eventually(lambda: server.num_streams == 0)
    assert works(server.url)


def test_many_connects_leak_neither_threads_nor_files_nor_memory(serve, eventually):
    server = serve()

    def held():
        eventually(lambda: server.num_streams == 0)
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), rss()

    for _ in range(30):
        assert works(server.url)
    before = held()
    for _ in range(970):
        assert works(server.url)
    threads, files, memory = (now - then for now, then in zip(held(), before, strict=True))
    assert threads <= 8
    assert files <= 16
    assert memory < 30e6


def test_as_many_streams_as_stated_are_served_at_once(serve, eventually):
    server = serve(ServerOptions(max_streams=72))
    fetchers = [open_fetcher(server.url, QUESTION) for _ in range(72)]
    waiting = [fetcher.fetch(REQUEST) for fetcher in fetchers]
    assert all(future.result(timeout=60).rows.num_rows == 1 for future in waiting)
    assert server.num_streams == 72
    for fetcher in fetchers:
        fetcher.close()
    eventually(lambda: server.num_streams == 0)


def test_a_server_sends_what_was_asked_for_and_no_more(serve, make_builder):
    """A rank that asks for three blocks and reads none: three are made, however fast the server is."""
    built: list[int] = []
    builder = make_builder()

    class Counted:
        facts = staticmethod(builder.facts)

        def block(self, request):
            built.append(request.first_step)
            return builder.block(request)

    fetcher = open_fetcher(serve(supply=Counted()).url, QUESTION)
    for future in [fetcher.fetch(REQUEST) for _ in range(3)]:
        future.result(timeout=60)
    time.sleep(0.3)
    assert len(built) == 3
    fetcher.close()


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
