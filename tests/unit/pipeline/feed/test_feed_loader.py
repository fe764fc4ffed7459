"""A Loader over a plan that is still being made, and one whose service is silent."""

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from ringfeed.pipeline.block_fetcher import FetcherStatus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.local_fetcher import LocalFetcher

PLACE: dict[str, Any] = {"dp_rank": 1, "dp_size": 2, "cp_rank": 0, "cp_size": 2}


class Planned:
    """A supply over a real builder that knows ``num_steps`` steps so far; the test plans more."""

    def __init__(self, builder, num_steps):
        self._builder = builder
        self.end = builder.facts().num_steps
        self.num_steps = num_steps
        self.slots = 1

    def facts(self):
        is_growing = self.num_steps < self.end
        facts = self._builder.facts()
        return facts.grown(
            num_steps=self.num_steps,
            is_growing=is_growing,
            max_slots=self.slots if is_growing else facts.max_slots,
        )

    def block(self, request):
        request.check(replace(self._builder.facts(), num_steps=self.num_steps))
        return self._builder.block(request)


@pytest.fixture
def supply(make_builder):
    return Planned(make_builder(block_bytes=1024), 2)


@pytest.fixture
def expected(plan):
    with Loader(plan.path, layout="te", **PLACE) as loader:
        return [batch.info.digest for batch in loader]


def later(seconds, what):
    timer = threading.Timer(seconds, what)
    timer.start()
    return timer


def plan_on(supply):
    supply.num_steps = supply.end


def test_training_begins_before_the_plan_is_made_and_goes_on_to_its_end(supply, expected):
    with Loader(LocalFetcher(supply), **PLACE) as loader:
        assert loader.num_steps == 2
        found = [batch.info.digest for batch in islice(loader, 4)]
        timer = later(0.3, lambda: plan_on(supply))
        found += [batch.info.digest for batch in loader]
        timer.join()

    assert found == expected


def test_a_state_beyond_what_is_planned_waits_for_the_planner(supply, plan, expected):
    with Loader(plan.path, layout="te", **PLACE) as whole:
        list(islice(whole, 19))
        state = whole.state_dict()
    with Loader(LocalFetcher(supply), **PLACE) as loader:
        timer = later(0.3, lambda: plan_on(supply))
        loader.load_state_dict(state)
        timer.join()

        assert [batch.info.digest for batch in loader] == expected[19:]


def test_whole_steps_of_a_growing_plan_need_their_width(supply, plan):
    with (
        Loader(LocalFetcher(supply), **PLACE) as loader,
        pytest.raises(ValueError, match="pass max_documents="),
    ):
        loader.steps()
    with Loader(LocalFetcher(supply), max_documents=9, **PLACE) as loader:
        assert next(iter(loader.steps())).tensors["cu_seqlens"].shape == (2, 10)


class Silent:
    """A fetcher that says what it serves and then nothing."""

    def __init__(self, builder):
        self.builder = builder
        self.futures = []

    def facts(self):
        return self.builder.facts()

    def fetch(self, request):  # noqa: ARG002
        self.futures.append(Future())
        return self.futures[-1]

    def status(self):
        return FetcherStatus(asked="nobody", bytes_held={})

    def close(self):
        for future in self.futures:
            future.cancel()


def test_a_trainer_saves_and_leaves_while_its_service_is_silent(make_builder):
    begin = time.monotonic()
    fetcher = Silent(make_builder())
    loader = Loader(fetcher, **PLACE)
    batches = iter(loader)
    while not fetcher.futures and time.monotonic() < begin + 10:
        time.sleep(0.01)

    assert loader.state_dict()["step"] == 0
    loader.close()

    with pytest.raises((StopIteration, RuntimeError)):
        next(batches)
    assert fetcher.futures[0].cancelled()
    assert time.monotonic() - begin < 15


@pytest.mark.parametrize("given", [{"token": "a-token-of-some-length"}, {"tls": __file__}])
def test_a_fetcher_has_token_and_certificates_of_its_own(supply, monkeypatch, given):
    fetcher = LocalFetcher(supply)
    closed = []
    monkeypatch.setattr(fetcher, "close", lambda: closed.append(fetcher))
    with pytest.raises(ValueError, match=r"are for the URL of a service, a LocalFetcher has its own"):
        Loader(fetcher, **PLACE, **given)
    assert closed == [fetcher]
