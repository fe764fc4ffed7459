import pytest

from ringfeed.sharding.piece_cost import CAUSAL, PieceCost
from ringfeed.sharding.placement_kernels import _work


def test_causal_work_counts_query_key_pairs():
    # Tokens 2, 3 and 4 of a document see 3, 4 and 5 keys.
    assert CAUSAL.work(2, 5) == 12


def test_both_parts_add_up():
    assert PieceCost(per_token=10, per_pair=2).work(2, 5) == 54


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 3), (5, 900), (0, 2**31 - 1)])
def test_kernel_computes_the_same_work(start, stop):
    cost = PieceCost(per_token=3, per_pair=2)

    assert _work(start, stop, (cost.per_token, cost.per_pair)) == cost.work(start, stop)


@pytest.mark.parametrize("cost", [CAUSAL, PieceCost(per_token=1), PieceCost(per_token=5, per_pair=7)])
def test_json_form_reads_back(cost):
    assert PieceCost.read(cost.to_json()) == cost


@pytest.mark.parametrize("value", ["quadratic", {}, {"per_flop": 1}, None, 3, lambda length: length])
def test_what_is_no_cost_is_refused(value):
    with pytest.raises(ValueError, match=r"neither one of \['causal', 'tokens'\] nor a mapping"):
        PieceCost.read(value)


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_coefficients_are_whole_numbers(value):
    with pytest.raises(ValueError, match="per_pair must be an integer of at least 0"):
        PieceCost(per_pair=value)


def test_a_piece_must_cost_something():
    with pytest.raises(ValueError, match="both 0"):
        PieceCost()


def test_work_beyond_int64_is_refused():
    PieceCost(per_pair=2**20).check_range(2**20)
    with pytest.raises(ValueError, match="more work than int64 holds"):
        PieceCost(per_pair=2**30).check_range(2**20)
