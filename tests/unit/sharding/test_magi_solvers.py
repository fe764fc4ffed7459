"""Solvers on small, hand-worked chunks; ``tests/golden`` has MagiAttention's own answers."""

import pytest

from ringfeed.sharding.magi import backtracking
from ringfeed.sharding.magi.chunking import ChunkGrid
from ringfeed.sharding.magi.slices import MaskSlices
from ringfeed.sharding.magi.solver import ChunkWork
from ringfeed.sharding.magi.solvers import make_solver, solver_names


def assign(name, areas, cp_size, keys=None, **options):
    """Solve chunks of one token: chunk i sees ``areas[i]`` keys, from ``keys[i]`` on."""
    firsts = keys or [0] * len(areas)
    rows = [(i, i + 1, k, k + area, "full") for i, (k, area) in enumerate(zip(firsts, areas, strict=True))]
    return assign_slices(name, rows, len(areas), cp_size, **options)


def assign_slices(name, rows, num_chunks, cp_size, **options):
    grid = ChunkGrid(total=num_chunks, pad_size=0, cp_size=cp_size, chunk_size=1)
    work = ChunkWork.measure(grid, MaskSlices.read(rows))
    return make_solver(name, options).assign(work).tolist()


def test_min_heap_takes_the_larger_id_of_equal_chunks_and_topp_heap_the_smaller():
    assert assign("min_heap", [5, 5, 5, 5], 2) == [1, 0, 1, 0]
    assert assign("topp_heap", [5, 5, 5, 5], 2) == [0, 1, 0, 1]


def test_min_heap_gives_all_chunks_without_a_pair_to_the_lowest_rank_until_it_is_full():
    # 9 to rank 0, 1 to rank 1; then rank 1 is the lowest until it holds three.
    assert assign("min_heap", [9, 1, 0, 0, 0, 0], 2) == [0, 1, 0, 0, 1, 1]


def test_min_heap_deals_out_what_the_ranks_do_not_divide():
    assert assign("min_heap", [5, 4, 3], 2) == [0, 1, 1]


def test_sequential_select_gives_the_first_ranks_one_more():
    assert assign("sequential_select", [1, 9, 1, 1, 1], 3) == [0, 0, 1, 1, 2]


def test_topp_heap_prefers_the_rank_that_holds_the_same_keys():
    areas, keys = [10, 9, 8, 7], [0, 50, 0, 50]

    # By work alone, 8 goes to the rank that has 9; looking at both ranks, to the one that holds its keys.
    assert assign("topp_heap", areas, 2, keys) == [0, 1, 1, 0]
    assert assign("topp_heap", areas, 2, keys, top_p=1.0) == [0, 1, 0, 1]


def test_batch_topp_heap_chooses_ranks_once_for_a_batch():
    # Both chunks of a batch go to the rank that was lowest when it began.
    assert assign("batch_topp_heap", [5, 4, 3, 2], 2, num_of_select_chunk=2) == [0, 0, 1, 1]
    assert assign("batch_topp_heap", [5, 4, 3, 2], 2) == [0, 1, 1, 0]


def test_keys_that_a_rank_holds_twice_count_twice():
    # 100 to 105 meets two keys that rank 0 holds twice, and three that rank 1, the lower one, holds once.
    areas, keys = [10, 10, 9, 5, 1, 1], [92, 102, 93, 100, 200, 200]

    assert assign("topp_heap", areas, 2, keys, top_p=1.0) == [0, 1, 0, 0, 1, 1]


def test_batch_topp_heap_looks_at_all_ranks_when_the_lowest_have_no_room_for_a_batch():
    # After three batches each rank has room for one, and rank 2 is the lowest. The next batch of two finds
    # no room there, so all three are looked at and keys decide: chunk 4 to rank 1, chunk 8 to rank 0.
    areas, keys = [2, 8, 8, 3, 3, 6, 8, 7, 3], [20, 3, 20, 0, 3, 3, 0, 3, 10]

    found = assign("batch_topp_heap", areas, 3, keys, num_of_select_chunk=2)

    assert found == [2, 0, 0, 2, 1, 2, 1, 1, 0]


def test_sorted_sequential_select_begins_with_the_last_chunk_of_the_largest_slice():
    # Chunks of 4, 3, 2, 1 pairs: two to rank 0, then it is full.
    document = [(0, 4, 0, 4, "causal")]

    assert assign_slices("sorted_sequential_select", document, 4, 2) == [1, 1, 0, 0]
    # One at a time to the rank with the least: 4; 3; 2 to the one with 3, which is full then.
    shared = assign_slices("sorted_sequential_select", document, 4, 2, allocation_ratio=0.25)
    assert shared == [0, 1, 1, 0]


def test_sorted_sequential_select_fills_up_with_chunks_that_see_nothing():
    # 9 pairs to rank 0, 3 to rank 1; then rank 1 is the lowest until it is full.
    rows = [(1, 2, 0, 3, "full"), (4, 5, 0, 9, "full")]

    assert assign_slices("sorted_sequential_select", rows, 6, 2) == [1, 1, 1, 0, 0, 0]


def test_backtracing_pruning_finds_what_the_heap_misses():
    # MagiAttention's own example: 19 and 17 by the heap, 18 and 18 at best.
    areas = [8, 7, 6, 5, 4, 2, 2, 2]

    def sums(ranks):
        return [sum(a for a, r in zip(areas, ranks, strict=True) if r == rank) for rank in (0, 1)]

    assert sorted(sums(assign("min_heap", areas, 2))) == [17, 19]
    assert sums(assign("backtracing_pruning", areas, 2)) == [18, 18]


def test_backtracing_pruning_gives_up_in_words(monkeypatch):
    monkeypatch.setattr(backtracking, "_MOST_TRIES", 10)

    with pytest.raises(ValueError, match="of 8 chunks to cp_size=2 ranks in 10 placements; use fewer chunks"):
        assign("backtracing_pruning", [8, 7, 6, 5, 4, 2, 2, 2], 2)


@pytest.mark.parametrize("name", ["lower_bound", "dynamic_programming", "binary_search", "random_select", ""])
def test_what_is_not_supported_is_refused_with_what_is(name):
    with pytest.raises(ValueError, match=f"algorithm='{name}' is not supported; supported: min_heap, "):
        make_solver(name, {})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("min_heap", {"top_p": 0.5}, "algorithm 'min_heap' has no top_p; it has: no option"),
        ("topp_heap", {"allocation_ratio": 1}, "'topp_heap' has no allocation_ratio; it has: top_p"),
        ("topp_heap", {"top_p": 1.5}, "top_p must be a number from 0 to 1, got 1.5"),
        ("batch_topp_heap", {"top_p": "x"}, "top_p must be a number from 0 to 1, got 'x'"),
        (
            "batch_topp_heap",
            {"num_of_select_chunk": 0},
            "num_of_select_chunk must be an integer of at least 1",
        ),
        ("sorted_sequential_select", {"allocation_ratio": -0.1}, "allocation_ratio must be a number from 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_solver(name, options)


def test_only_two_take_uneven_shards():
    assert solver_names(uneven=True) == ["min_heap", "sequential_select"]
    assert len(solver_names(uneven=False)) == 6


def test_options_make_the_same_solver_again():
    for name in solver_names(uneven=False):
        solver = make_solver(name, {})
        assert make_solver(name, solver.options) == solver


@pytest.mark.parametrize("algorithm", ["topp_heap", "batch_topp_heap"])
def test_keys_that_two_ranges_hold_count_by_the_sum_of_both_sides_less_one(algorithm):
    rows = [
        (0, 4, 0, 10, "full"),
        (0, 4, 0, 10, "full"),
        (4, 8, 20, 55, "full"),
        (8, 9, 0, 10, "full"),
        (8, 9, 0, 10, "full"),
        (8, 9, 20, 55, "full"),
    ]
    grid = ChunkGrid(total=16, pad_size=0, cp_size=2, chunk_size=4)
    work = ChunkWork.measure(grid, MaskSlices.read(rows))
    assert work.areas.tolist() == [80, 140, 55, 0]

    ranks = make_solver(algorithm, {"top_p": 1.0}).assign(work)

    # Chunk 2 shares 10 keys, held twice by each, with chunk 0: 10 * (2 + 2 - 1); and 35 with chunk 1.
    assert ranks.tolist() == [1, 0, 0, 1]
