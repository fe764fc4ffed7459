"""Whom requests go to: peers to one builder, neighbours first, failures last, and few move at a change."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.pipeline.feed_request import BlockRequest
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.workers.builder_choice import BuilderChoice


@dataclass(frozen=True)
class Member:
    name: str
    node_id: str = "n0"


def members(count, *, nodes=1):
    return [Member(f"builder-{i}", f"n{i % nodes}") for i in range(count)]


def request(step=0, *, dp_rank=0, cp_rank=0):
    place = RankPlace(dp_rank=dp_rank, dp_size=8, cp_rank=cp_rank, cp_size=8)
    return BlockRequest(place=place, first_step=step, first_micro_batch=0, num_micro_batches=1)


def first(choice, builders, asked, now=0.0):
    return choice.order(builders, asked.share_key, now=now)[0].name


keys = st.tuples(st.integers(0, 1 << 40), st.integers(0, 64), st.integers(0, 512))


@given(step=st.integers(0, 1 << 39), dp_rank=st.integers(0, 7), count=st.integers(1, 12))
def test_cp_peers_choose_the_same_builder_whoever_lists_them(step, dp_rank, count):
    asked = [request(step, dp_rank=dp_rank, cp_rank=rank) for rank in range(8)]
    builders = members(count)

    chosen = {first(BuilderChoice(), builders, one) for one in asked}
    chosen |= {first(BuilderChoice(node_id="elsewhere"), builders[::-1], one) for one in asked}

    assert len(chosen) == 1


@given(
    st.lists(keys, min_size=1, max_size=40, unique=True),
    st.integers(2, 9),
    st.integers(0, 8),
    st.integers(1, 3),
)
def test_a_builder_that_goes_moves_its_own_share_alone_and_to_the_second_choice(keys, count, gone, nodes):
    choice = BuilderChoice(node_id="n0")
    builders = members(count, nodes=nodes)
    gone %= count
    left = [builder for i, builder in enumerate(builders) if i != gone]
    for key in keys:
        before = choice.order(builders, key, now=0.0)
        assert choice.order(left, key, now=0.0) == [b for b in before if b != builders[gone]]


@given(keys, st.integers(1, 9), st.integers(1, 4))
def test_neighbours_come_before_all_others(key, count, nodes):
    order = BuilderChoice(node_id="n0").order(members(count, nodes=nodes), key, now=0.0)

    assert [b.node_id != "n0" for b in order] == sorted(b.node_id != "n0" for b in order)


@given(keys, st.integers(1, 9), st.sets(st.integers(0, 8)), st.integers(1, 3))
def test_who_failed_comes_last_for_a_while_the_longest_rested_first(key, count, failing, nodes):
    choice = BuilderChoice(node_id="n0", rest_seconds=5.0)
    builders = members(count, nodes=nodes)
    usual = choice.order(builders, key, now=0.0)
    failing = sorted(i for i in failing if i < count)
    for age, i in enumerate(failing):
        choice.failed(builders[i].name, now=100.0 + age / 100)

    order = choice.order(builders, key, now=101.0)

    bad = [builders[i] for i in failing]
    assert order == [b for b in usual if b not in bad] + bad
    assert choice.order(builders, key, now=106.0) == usual
    for builder in bad:
        choice.forgive(builder.name)
    assert choice.order(builders, key, now=101.0) == usual


def test_blocks_spread_over_the_builders():
    builders = members(4)
    found = Counter(
        first(BuilderChoice(), builders, request(step, dp_rank=rank))
        for step in range(500)
        for rank in (0, 7)
    )

    assert found.keys() == {b.name for b in builders}
    assert min(found.values()) > 200


def test_who_fails_again_rests_again():
    choice = BuilderChoice(rest_seconds=5.0)
    choice.failed("builder-0", now=0.0)
    choice.failed("builder-0", now=4.0)

    assert choice.is_resting("builder-0", now=8.9)
    assert not choice.is_resting("builder-0", now=9.0)


@pytest.mark.parametrize("change", [{"first_step": 1}, {"first_micro_batch": 1}, {"num_micro_batches": 2}])
def test_another_block_may_go_elsewhere(change):
    """Not proven of one pair: over many builders another key has another order."""
    builders = members(64)
    one, other = request(), replace(request(), **change)

    assert BuilderChoice().order(builders, one.share_key, now=0.0) != BuilderChoice().order(
        builders, other.share_key, now=0.0
    )


def test_nobody_is_an_empty_order():
    assert BuilderChoice().order([], (1, 2), now=0.0) == []
