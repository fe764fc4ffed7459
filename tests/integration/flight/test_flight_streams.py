"""Many ranks at one feeder: as many as it says, memory within its budget, and frozen ones starve nobody."""

import gc
import queue
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from ringfeed.pipeline.block_fetcher import FeedQuestion
from ringfeed.pipeline.block_reader import read_block
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS, BlockRequest
from ringfeed.pipeline.flight_client import open_fetcher
from ringfeed.pipeline.flight_wire import Ask, Hello, pack_message
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.step_block import BlockRows, encode_block
from ringfeed.workers.block_gate import BlockGate
from ringfeed.workers.flight_options import ServerOptions

STREAMS = 72
BLOCK = 2 << 20
PLACE = RankPlace(dp_rank=0, dp_size=2, cp_rank=0, cp_size=2)
QUESTION = FeedQuestion(place=PLACE, columns=BLOCK_COLUMNS)


class Large:
    """Gives a fresh block of ``BLOCK`` bytes each time, and counts the bytes of those that are alive."""

    def __init__(self, builder):
        tokens = BLOCK // 8
        spec = replace(builder.facts().spec, pack_slots=2 * tokens, multiple=1)
        self._facts = replace(
            builder.facts(), spec=spec, local_tokens=tokens, block_bytes=BLOCK, num_steps=1000
        )
        self._lock = threading.Lock()
        self._gone: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.most = self.given = 0

    @property
    def alive(self):
        return (self.given - self._gone.qsize()) * BLOCK

    def facts(self):
        return self._facts

    def block(self, request):
        tokens = BLOCK // 8
        one = np.array([0, 1])
        rows = BlockRows(
            piece_offsets=one,
            documents=one[:1],
            starts=one[:1],
            lengths=one[1:] * 2 * tokens,
            skipped=np.zeros(1, dtype=np.bool_),
            token_offsets=one * tokens,
            input_ids=np.full(tokens, request.first_step, dtype=np.int32),
            labels=np.zeros(tokens, dtype=np.int32),
            local_supervised=one[:1],
        )
        with self._lock:
            self.given += 1
            self.most = max(self.most, self.alive)
        # A queue: a lock taken while memory is given back may be held by this very thread.
        weakref.finalize(rows.input_ids, self._gone.put, None)
        return encode_block(request, rows, shares=(), facts=self._facts)


def request(step):
    return BlockRequest(place=PLACE, first_step=step, first_micro_batch=0, num_micro_batches=1)


def test_as_many_streams_as_it_says_at_once_and_the_next_is_sent_elsewhere(serve, make_builder):
    server = serve(ServerOptions(max_streams=STREAMS, shared_bytes=0))
    facts = server._supply.facts()
    fetchers = [open_fetcher(server.url, QUESTION) for _ in range(STREAMS)]
    rounds = [[fetcher.fetch(request(step)) for fetcher in fetchers] for step in range(3)]
    for step, futures in enumerate(rounds):
        for future in futures:
            assert read_block(future.result(timeout=100), request(step), facts).nbytes
    assert server.num_streams == STREAMS
    late = open_fetcher(server.url, QUESTION)
    late.fetch(request(0))
    eventually(lambda: f"has {STREAMS} streams, its maximum (max_streams)" in late.status().asked)
    for fetcher in [*fetchers, late]:
        fetcher.close()
    eventually(lambda: server.num_streams == 0)
    assert server.bytes_ready == 0


def test_ranks_that_do_not_read_cost_what_was_agreed_and_hold_up_nobody(serve, make_builder):
    frozen = 8
    supply = Large(make_builder())
    budget = 5 * BLOCK
    server = serve(ServerOptions(ready_bytes=budget, blocks_ahead=6, shared_bytes=0), supply=supply)
    clients = [freeze(server, supply.facts()) for _ in range(frozen)]
    eventually(lambda: is_quiet(supply))
    assert server.bytes_ready <= budget + frozen * (BLOCK + 4096)
    # What went out of a stream's hands lies in gRPC's: a message or two.
    assert supply.most <= budget + 3 * frozen * BLOCK
    fetcher = open_fetcher(server.url, QUESTION)
    began = time.monotonic()
    for step in range(20):
        block = fetcher.fetch(request(step)).result(timeout=60)
        assert block.rows.column("input_ids").values[0].as_py() == step
    assert time.monotonic() - began < 30
    fetcher.close()
    give_up(clients)
    eventually(lambda: server.bytes_ready == 0)
    eventually(lambda: gc.collect() >= 0 and supply.alive == 0)


def test_ranks_that_do_not_read_are_cut_off_when_they_hold_all_blocks(serve, make_builder, caplog):
    most = 4
    supply = Large(make_builder())
    gate = BlockGate(supply, most_blocks=most)
    server = serve(ServerOptions(ready_bytes=0, stall_seconds=1, shared_bytes=0), supply=gate)
    clients = [freeze(server, supply.facts()) for _ in range(2 * most)]
    eventually(lambda: supply.alive >= most * BLOCK)
    fetcher = open_fetcher(server.url, QUESTION)
    # The gate is held by streams that read nothing; it gives up on a request after 30 s.
    for step in range(3):
        block = fetcher.fetch(request(step)).result(timeout=25)
        assert block.rows.column("input_ids").values[0].as_py() == step
    assert fetcher.status().retries == 0
    assert "has not read a reply for 1 s and others wait" in caplog.text
    fetcher.close()
    give_up(clients)
    eventually(lambda: server.num_streams == 0)


def test_ranks_that_do_not_read_keep_their_streams_while_nobody_waits(serve, make_builder, caplog):
    supply = Large(make_builder())
    server = serve(ServerOptions(stall_seconds=0.2, shared_bytes=0), supply=supply)
    clients = [freeze(server, supply.facts())]
    eventually(lambda: is_quiet(supply))
    (stream,) = server._streams
    eventually(lambda: stream.write_seconds > 1)
    assert server._streams == [stream]
    assert "others wait" not in caplog.text
    give_up(clients)


def give_up(clients):
    for client, writer, reader in clients:
        reader.cancel()
        with suppress(pa.ArrowException):
            writer.close()
        client.close()


def freeze(server, facts):
    """Ask for many blocks and read none."""
    client = fl.FlightClient(server.url.replace("flight://", "grpc+tcp://"))
    hello = Hello(fingerprint=facts.fingerprint, columns=BLOCK_COLUMNS)
    writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(hello.to_json()))
    for number in range(30):
        writer.write_metadata(pack_message(Ask.ASK, number, request(number).to_json()))
    return client, writer, reader


def is_quiet(supply):
    given = supply.given
    time.sleep(0.7)
    return given == supply.given > 0


def eventually(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it did not happen within 60 s"
        time.sleep(0.02)
