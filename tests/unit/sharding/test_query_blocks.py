"""Query blocks hold every key that a row may see, and stay within the mask budget."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.sharding.attention.query_blocks import MASK_BUDGET, plan_query_blocks

documents = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), min_size=1, max_size=12)


def ranges(lengths_and_pads, rows=None):
    """Key ranges of a chunk of documents, each followed by padding; of ``rows`` only, if given."""
    starts: list[int] = []
    stops: list[int] = []
    for length, pad in lengths_and_pads:
        begin = len(starts)
        starts += [begin] * (length + pad)
        stops += [*range(begin + 1, begin + length + 1), *[0] * pad]
    chosen = np.arange(len(starts)) if rows is None else rows(len(starts))
    return np.array(starts, dtype=np.int64)[chosen], np.array(stops, dtype=np.int64)[chosen]


def assert_covers(blocks, starts, stops):
    covered = np.zeros(len(starts), dtype=bool)
    for block in blocks:
        rows = slice(block.row_start, block.row_stop)
        sees = stops[rows] > starts[rows]
        assert not covered[rows].any()
        assert (starts[rows][sees] >= block.key_start).all()
        assert (stops[rows][sees] <= block.key_stop).all()
        covered[rows] = True
    assert covered[stops > starts].all()


@given(documents)
def test_blocks_cover_every_row_once_with_all_its_keys(lengths_and_pads):
    starts, stops = ranges(lengths_and_pads)

    assert_covers(plan_query_blocks(starts, stops), starts, stops)


@given(documents, st.integers(0, 1000))
def test_any_order_of_the_rows_is_covered(lengths_and_pads, seed):
    starts, stops = ranges(lengths_and_pads, rows=lambda n: np.random.default_rng(seed).permutation(n))

    assert_covers(plan_query_blocks(starts, stops), starts, stops)


@given(documents)
def test_blocks_come_in_local_order(lengths_and_pads):
    blocks = plan_query_blocks(*ranges(lengths_and_pads))

    assert all(a.row_stop <= b.row_start for a, b in pairwise(blocks))


def test_a_long_document_stays_within_the_budget():
    starts, stops = ranges([(131_072, 0)])
    blocks = plan_query_blocks(starts, stops)

    assert max(block.num_pairs for block in blocks) <= MASK_BUDGET
    assert_covers(blocks, starts, stops)


def test_a_long_document_costs_little_more_than_its_causal_half():
    blocks = plan_query_blocks(*ranges([(16_384, 0)]))

    assert sum(block.num_pairs for block in blocks) < 1.03 * 16_384**2 / 2


def test_documents_are_not_crossed_for_much():
    blocks = plan_query_blocks(*ranges([(1024, 0)] * 16))

    assert sum(block.num_pairs for block in blocks) < 1.3 * 16 * 1024**2 / 2


def test_tiny_documents_share_a_block():
    blocks = plan_query_blocks(*ranges([(3, 1)] * 512))

    assert len(blocks) <= 16


def test_padding_alone_needs_no_block():
    assert plan_query_blocks(*ranges([(0, 64)])) == ()
