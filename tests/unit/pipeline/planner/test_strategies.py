"""Small plans worked out by hand."""

import numpy as np
import pytest

every_strategy = pytest.mark.parametrize("balance", ["work", "best_fit", "in_order", "concat"])


@pytest.mark.parametrize("balance", ["work", "best_fit"])
def test_documents_that_fit_one_pack_make_one_pack(plan_lengths, balance):
    planned = plan_lengths([4000, 4000, 100], pack_tokens=8193, balance=balance)

    assert planned.documents == [[0, 1, 2]]


@pytest.mark.parametrize("balance", ["work", "best_fit"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_larger_pack_never_needs_more_packs(plan_lengths, seed, balance):
    lengths = np.random.default_rng(seed).integers(4000, 4193, size=3000)
    asked = {"packs_per_step": 4, "balance": balance}

    needed = [plan_lengths(lengths, pack_tokens=n, **asked).plan.num_packs for n in (8192, 8193)]

    assert needed[1] <= needed[0]


@pytest.mark.parametrize("balance", ["work", "best_fit", "in_order"])
def test_documents_that_fit_no_other_pack_stay_in_order(plan_lengths, balance):
    planned = plan_lengths([6, 6, 6], balance=balance)

    assert planned.documents == [[0], [1], [2]]


def test_best_fit_takes_the_fullest_pack_with_room(plan_lengths):
    # 7 | 6 | then 4 fits only beside the 6, 3 only beside the 7.
    planned = plan_lengths([6, 7, 3, 4], packs_per_step=2)

    assert planned.documents == [[0, 3], [1, 2]]


def test_best_fit_places_the_longest_first(plan_lengths):
    # In arrival order the three 3s would share a pack and each 7 would leave 3 slots free.
    planned = plan_lengths([3, 3, 3, 7, 7, 7], packs_per_step=3)

    assert sorted(map(sorted, planned.documents)) == [[0, 5], [1, 4], [2, 3]]


def test_packs_stand_in_the_arrival_order_of_their_longest_document(plan_lengths):
    # The pack of 6 and 4 is fuller, the pack of the 5 came first.
    planned = plan_lengths([5, 6, 4], packs_per_step=2)

    assert planned.documents == [[0], [1, 2]]


def test_next_fit_opens_a_pack_where_the_next_document_does_not_fit(plan_lengths):
    planned = plan_lengths([6, 7, 3, 4], balance="in_order")

    assert planned.documents == [[0], [1, 2], [3]]


def test_concat_chops_at_pack_ends(plan_lengths):
    planned = plan_lengths([6, 7, 3, 4], balance="concat")

    assert planned.packs == [
        [(0, 0, 6, 0), (1, 0, 4, 0)],
        [(1, 4, 3, 0), (2, 0, 3, 0), (3, 0, 4, 0)],
    ]


def test_concat_chops_where_slots_end(plan_lengths):
    # At multiple 4: 5 tokens take 8 slots, so 4 slots of the first pack are left for 4 tokens.
    planned = plan_lengths([5, 6], balance="concat", pack_tokens=12, pad_multiple=4)

    assert planned.packs == [[(0, 0, 5, 0), (1, 0, 4, 0)], [(1, 4, 2, 0)]]


def test_concat_cuts_a_long_document_at_pack_ends_only(plan_lengths):
    planned = plan_lengths([3, 25], balance="concat")

    assert planned.packs == [[(0, 0, 3, 0), (1, 0, 7, 0)], [(1, 7, 10, 0)], [(1, 17, 8, 0)]]


@every_strategy
def test_pieces_count_with_their_padding(plan_lengths, balance):
    # Padded to 4, each document of 5 takes 8: two of them do not fit 12.
    planned = plan_lengths([5, 5], balance=balance, pack_tokens=12, max_cp=2)

    assert planned.plan.num_packs == 2


@every_strategy
def test_only_the_last_step_is_short_and_none_is_empty(plan_lengths, balance):
    lengths = np.random.default_rng(0).integers(1, 11, size=101)
    planned = plan_lengths(lengths, balance=balance, packs_per_step=4, window=2)
    sizes = [len(step) for step in planned.steps]

    assert set(sizes[:-1]) == {4}
    assert 1 <= sizes[-1] <= 4


@pytest.mark.parametrize("window", [1, 2, 5])
def test_best_fit_moves_no_document_further_than_two_windows(plan_lengths, window):
    lengths = np.random.default_rng(0).integers(1, 65, size=3000)
    planned = plan_lengths(lengths, pack_tokens=64, packs_per_step=8, window=window)

    assert planned.report.displacement_max <= 2 * window


def test_best_fit_starves_no_document_where_the_window_is_one_pack(plan_lengths):
    # Each 9 alone fills its pack best, so the 2 would wait for ever if only fill counted.
    planned = plan_lengths([2, *[9] * 50], window=1)

    assert planned.documents.index([0]) <= 2


def test_steps_of_best_fit_are_not_sorted_by_length(plan_lengths):
    lengths = np.clip(np.random.default_rng(1).lognormal(3.0, 1.2, size=20_000), 1, 1024).astype(int)
    planned = plan_lengths(lengths, pack_tokens=1024, packs_per_step=8, window=16)
    longest = np.array([max(piece[2] for piece in pack) for pack in planned.packs])
    places = np.arange(len(longest)) % (16 * 8)

    # Place in the window says nothing of the longest document there.
    assert abs(np.corrcoef(places, longest)[0, 1]) < 0.1


def test_best_fit_wastes_next_to_nothing_on_many_short_documents(plan_lengths):
    lengths = np.clip(np.random.default_rng(1).lognormal(3.0, 1.2, size=20_000), 1, 1024).astype(int)
    report = plan_lengths(lengths, pack_tokens=1024, packs_per_step=8).report

    assert report.settled["fill"] > 0.9995


@every_strategy
def test_epochs_abut_inside_a_pack(plan_lengths, balance):
    planned = plan_lengths([4, 4], balance=balance, pack_tokens=16, epochs=2, packs_per_step=1)

    assert [sorted(pack) for pack in planned.packs] == [
        [(0, 0, 4, 0), (0, 0, 4, 1), (1, 0, 4, 0), (1, 0, 4, 1)]
    ]
