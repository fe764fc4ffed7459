"""Requests: what goes over the wire comes back, and whatever else arrives is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.pipeline.feed_request import BLOCK_COLUMNS, MAX_REQUEST_BYTES, BlockRequest
from ringfeed.pipeline.ranks import RankPlace


def request(first=(0, 0), count=1, *, dp=(0, 1), cp=(0, 2), packs_per_chunk=1, columns=BLOCK_COLUMNS):
    place = RankPlace(
        dp_rank=dp[0], dp_size=dp[1], cp_rank=cp[0], cp_size=cp[1], packs_per_chunk=packs_per_chunk
    )
    return BlockRequest(
        place=place, first_step=first[0], first_micro_batch=first[1], num_micro_batches=count, columns=columns
    )


@given(
    numbers=st.tuples(*[st.integers(0, 10**9)] * 2, st.integers(1, 10**9)),
    dp_size=st.integers(1, 4096),
    columns=st.sampled_from([(), ("pieces",), ("pieces", "labels"), BLOCK_COLUMNS]),
)
def test_a_request_survives_the_wire(numbers, dp_size, columns):
    sent = request(numbers[:2], numbers[2], dp=(dp_size - 1, dp_size), columns=columns)

    assert BlockRequest.from_json(sent.to_json()) == sent
    assert len(sent.to_json()) < MAX_REQUEST_BYTES


@given(
    st.one_of(
        st.binary(max_size=64),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match="a block request"):
        BlockRequest.from_json(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("first_step", -1),
        ("first_step", 1 << 60),
        ("first_step", True),
        ("first_step", 1.0),
        ("first_micro_batch", "0"),
        ("num_micro_batches", 0),
        ("dp_size", 0),
        ("dp_rank", 1),
        ("cp_rank", 2),
        ("packs_per_chunk", None),
        ("columns", "pieces"),
        ("columns", [1]),
        ("columns", ["labels", "pieces"]),
        ("columns", ["input_ids"]),
        ("columns", ["pieces", "secrets"]),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(field, value):
    values = {**json.loads(request().to_json()), field: value}

    with pytest.raises(ValueError, match=field.split("_")[0]):
        BlockRequest.from_json(json.dumps(values).encode())


@pytest.mark.parametrize("change", [{"evil": 1}, {"columns": ...}])
def test_fields_too_many_or_too_few_are_refused(change):
    values = {**json.loads(request().to_json()), **change}
    values = {name: value for name, value in values.items() if value is not ...}

    with pytest.raises(ValueError, match=r"missing fields|unknown fields"):
        BlockRequest.from_json(json.dumps(values).encode())


@pytest.mark.parametrize("data", [b"[" * MAX_REQUEST_BYTES, b" " * (MAX_REQUEST_BYTES + 1)])
def test_deep_and_long_bytes_are_refused_before_they_hurt(data):
    with pytest.raises(ValueError, match=r"no JSON|at most 2048"):
        BlockRequest.from_json(data)


def test_a_block_runs_over_step_borders():
    asked = request((3, 2), 5)

    assert asked.batches(4) == [(3, 2), (3, 3), (4, 0), (4, 1), (4, 2)]
    assert list(asked.steps(4)) == [3, 4]


def test_cp_peers_share_a_build_and_nobody_else():
    mine = request((3, 2), 5, dp=(1, 2))

    assert mine.share_key == request((3, 2), 5, dp=(1, 2), cp=(1, 2), columns=("pieces",)).share_key
    assert mine.share_key != request((3, 2), 5, dp=(0, 2)).share_key
    assert mine.share_key != request((3, 2), 4, dp=(1, 2)).share_key


def test_a_service_takes_what_it_serves(facts):
    most = facts.batches_per_block(request(dp=(0, 2)).place)

    request((0, 1), most, dp=(0, 2)).check(facts)
    assert most == 4096 // (64 // 2 * 8)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (request(cp=(0, 4)), "--cp 4"),
        (request(dp=(0, 3)), r"dp_size may be one of \[1, 2, 4\]"),
        (request((0, 4)), "has 4 micro-batches"),
        (request((0, 0), 17), "at most 16"),
        (request((10**6, 0)), "is not served"),
    ],
)
def test_a_service_refuses_the_rest_and_says_what_would_do(facts, asked, told):
    with pytest.raises(ValueError, match=told):
        asked.check(facts)


def test_the_last_step_binds_a_block_that_begins_before_it(facts):
    last = facts.num_steps - 1

    request((last - 1, 3), 5).check(facts)
    with pytest.raises(ValueError, match=f"step {last + 1} is not served: there are steps 0 to {last}"):
        request((last - 1, 3), 6).check(facts)
    request((last - 1, 3), 6).check(replace(facts, num_steps=last + 2))
