"""L1 and State over Flight, from a process of feeders: the batches that the plan gives."""

from itertools import islice
from typing import Any

import pytest

from ringfeed.sharding.layouts import make_layout

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("te", {}),
    ("head_tail", {}),
    ("contiguous", {}),
    ("whole_document", {}),
    ("magi", {}),
    ("magi", {"uneven": True}),
    ("ptrr", {"block": 16}),
    ("identity", {}),
]


@pytest.fixture(scope="module")
def urls(start_for_module):
    servers = [{"layout": [name, options], "cp": 2} for name, options in LAYOUTS]
    return start_for_module(*servers).urls


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[name for name, _ in LAYOUTS])
def test_flight_gives_the_bytes_of_the_plan(urls, plan, load, assert_same_batches, number):
    name, options = LAYOUTS[number]
    for rank in range(2):
        place = {"cp": (rank, 2), "dp": (rank, 2)}
        with load(urls[number], **place) as loader:
            assert_same_batches(loader, load(plan, layout=make_layout(name, **options), **place))


@pytest.mark.parametrize("columns", [["labels"], ["input_ids", "cu_seqlens"], ["padding_mask"]])
def test_a_pipeline_stage_gets_its_columns_and_the_same_facts(urls, plan, load, assert_same_batches, columns):
    place = {"cp": (1, 2), "columns": columns, "packs_per_chunk": 2}
    with load(urls[0], **place) as loader:
        assert_same_batches(loader, load(plan, layout="te", **place))


def test_a_state_goes_on_over_flight_and_back(urls, plan, load, assert_same_batches):
    expected = list(load(plan, layout="te"))
    found: list[Any] = []
    state: dict[str, Any] | None = None
    for number, source in enumerate([urls[0], plan, urls[0], urls[0]]):
        with load(source, layout="te") as loader:
            if state is not None:
                loader.load_state_dict(state)
            found += list(islice(loader, 7 if number < 3 else None))
            state = loader.state_dict()

    assert_same_batches(found, expected)


def test_a_seek_backwards_gives_the_same_again(urls, load, assert_same_batches):
    with load(urls[2], prefetch_bytes=1 << 20) as loader:
        list(islice(loader, 5))
        state = loader.state_dict()
        rest = list(loader)
        for _ in range(3):
            loader.load_state_dict(state)
            assert_same_batches(islice(loader, 2), rest[:2])
        loader.load_state_dict(state)
        assert_same_batches(loader, rest)
