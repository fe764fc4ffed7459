"""A gate bounds the blocks that are held, and lets go of each with its last reference."""

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from ringfeed.pipeline.feed_request import BlockRequest
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.step_block import EncodedBlock
from ringfeed.workers.block_gate import BlockGate


class Supply:
    """Gives a new block each time, and counts."""

    def __init__(self):
        self.count, self.error = 0, None

    def facts(self):
        return "facts"

    def block(self, request):
        del request
        if self.error is not None:
            raise self.error
        self.count += 1
        return EncodedBlock(header=b"", rows=pa.record_batch({"x": pa.array([self.count])}))


def request(**more):
    place = RankPlace(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1)
    return BlockRequest(place=place, first_step=0, first_micro_batch=0, num_micro_batches=1, **more)


def test_so_many_blocks_at_a_time_and_one_more_when_one_is_let_go():
    supply = Supply()
    gate = BlockGate(supply, most_blocks=2, wait_seconds=30)
    held = [gate.block(request()), gate.block(request())]
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(gate.block, request())
        assert not threading.Event().wait(0.2)
        assert not third.done()
        held.pop()
        assert third.result(timeout=10).rows["x"].to_pylist() == [3]
    assert supply.count == 3


def test_without_room_a_request_fails_for_now():
    gate = BlockGate(Supply(), most_blocks=1, wait_seconds=0.05)
    held = gate.block(request())
    with pytest.raises(ConnectionError, match=r"1 blocks, all that node_bytes allows, .* for 0.05 s"):
        gate.block(request())
    # Facts of steps take no room.
    assert gate.block(request(columns=())).rows.num_rows == 1
    assert str(gate.facts()) == "facts"
    del held
    gate.block(request())


def test_an_error_takes_no_room():
    supply = Supply()
    gate = BlockGate(supply, most_blocks=1, wait_seconds=0.05)
    supply.error = ValueError("no such step")
    for _ in range(3):
        with pytest.raises(ValueError, match="no such step"):
            gate.block(request())
    supply.error = None
    assert gate.block(request()).rows.num_rows == 1


def test_a_block_may_be_let_go_of_in_the_middle_of_a_request():
    # As a garbage collection does: the last reference goes in the thread that asks, at each of its steps.
    held: list[EncodedBlock] = []
    moment = 0
    while not held:
        gate = BlockGate(Supply(), most_blocks=2, wait_seconds=30)
        held = [gate.block(request())]
        asking = threading.Thread(target=ask_and_drop, args=(gate, held, moment), daemon=True)
        asking.start()
        asking.join(timeout=30)
        assert not asking.is_alive(), f"stuck: let go of at event {moment}"
        assert gate.block(request()).rows.num_rows == 1
        moment += 1
    assert moment > 3


def ask_and_drop(gate, held, moment):
    asked = request()
    events = itertools.count()
    sys.setprofile(lambda *_: held.clear() if next(events) == moment else None)
    try:
        gate.block(asked)
    finally:
        sys.setprofile(None)
