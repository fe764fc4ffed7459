"""How many slots a pack has."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.pipeline.pack_lengths import LengthBuckets, PackLengths, PackShape

FIXED: dict[str, Any] = {"shape": PackShape.FIXED}
VARIABLE: dict[str, Any] = {"shape": PackShape.VARIABLE}
BUCKETS: dict[str, Any] = {**VARIABLE, "buckets": LengthBuckets.POWERS_OF_TWO}
EIGHTHS: dict[str, Any] = {**VARIABLE, "buckets": LengthBuckets.EIGHTHS}


def lengths_of(footprints, *, budget=64, multiple=4, **asked):
    rule = PackLengths(budget=budget, multiple=multiple, **asked)
    together = rule.of(np.array(footprints, dtype=np.int64)).tolist()
    assert [rule.of_pack(footprint) for footprint in footprints] == together
    return together


def test_fixed_packs_have_the_budget():
    assert lengths_of([0, 1, 64], **FIXED) == [64, 64, 64]


def test_a_variable_pack_is_its_footprint_rounded_up():
    assert lengths_of([1, 4, 5, 60, 61, 64], **VARIABLE) == [4, 4, 8, 60, 64, 64]


def test_the_all_padding_pack_is_the_smallest_there_is():
    assert lengths_of([0], **VARIABLE) == [4]
    assert lengths_of([0], **BUCKETS) == [4]
    assert PackLengths(budget=64, multiple=8, **VARIABLE).padding == 8


def test_powers_of_two_round_up_to_the_next_one():
    assert lengths_of([4, 5, 8, 9, 16, 17, 33, 64], **BUCKETS) == [4, 8, 8, 16, 16, 32, 64, 64]


def test_a_power_that_the_layout_cannot_split_gives_the_next_multiple():
    assert lengths_of([1, 8, 9, 20, 40], budget=66, multiple=6, **BUCKETS) == [6, 12, 18, 36, 66]


def test_eighths_of_the_budget_are_rounded_up_to_what_can_be_split():
    assert lengths_of([0, 1, 8, 9, 57, 64], **EIGHTHS) == [8, 8, 8, 16, 64, 64]
    # An eighth of 90 is 11.25, which multiples of 6 hold as 12: seven of them, then the budget.
    assert lengths_of([12, 13, 84, 85, 90], budget=90, multiple=6, **EIGHTHS) == [12, 24, 84, 90, 90]
    assert len(set(lengths_of(range(1, 4097), budget=4096, **EIGHTHS))) == 8


def test_the_budget_is_the_largest_bucket_of_any_run():
    # A slot budget given to a loader need not be a power of two.
    assert lengths_of([31, 33, 96], budget=96, **BUCKETS) == [32, 64, 96]


@pytest.mark.parametrize("power", range(31))
def test_powers_of_two_are_exact_to_the_largest_offset(power):
    edge = 1 << power
    assert lengths_of([edge], budget=1 << 30, multiple=1, **BUCKETS) == [edge]
    if power < 30:
        assert lengths_of([edge + 1], budget=1 << 30, multiple=1, **BUCKETS) == [2 * edge]


@given(
    footprint=st.integers(0, 240),
    multiple=st.sampled_from([1, 2, 6, 8, 12]),
    rule=st.sampled_from([VARIABLE, BUCKETS, EIGHTHS]),
)
def test_a_length_holds_its_pack_and_can_be_split(footprint, multiple, rule):
    (length,) = lengths_of([footprint], budget=240, multiple=multiple, **rule)

    assert max(1, footprint) <= length <= 240
    assert length % multiple == 0


def test_buckets_of_fixed_packs_are_refused():
    with pytest.raises(ValueError, match=r"length_buckets='powers_of_two'.*pack_shape=variable"):
        PackLengths(budget=64, multiple=4, buckets=LengthBuckets.POWERS_OF_TWO)


def test_a_budget_that_is_no_bucket_names_its_neighbours():
    rule = PackLengths(budget=96, multiple=4, **BUCKETS)
    with pytest.raises(ValueError, match=r"pack_tokens=96 is no power of two.*nearest valid: \[64, 128\]"):
        rule.check_budget("pack_tokens")
    PackLengths(budget=96, multiple=4, **VARIABLE).check_budget("pack_tokens")


@given(
    footprint=st.integers(0, 512),
    multiple=st.sampled_from([1, 2, 8, 64]),
    rule=st.sampled_from([BUCKETS, EIGHTHS]),
)
def test_a_pack_has_the_smallest_bucket_that_holds_it(footprint, multiple, rule):
    lengths = PackLengths(budget=512, multiple=multiple, **rule)
    buckets = lengths.bucket_lengths()
    assert lengths.of_pack(footprint) == buckets[np.searchsorted(buckets, footprint)]
    assert lengths.of(buckets).tolist() == buckets.tolist()
    assert buckets[-1] == 512


def test_packs_of_any_length_have_no_buckets():
    assert PackLengths(budget=512, multiple=8, **VARIABLE).bucket_lengths().tolist() == []
