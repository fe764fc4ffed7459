"""When a layout may open a plan, and what a refusal says."""

import numpy as np
import pytest

from ringfeed.pipeline.opening import (
    OpenOptions,
    ViewSpec,
    check_chunk,
    check_footprints,
    count_slots,
    open_spec,
)
from ringfeed.sharding.layouts import make_layout


def opened(plan, layout="te", cp_size=2, **options):
    asked = OpenOptions(layout=make_layout(layout), cp_size=cp_size, **options)
    return open_spec(plan, asked, pad_id=9)


def footprint(plan, multiple):
    """The largest pack's slots, by a loop."""
    return max(
        sum(-(-n // multiple) * multiple for n in pack)
        for step in range(plan.num_steps)
        for pack in plan.step(step)["lengths"].to_pylist()
    )


def test_a_multiple_that_divides_the_plans_opens_it(plan):
    spec = opened(plan)

    assert (spec.pack_slots, spec.multiple) == (64, 4)
    assert (spec.positions, spec.boundary, spec.pad_id) == ("restart", "next", 9)


def test_views_pad_at_the_layouts_own_multiple(plan):
    assert opened(plan, cp_size=1).multiple == 1
    assert opened(plan, layout="head_tail", cp_size=4).multiple == 1


def test_a_larger_multiple_opens_where_every_pack_still_fits(make_plan):
    plan = make_plan(pack_tokens=128, balance="in_order")
    fits = [cp for cp in (4, 8, 16) if footprint(plan, 2 * cp) <= 128]
    assert fits, "the corpus must have a case that fits"

    for cp_size in fits:
        assert opened(plan, cp_size=cp_size).pack_slots == 128


def test_a_larger_multiple_is_refused_with_its_numbers(plan):
    largest = footprint(plan, 16)
    over = sum(
        sum(-(-n // 16) * 16 for n in pack) > 64
        for step in range(plan.num_steps)
        for pack in plan.step(step)["lengths"].to_pylist()
    )
    message = (
        rf"multiple of 4, layout 'te' at cp_size=8 pads them to 16: {over} of {plan.num_packs} packs "
        rf".* 64 slots .* enough is {largest}\. Pass slot_budget={largest} "
        rf".*--slot-budget {largest} .*--pad-multiple 16"
    )
    with pytest.raises(ValueError, match=message):
        opened(plan, cp_size=8)
    assert opened(plan, cp_size=8, slot_budget=largest).pack_slots == largest
    with pytest.raises(ValueError, match=f"enough is {largest}"):
        opened(plan, cp_size=8, slot_budget=largest - 16)


def test_a_multiple_that_no_plan_stores_is_scanned_when_reached(plan, open_source):
    source = open_source(plan, cp_size=3, slot_budget=66)
    assert source.spec.multiple == 6
    largest = footprint(plan, 6)

    with pytest.raises(ValueError, match=f"enough is {largest}"):
        list(map(source.step_facts, range(source.num_steps)))
    with pytest.raises(ValueError, match=f"enough is {largest}"):
        check_footprints(plan, source.spec)
    check_footprints(plan, opened(plan, cp_size=3, slot_budget=largest))


def test_a_budget_below_the_plans_must_still_hold_every_pack(plan):
    assert footprint(plan, 4) > 60
    with pytest.raises(ValueError, match="packs then take more than the 60 slots"):
        opened(plan, slot_budget=60)


@pytest.mark.parametrize(
    ("options", "needed", "nearest"),
    [
        ({"layout": "head_tail", "cp_size": 3}, 6, r"\[60, 66\]"),
        ({"layout": "contiguous", "cp_size": 5}, 5, r"\[60, 65\]"),
        ({"tp_size": 3}, 12, r"\[60, 72\]"),
        ({"unit": 16, "tp_size": 4}, 128, r"\[128\]"),
    ],
)
def test_a_pack_length_that_cannot_be_split_names_its_neighbours(plan, options, needed, nearest):
    with pytest.raises(ValueError, match=rf"multiple of {needed}; nearest valid: {nearest}.*slot_budget"):
        opened(plan, **options)


def test_tp_and_units_bind_the_chunk_not_the_pack(plan):
    # 64 slots are no multiple of cp * tp * unit = 128, two packs of them are.
    assert opened(plan, unit=16, tp_size=4, packs_per_chunk=2).pack_slots == 64


def test_several_packs_per_chunk_are_refused_by_layouts_that_take_one(plan):
    with pytest.raises(ValueError, match="packs_per_chunk=2: layout 'contiguous' takes one"):
        opened(plan, layout="contiguous", packs_per_chunk=2)


@pytest.mark.parametrize("field", ["tp_size", "unit", "packs_per_chunk", "slot_budget"])
def test_sizes_below_one_are_refused_by_name(plan, field):
    with pytest.raises(ValueError, match=f"{field}.*at least 1"):
        opened(plan, **{field: 0})


@pytest.fixture(scope="module")
def variable_plan(make_plan):
    return make_plan(pack_shape="variable", length_buckets="powers_of_two")


def test_a_variable_pack_is_rounded_up_to_what_the_run_can_split(make_plan):
    plan = make_plan(pack_shape="variable")

    assert [opened(plan).slots_of(np.array(n)) for n in ([3, 5], [7], [64], [])] == [12, 8, 64, 4]
    assert [opened(plan, unit=8).slots_of(np.array(n)) for n in ([3, 5], [17], [])] == [16, 32, 16]


def test_the_budget_must_be_a_length_that_the_run_can_split(variable_plan):
    with pytest.raises(ValueError, match=r"multiple of 12; nearest valid: \[60, 72\]"):
        opened(variable_plan, tp_size=3)
    assert opened(variable_plan, tp_size=3, slot_budget=72).slots_of(np.array([33])) == 72


def test_each_variable_pack_of_a_chunk_must_be_splittable(variable_plan):
    # Two fixed packs of 64 make a chunk of 128; two variable ones may be 64 and 32.
    with pytest.raises(ValueError, match="multiple of 128"):
        opened(variable_plan, unit=16, tp_size=4, packs_per_chunk=2)


def test_variable_packs_over_the_budget_are_refused_too(variable_plan):
    largest = footprint(variable_plan, 16)
    with pytest.raises(ValueError, match=f"enough is {largest}"):
        opened(variable_plan, cp_size=8)
    assert opened(variable_plan, cp_size=8, slot_budget=largest).pack_slots == largest


def test_slots_of_all_packs_are_counted(plan, variable_plan):
    spec = opened(variable_plan, layout="head_tail", cp_size=3, slot_budget=66)
    expected = 0
    for step in range(variable_plan.num_steps):
        for pack in variable_plan.step(step)["lengths"].to_pylist():
            power = next(2**i for i in range(7) if 2**i >= sum(pack))
            expected += min(-(-power // 6) * 6, 66)

    assert count_slots(variable_plan, spec) == expected
    assert count_slots(plan, opened(plan)) == plan.num_packs * 64


@pytest.mark.parametrize("layout", [make_layout("te"), make_layout("whole_document", threshold=32)])
@pytest.mark.parametrize("shape", ["fixed", "variable"])
def test_a_spec_comes_back_from_its_facts(plan, variable_plan, layout, shape):
    chosen = plan if shape == "fixed" else variable_plan
    spec = open_spec(chosen, OpenOptions(layout=layout, cp_size=2, unit=2), pad_id=9)

    again = ViewSpec.from_facts(spec.facts())
    assert again == spec
    check_chunk(again)
