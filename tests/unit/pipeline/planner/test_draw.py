"""The order of documents."""

import numpy as np
import pytest

from ringfeed.pipeline.planner.draw import BLOCK_DOCUMENTS, Draw

SIZES = [1, 2, 255, 256, 257, 1000, BLOCK_DOCUMENTS, BLOCK_DOCUMENTS + 1, 300_000]


def drawn(num_documents, *, seed, epoch=0):
    draw = Draw(num_documents, seed=seed)
    return np.concatenate([draw.block(epoch, block) for block in range(draw.num_blocks)])


@pytest.mark.parametrize("size", SIZES)
def test_without_a_seed_documents_come_in_corpus_order(size):
    assert np.array_equal(drawn(size, seed=None), np.arange(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_shuffled_epoch_has_every_document_once(size, seed):
    assert np.array_equal(np.sort(drawn(size, seed=seed)), np.arange(size))


@pytest.mark.parametrize("size", [200, 1000])
def test_seeds_and_epochs_have_their_own_orders(size):
    orders = [drawn(size, seed=1), drawn(size, seed=2), drawn(size, seed=1, epoch=1)]

    assert len({tuple(order.tolist()) for order in orders}) == 3


def test_seeds_and_epochs_have_their_own_blocks():
    blocks = [Draw(500_000, seed=seed).block(epoch, 0) for seed, epoch in ((1, 0), (2, 0), (1, 1))]

    assert len({frozenset(block.tolist()) for block in blocks}) == 3


def test_an_order_is_the_same_for_ever():
    # Worked out once; a change here changes every seeded plan and needs a new PLANNER_VERSION.
    assert drawn(12, seed=42).tolist() == [10, 9, 7, 6, 5, 8, 3, 0, 4, 2, 1, 11]


def test_a_block_holds_documents_from_all_over_the_corpus():
    size = 40 * BLOCK_DOCUMENTS
    first = Draw(size, seed=3).block(0, 0)

    assert len(first) == BLOCK_DOCUMENTS
    # In 20 equal parts of the corpus, none holds more than three times its share.
    assert np.bincount(first * 20 // size, minlength=20).max() < 3 * BLOCK_DOCUMENTS / 20
    assert np.bincount(first * 20 // size, minlength=20).min() > 0


def test_neighbours_in_the_corpus_are_far_apart_in_the_order():
    order = drawn(100_000, seed=9)

    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.001


def test_a_block_of_a_huge_corpus_is_drawn_without_the_rest():
    last = Draw(10**10, seed=1)

    ids = last.block(0, last.num_blocks - 1)

    assert 0 < len(ids) <= BLOCK_DOCUMENTS
    assert ids.min() >= 0
    assert ids.max() < 10**10
