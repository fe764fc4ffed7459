import json

import numpy as np
import pytest
import torch

from ringfeed.sharding.layouts import make_layout, read_layout
from ringfeed.sharding.piece_cost import PieceCost

NAMES = ["te", "head_tail", "contiguous", "whole_document", "magi", "identity"]
every_name = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize(
    ("name", "length_multiples", "base_multiples"),
    [
        ("te", [1, 4, 16], [1, 4, 16]),
        ("head_tail", [1, 1, 1], [2, 4, 16]),
        ("contiguous", [1, 1, 1], [1, 2, 8]),
        ("whole_document", [1, 1, 1], [1, 2, 8]),
        ("identity", [1, 1, 1], [1, 1, 1]),
    ],
)
def test_multiples_at_cp_1_2_and_8(name, length_multiples, base_multiples):
    layout = make_layout(name)

    assert [layout.length_multiple(cp_size) for cp_size in (1, 2, 8)] == length_multiples
    assert [layout.base_multiple(cp_size) for cp_size in (1, 2, 8)] == base_multiples


@pytest.mark.parametrize(
    ("name", "cp_size", "tp_size", "unit", "expected"),
    [
        ("te", 2, 1, 1, 4),
        ("te", 2, 3, 1, 12),
        ("te", 2, 2, 16, 64),
        ("te", 1, 1, 16, 16),
        ("head_tail", 4, 1, 3, 24),
        ("contiguous", 4, 1, 3, 12),
        ("identity", 2, 2, 1, 4),
    ],
)
def test_chunk_multiple_is_the_least_common_one(name, cp_size, tp_size, unit, expected):
    assert make_layout(name).chunk_multiple(cp_size=cp_size, tp_size=tp_size, unit=unit) == expected


def test_slots_are_padded_to_the_length_multiple():
    assert make_layout("te").slot_lengths([1, 4, 5], cp_size=2).tolist() == [4, 4, 8]
    assert make_layout("contiguous").slot_lengths(torch.tensor([1, 4, 5]), cp_size=2).tolist() == [1, 4, 5]


@every_name
def test_offsets_may_be_a_tensor_an_array_or_a_list(name):
    layout = make_layout(name)
    forms = [[0, 8, 16], np.array([0, 8, 16], dtype=np.int32), torch.tensor([0, 8, 16], dtype=torch.int32)]

    runs = [layout.index_map(form, cp_size=2, cp_rank=1).runs.tolist() for form in forms]

    assert runs == [runs[0]] * 3


@every_name
def test_a_slot_of_no_token_is_legal_and_owns_nothing(name):
    layout = make_layout(name)
    without = layout.index_maps([0, 8, 16], cp_size=2)

    with_empty = layout.index_maps([0, 0, 8, 8, 16, 16], cp_size=2)

    assert [m.runs.tolist() for m in with_empty] == [m.runs.tolist() for m in without]


@every_name
def test_a_chunk_of_no_token_has_no_run(name):
    assert [len(m.runs) for m in make_layout(name).index_maps([0, 0], cp_size=2)] == [0, 0]


@every_name
@pytest.mark.parametrize(
    ("padded", "message"),
    [
        ([0], "at least 2 offsets"),
        ([8, 16], "begin at 0, but slot 0 begins at 8"),
        ([0, 8, 0, 16], "slot 1 begins at 8 and ends at 0"),
    ],
)
def test_what_are_no_offsets_is_refused(name, padded, message):
    layout = make_layout(name)

    with pytest.raises(ValueError, match=message):
        layout.index_map(padded, cp_size=2, cp_rank=0)
    with pytest.raises(ValueError, match=message):
        layout.index_maps(padded, cp_size=2)


@every_name
def test_real_offsets_that_do_not_fit_are_refused_by_slot(name):
    with pytest.raises(ValueError, match="slot 1 has 8 tokens of room"):
        make_layout(name).index_maps([0, 8, 16], cp_size=2, cu_seqlens=[0, 3, 12])


@every_name
@pytest.mark.parametrize(
    ("cp_size", "cp_rank", "message"),
    [(0, 0, "cp_size must be at least 1, got 0"), (2, 2, "cp_rank=2"), (2, -1, "cp_rank=-1")],
)
def test_ranks_that_do_not_exist_are_refused(name, cp_size, cp_rank, message):
    with pytest.raises(ValueError, match=message):
        make_layout(name).index_map([0, 8], cp_size=cp_size, cp_rank=cp_rank)


@every_name
def test_multiples_of_no_rank_are_refused(name):
    with pytest.raises(ValueError, match="cp_size must be at least 1, got 0"):
        make_layout(name).length_multiple(0)
    with pytest.raises(ValueError, match="tp_size must be at least 1, got 0"):
        make_layout(name).chunk_multiple(cp_size=2, tp_size=0)


def test_te_names_the_first_slot_that_breaks_the_multiple():
    with pytest.raises(ValueError, match=r"slot 1 has 6 tokens, not a multiple of 4 \(2 \* cp_size=2\)"):
        make_layout("te").index_map([0, 4, 10, 16], cp_size=2, cp_rank=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("head_tail", r"has 10 tokens, .*'head_tail' at cp_size=2 needs a multiple of 4.*\[8, 12\]"),
        ("contiguous", r"has 10 tokens, .*'contiguous' at cp_size=4 needs a multiple of 4.*\[8, 12\]"),
        ("whole_document", r"has 10 tokens, .*'whole_document' at cp_size=4 needs a multiple of 4"),
    ],
)
def test_chunk_that_breaks_the_layouts_multiple_is_refused_with_neighbours(name, message):
    with pytest.raises(ValueError, match=message):
        make_layout(name).index_maps([0, 3, 10], cp_size=2 if name == "head_tail" else 4)


@every_name
def test_inputs_are_left_as_they_were(name):
    padded, real = torch.tensor([0, 8, 16]), np.array([0, 5, 5])

    make_layout(name).index_maps(padded, cp_size=2, cu_seqlens=real)

    assert (padded.tolist(), real.tolist()) == ([0, 8, 16], [0, 5, 5])


@pytest.mark.parametrize("name", ["magic", "", "TE"])
def test_unknown_layout_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"known: contiguous, head_tail, identity, magi, .*whole_document"):
        make_layout(name)


def test_unknown_option_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'te' has no option 'threshold'; it has: none"):
        make_layout("te", threshold=8)
    with pytest.raises(ValueError, match="'whole_document' has no option 'limit'; it has: threshold, cost"):
        make_layout("whole_document", limit=8)


@pytest.mark.parametrize(
    "layout",
    [
        *(make_layout(name) for name in NAMES),
        make_layout("whole_document", threshold=7, cost="tokens"),
        make_layout("whole_document", cost=PieceCost(per_token=3, per_pair=2)),
    ],
    ids=repr,
)
def test_name_and_options_make_the_same_layout_again(layout):
    options = json.loads(json.dumps(layout.options))

    assert make_layout(layout.name, **options) == layout


def test_only_te_and_identity_take_many_packs_in_a_chunk():
    assert [name for name in NAMES if make_layout(name).holds_many_packs] == ["te", "identity"]


@pytest.mark.parametrize("threshold", [0, -1, 2.5, "8"])
def test_whole_document_refuses_a_threshold_that_is_none(threshold):
    with pytest.raises(ValueError, match="threshold must be an integer of at least 1"):
        make_layout("whole_document", threshold=threshold)


def test_whole_document_by_default_dual_chunks_from_an_eighth_of_a_share():
    # T = 64, R = 2: documents of 4 tokens and more are cut, one of 3 is not.
    padded, real = np.cumsum([0, 4, 3, 57]), np.cumsum([0, 4, 3, 0])

    ranks = make_layout("whole_document").index_maps(padded, cp_size=2, cu_seqlens=real)

    assert [m.inverse[:7].tolist() for m in ranks] == [[0, -1, -1, 1, 2, 3, 4], [-1, 0, 1, -1, -1, -1, -1]]


def test_whole_document_balances_by_the_cost_it_is_given():
    # The 6 goes first, to rank 0. By pairs its work (21) exceeds that of two 4s (20), which rank 1
    # therefore gets both; by tokens the second 4 finds 6 against 4, the third 6 against 8.
    padded = np.cumsum([0, 6, 4, 4, 4, 22])
    real = np.cumsum([0, 6, 4, 4, 4, 0])

    def ranks(cost):
        layout = make_layout("whole_document", threshold=40, cost=cost)
        first = layout.index_map(padded, cp_size=2, cp_rank=0, cu_seqlens=real)
        return [slot for slot in range(4) if first.inverse[padded[slot]] >= 0]

    assert ranks("tokens") == [0, 3]
    assert ranks("causal") == [0]


@pytest.mark.parametrize("name", [["te"], ("te", {}), {"te": 1}, None, 3, "TE"])
def test_what_names_no_layout_is_refused_with_the_choices(name):
    with pytest.raises(ValueError, match=r"unknown layout .*; known: contiguous, .*, te, whole_document"):
        make_layout(name)


def test_a_layout_is_read_from_itself_or_its_name():
    layout = make_layout("whole_document", threshold=5)

    assert read_layout(layout) is layout
    assert read_layout("te") == make_layout("te")
