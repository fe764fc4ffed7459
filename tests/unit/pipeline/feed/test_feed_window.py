"""The window: blocks in order, never more bytes than the budget, all of it dropped when the rank moves."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.pipeline.feed_request import BLOCK_COLUMNS
from ringfeed.pipeline.feed_window import BlockGrid, FeedWindow
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.skip import skip_list
from ringfeed.pipeline.step_block import EncodedBlock

GRID = BlockGrid(
    place=RankPlace(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1),
    columns=("pieces", "input_ids", "labels"),
    batches_per_step=3,
    batches_per_block=4,
    batch_bytes=100,
)
END = 3 * 20


class Fetcher:
    """Notes what is asked for; blocks come when the test says so, of ``batch_bytes`` a micro-batch."""

    def __init__(self, batch_bytes=100):
        self.batch_bytes = batch_bytes
        self.asked = []
        self.futures = []

    def fetch(self, request):
        self.asked.append(request)
        self.futures.append(Future())
        return self.futures[-1]

    def answer(self, number):
        size = self.asked[number].num_micro_batches * self.batch_bytes
        rows = pa.RecordBatch.from_pydict({"x": np.zeros(size, dtype=np.uint8)})
        self.futures[number].set_result(EncodedBlock(header=b"", rows=rows))

    def ranges(self):
        firsts = [request.first_step * 3 + request.first_micro_batch for request in self.asked]
        return [(i, i + r.num_micro_batches) for i, r in zip(firsts, self.asked, strict=True)]


def window(fetcher, budget):
    return FeedWindow(fetcher, GRID, budget=budget)


def test_it_asks_ahead_up_to_the_budget_and_no_further():
    fetcher = Fetcher()

    window(fetcher, budget=1250).move_to(0, end=END)

    assert fetcher.ranges() == [(0, 4), (4, 8), (8, 12)]


def test_one_block_is_asked_for_whatever_it_takes():
    fetcher = Fetcher()
    tiny = window(fetcher, budget=0)

    assert [tiny.move_to(i, end=END).first for i in (0, 3, 4)] == [0, 0, 4]
    assert fetcher.ranges() == [(0, 4), (4, 8)]


def test_what_the_consumer_is_past_is_dropped_and_more_is_asked_for():
    fetcher = Fetcher()
    blocks = window(fetcher, budget=800)
    blocks.move_to(0, end=END)
    for number in (0, 1):
        fetcher.answer(number)

    assert blocks.move_to(3, end=END).stop == 4
    assert len(fetcher.asked) == 2
    assert blocks.move_to(4, end=END).stop == 8
    assert fetcher.ranges()[2:] == [(8, 12)]
    assert sum(blocks.bytes_held().values()) == 800


def test_a_rank_that_begins_inside_a_block_asks_for_the_rest_of_it():
    fetcher = Fetcher()

    window(fetcher, budget=700).move_to(6, end=END)

    assert fetcher.ranges() == [(6, 8), (8, 12)]
    assert (fetcher.asked[0].first_step, fetcher.asked[0].first_micro_batch) == (2, 0)


def test_nothing_is_asked_for_beyond_the_plan_until_it_has_grown():
    fetcher = Fetcher()
    blocks = window(fetcher, budget=10**6)

    blocks.move_to(0, end=6)
    assert fetcher.ranges() == [(0, 4), (4, 6)]
    blocks.move_to(0, end=9)
    assert fetcher.ranges()[2:] == [(6, 8), (8, 9)]
    assert blocks.asked_to == 9


@pytest.mark.parametrize("place", [0, 40])
def test_a_place_outside_the_window_drops_and_cancels_all_of_it(place):
    fetcher = Fetcher()
    blocks = window(fetcher, budget=800)
    blocks.move_to(12, end=END)
    fetcher.answer(0)

    assert blocks.move_to(place, end=END).first == place
    assert fetcher.ranges()[2:] == [(place, place + 4), (place + 4, place + 8)]
    assert fetcher.futures[1].cancelled()


def test_larger_blocks_than_reckoned_with_shrink_the_window():
    """Shares may be uneven: the budget counts what came."""
    fetcher = Fetcher(batch_bytes=190)
    blocks = window(fetcher, budget=1600)
    blocks.move_to(0, end=END)
    assert len(fetcher.asked) == 4
    for number in range(4):
        fetcher.answer(number)

    for index in (4, 8):
        blocks.move_to(index, end=END)
        assert len(fetcher.asked) == 4
    blocks.move_to(12, end=END)
    assert fetcher.ranges()[4:] == [(16, 20)]


def test_it_says_what_is_here_and_what_is_under_way():
    fetcher = Fetcher()
    blocks = window(fetcher, budget=1200)
    blocks.move_to(0, end=END)
    fetcher.answer(0)

    assert blocks.bytes_held() == {
        "1 blocks at this rank (budget 1,200 B)": 400,
        "2 blocks under way": 800,
    }
    blocks.forget()
    assert sum(blocks.bytes_held().values()) == 0


def test_failed_blocks_take_nothing():
    fetcher = Fetcher()
    blocks = window(fetcher, budget=400)
    slot = blocks.move_to(0, end=END)
    fetcher.futures[0].set_exception(ConnectionError("gone"))

    blocks.ask_again(slot)

    assert fetcher.ranges() == [(0, 4), (0, 4)]
    assert not slot.future.done()


@given(
    moves=st.lists(st.integers(0, END - 1), min_size=1, max_size=20),
    budget=st.integers(0, 3000),
    answered=st.data(),
)
def test_any_walk_stays_under_the_budget_and_covers_the_consumer(moves, budget, answered):
    fetcher = Fetcher()
    blocks = window(fetcher, budget)
    for index in moves:
        slot = blocks.move_to(index, end=END)
        assert slot.first <= index < slot.stop
        assert sum(blocks.bytes_held().values()) <= max(budget, 400)
        for number, future in enumerate(fetcher.futures):
            if not future.done() and answered.draw(st.booleans()):
                fetcher.answer(number)


def test_cp_peers_cut_the_run_alike_wherever_they_stand(facts):
    places = [RankPlace(dp_rank=0, dp_size=2, cp_rank=rank, cp_size=2) for rank in (0, 1)]
    grids = [BlockGrid.of(facts, place, ("pieces", "input_ids", "labels")) for place in places]

    for first in range(grids[0].index(facts.num_steps, 0)):
        mine, theirs = (grid.request(first, grid.index(facts.num_steps, 0)) for grid in grids)
        assert mine.share_key == theirs.share_key
        mine.check(facts)
    assert replace(grids[0], place=places[1]) == grids[1]


@pytest.mark.parametrize("options", [{}, {"overlay": skip_list([3, 40])}, {"layout": "identity"}])
@pytest.mark.parametrize("columns", [(), ("pieces",), ("pieces", "labels"), BLOCK_COLUMNS])
@pytest.mark.parametrize("packs_per_chunk", [1, 2])
def test_no_block_is_larger_than_was_reckoned_with(make_builder, options, columns, packs_per_chunk):
    builder = make_builder(block_bytes=1500, **options)
    facts = builder.facts()
    place = RankPlace(dp_rank=0, dp_size=2, cp_rank=0, cp_size=2, packs_per_chunk=packs_per_chunk)
    grid = BlockGrid.of(facts, place, columns)
    first, end = 0, grid.index(facts.num_steps, 0)
    while first < end:
        request = grid.request(first, end)
        assert builder.block(request).nbytes <= grid.bytes_of(request)
        first += request.num_micro_batches
