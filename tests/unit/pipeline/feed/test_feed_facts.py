"""A service's facts: the same after the wire, one fingerprint per run, everything else refused."""

import json
from dataclasses import replace

import pytest

from ringfeed.pipeline.feed_facts import MAX_FACTS_BYTES, FeedFacts
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.skip import skip_list


@pytest.mark.parametrize("layout", ["te", "magi", "whole_document", "identity"])
def test_facts_survive_the_wire(plan, open_source, layout):
    sent = FeedFacts.of_source(open_source(plan, layout=layout))

    got = FeedFacts.from_json(sent.to_json())

    assert got.to_dict() == sent.to_dict()
    assert got.fingerprint == sent.fingerprint


def test_the_fingerprint_is_the_run_and_not_how_far_it_is_planned(facts):
    later = facts.grown(num_steps=facts.num_steps + 5, is_growing=True, max_slots=99)

    assert (later.num_steps, later.is_growing, later.max_slots) == (facts.num_steps + 5, True, 99)
    assert later.fingerprint == facts.fingerprint


def test_another_run_has_another_fingerprint(plan, make_plan, open_source, facts):
    others = [
        open_source(plan, cp_size=1),
        open_source(plan, layout="contiguous"),
        open_source(plan, overlay=skip_list([3])),
        open_source(make_plan(seed=5)),
    ]

    found = {FeedFacts.of_source(source, block_bytes=4096).fingerprint for source in others}

    assert len(found | {facts.fingerprint}) == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("num_steps", "3"),
        ("num_steps", True),
        ("max_slots", -1),
        ("sources", "prose"),
        ("sources", [1]),
        ("is_growing", 1),
        ("replaced_steps", [[1]]),
        ("replaced_steps", [[1, "2"]]),
        ("recipe_fingerprint", None),
        ("spec", []),
        ("spec", {}),
        ("spec", {"layout": "unheard-of", "layout_options": {}}),
        ("more", 1),
    ],
)
def test_facts_of_another_kind_are_refused(facts, field, value):
    values = {**facts.to_dict(), field: value}

    with pytest.raises(ValueError, match=r"version|wrong kind|no whole spec|unknown|layout"):
        FeedFacts.from_json(json.dumps(values).encode())


def test_long_facts_are_refused_unread():
    with pytest.raises(ValueError, match="at most"):
        FeedFacts.from_json(b" " * (MAX_FACTS_BYTES + 1))


def test_blocks_hold_what_the_budget_allows_and_at_least_one_micro_batch(facts):
    place = RankPlace(dp_rank=0, dp_size=1, cp_rank=0, cp_size=2, packs_per_chunk=2)

    assert facts.batches_per_block(place) == 4096 // (2 * 32 * 8)
    assert replace(facts, block_bytes=1).batches_per_block(place) == 1
    assert facts.batches_per_block(place) == facts.batches_per_block(replace(place, cp_rank=1))
