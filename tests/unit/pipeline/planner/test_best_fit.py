"""The kernel against a few lines of plain Python."""

import numpy as np
import pytest

from ringfeed.pipeline.planner.best_fit import best_fit_decreasing, descending_order


def plain_best_fit(sizes, order, capacity):
    """What is left in each pack, sorted."""
    left: list[int] = []
    for piece in order:
        fits = [room for room in left if room >= sizes[piece]]
        room = min(fits, default=capacity)
        if fits:
            left.remove(room)
        left.append(room - sizes[piece])
    return sorted(left)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("capacity", [1, 7, 63, 64, 65, 5000])
def test_packs_are_those_of_plain_best_fit(seed, capacity):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, capacity + 1, size=rng.integers(1, 120))
    order = descending_order(sizes, capacity) if seed % 2 else rng.permutation(len(sizes))

    packs, left, opener = best_fit_decreasing(sizes, order, capacity)

    assert sorted(left.tolist()) == plain_best_fit(sizes.tolist(), order.tolist(), capacity)
    assert np.array_equal(capacity - np.bincount(packs, weights=sizes, minlength=len(left)), left)
    assert np.array_equal(packs[opener], np.arange(len(left)))


@pytest.mark.parametrize("seed", range(5))
def test_order_is_longest_first_and_stable(seed):
    sizes = np.random.default_rng(seed).integers(0, 20, size=200)

    assert np.array_equal(descending_order(sizes, 20), np.argsort(-sizes, kind="stable"))


def test_nothing_to_place_needs_no_pack():
    nothing = np.empty(0, np.int64)

    assert [len(out) for out in best_fit_decreasing(nothing, nothing, 10)] == [0, 0, 0]


def test_log_normal_lengths_need_one_pack_more_than_the_bound_at_most():
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(600), 1.5, 50_000), 1, 131_072).astype(
        np.int64
    )

    _, left, _ = best_fit_decreasing(lengths, descending_order(lengths, 131_072), 131_072)

    assert len(left) <= -(-int(lengths.sum()) // 131_072) + 1
