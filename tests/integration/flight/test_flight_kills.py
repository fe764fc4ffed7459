"""Feeders are killed, frozen, started again and run full: each rank's stream stays what it is."""

import logging
import os
import signal
import threading
import time
from itertools import islice
from typing import Any

import pytest

from ringfeed.pipeline.block_fetcher import FeedQuestion
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS, BlockRequest
from ringfeed.pipeline.flight_choice import FlightPatience
from ringfeed.pipeline.flight_client import FlightFetcher, open_fetcher
from ringfeed.pipeline.flight_wire import Feeder
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.workers.flight_options import ServerOptions

PLACE = RankPlace(dp_rank=0, dp_size=2, cp_rank=0, cp_size=2)
QUESTION = FeedQuestion(place=PLACE, columns=BLOCK_COLUMNS)
ANOTHER = "another-horse-battery"
TE = {"layout": ["te", {}], "cp": 2}


def at(url):
    """Return the server that listens where a killed one did."""
    return {**TE, "options": {"port": int(url.rpartition(":")[2])}}


def test_a_feeder_that_is_killed_and_started_again_costs_no_batch(start, plan, load, assert_same_batches):
    expected = list(load(plan, layout="te"))
    feeders = start(TE)
    url = feeders.urls[0]
    found: list[Any] = []
    with load(url, prefetch_bytes=4000) as loader:
        for stop in (3, None):
            found += list(islice(loader, None if stop is None else stop - len(found)))
            if stop is not None:
                feeders.kill()
                feeders = start(at(url))
    assert_same_batches(found, expected)


def test_a_state_resumes_after_service_and_rank_are_gone(start, plan, load, assert_same_batches):
    feeders = start(TE)
    with load(feeders.urls[0]) as loader:
        first = list(islice(loader, 5))
        state = loader.state_dict()
    feeders.kill()
    with load(start(TE).urls[0]) as loader:
        loader.load_state_dict(state)
        assert_same_batches([*first, *loader], load(plan, layout="te"))


def test_ranks_go_to_another_feeder_when_theirs_is_killed(
    start, serve, make_builder, plan, load, assert_same_batches
):
    processes = [start(TE), start(TE)]
    named = [Feeder(url=process.urls[0]) for process in processes]
    directory = serve(supply=make_builder(), feeders=lambda: named)
    with load(directory.url, prefetch_bytes=4000) as loader:
        found = list(islice(loader, 4))
        asked = loader._source._fetcher._choice.last
        processes[[feeder.url for feeder in named].index(asked.replace("grpc+tcp", "flight"))].kill()
        found += list(loader)
        assert loader._source._fetcher._choice.last != asked
    assert_same_batches(found, load(plan, layout="te"))


def test_a_frozen_feeder_is_left_after_a_while(start, serve, make_builder, caplog):
    frozen, other = start(TE), serve()
    named = [Feeder(url=frozen.urls[0])]
    directory = serve(supply=make_builder(), feeders=lambda: named)
    fetcher = FlightFetcher(directory.url, QUESTION, patience=FlightPatience(reply_seconds=1))
    request = request_of(fetcher.facts())
    first = fetcher.fetch(request).result(timeout=60)
    os.kill(frozen.process.pid, signal.SIGSTOP)
    try:
        with caplog.at_level(logging.WARNING, logger="ringfeed.flight"):
            named[:] = [Feeder(url=other.url)]
            assert fetcher.fetch(request).result(timeout=60).rows.equals(first.rows)
        assert "has been silent for 1 s" in caplog.text
        assert fetcher.status().retries == 1
    finally:
        os.kill(frozen.process.pid, signal.SIGCONT)
        fetcher.close()


def test_a_full_feeder_sends_ranks_elsewhere_and_takes_them_later(serve, eventually):
    server = serve(ServerOptions(max_streams=1))
    first = open_fetcher(server.url, QUESTION)
    second = open_fetcher(server.url, QUESTION)
    request = request_of(first.facts())
    first.fetch(request).result(timeout=30)
    waiting = second.fetch(request)
    eventually(lambda: "maximum" in second.status().asked)
    assert not waiting.done()
    first.close()
    assert waiting.result(timeout=30).rows.num_rows
    second.close()


def test_a_server_that_stops_lets_its_ranks_go(serve, load, plan, assert_same_batches):
    server = serve()
    with load(server.url, prefetch_bytes=4000) as loader:
        found = list(islice(loader, 3))
        assert server.stop(grace_seconds=20)
        threading.Timer(1.0, lambda: serve(ServerOptions(port=server.port))).start()
        assert_same_batches([*found, *loader], load(plan, layout="te"))


def test_nobody_to_ask_is_told_after_a_while_and_says_where(load):
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"flight://127\.0\.0\.1:1: .*refused"):
        FlightFetcher("flight://127.0.0.1:1", QUESTION, patience=FlightPatience(open_seconds=0.5))
    assert time.monotonic() - began < 10


def test_an_answer_that_never_comes_fails_in_the_end_and_close_ends_waiting(serve):
    server = serve()
    fetcher = FlightFetcher(server.url, QUESTION, patience=FlightPatience(retry_seconds=0.5))
    request = request_of(fetcher.facts())
    server.stop()
    with pytest.raises(ConnectionError, match=r"refused|stops"):
        fetcher.fetch(request).result(timeout=30)
    assert fetcher.facts().num_steps
    waiting = fetcher.fetch(request)
    fetcher.close()
    assert waiting.cancelled()


def test_another_run_at_the_same_address_is_refused(serve):
    server = serve()
    fetcher = open_fetcher(server.url, QUESTION)
    request = request_of(fetcher.facts())
    server.stop()
    serve(ServerOptions(port=server.port), layout="contiguous")
    with pytest.raises(ValueError, match=r"serves run .*, this rank follows"):
        fetcher.fetch(request).result(timeout=30)
    with pytest.raises(ValueError, match=r"serves run .*, this rank follows"):
        fetcher.facts()
    fetcher.close()


@pytest.mark.parametrize(
    ("stranger", "told"),
    [
        ({"layout": "contiguous"}, "this service serves run"),
        ({"options": ServerOptions(token=ANOTHER)}, "no bearer token"),
    ],
    ids=["of another run", "with another token"],
)
def test_a_feeder_of_another_service_is_left_while_the_directory_names_a_good_one(
    serve, make_builder, stranger, told, eventually
):
    strange, own = serve(**stranger), serve()
    named = [Feeder(url=strange.url)]
    directory = serve(supply=make_builder(), feeders=lambda: named)
    fetcher = open_fetcher(directory.url, QUESTION)
    waiting = fetcher.fetch(request_of(fetcher.facts()))
    eventually(lambda: fetcher.status().retries >= 2)
    assert not waiting.done()
    assert told in fetcher.status().asked
    named[:] = [Feeder(url=own.url)]
    assert waiting.result(timeout=30).rows.num_rows
    fetcher.close()


def request_of(facts):
    return BlockRequest(
        place=PLACE,
        first_step=0,
        first_micro_batch=0,
        num_micro_batches=min(2, facts.batches_per_block(PLACE)),
    )
