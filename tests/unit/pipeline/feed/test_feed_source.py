"""A rank's share of a run from a service: waits, seeks, damage, a plan that grows, stalls that speak."""

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from ringfeed.pipeline.block_fetcher import FetcherStatus
from ringfeed.pipeline.feed_source import FeedSource
from ringfeed.pipeline.feed_stall import Patience
from ringfeed.pipeline.local_fetcher import LocalFetcher
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.ranks import RankPlace

PLACE = RankPlace(dp_rank=1, dp_size=2, cp_rank=1, cp_size=2)
NEVER = threading.Event()
QUICK = Patience(warn_seconds=0.1, fail_seconds=20, poll_seconds=0.01)


class Controlled:
    """A fetcher over a real builder whose answers the test can hold back, damage, or let fail."""

    def __init__(self, builder):
        self.builder = builder
        self.asked = []
        self.held_back = []
        self.hold = False
        self.damage = 0
        self.closed = False

    def facts(self):
        return self.builder.facts()

    def fetch(self, request):
        self.asked.append(request)
        future: Future = Future()
        if self.hold:
            self.held_back.append((request, future))
        else:
            self._answer(request, future)
        return future

    def release(self):
        self.hold = False
        for request, future in self.held_back:
            if not future.cancelled():
                self._answer(request, future)
        self.held_back.clear()

    def status(self):
        return FetcherStatus(asked="builder 3, asked once", bytes_held={"builder 3": 5_000_000})

    def close(self):
        self.closed = True

    def _answer(self, request, future):
        try:
            block = self.builder.block(request)
        except ValueError as error:
            future.set_exception(error)
            return
        if self.damage:
            self.damage -= 1
            block = replace(block, header=block.header[:-1] + b"!")
        future.set_result(block)


@pytest.fixture
def fetcher(make_builder):
    return Controlled(make_builder(block_bytes=1024))


@pytest.fixture
def feed(fetcher):
    source = FeedSource(fetcher, place=PLACE, window_bytes=4000, patience=QUICK)
    yield source
    source.close()


def views_of(source, step, micro_batch):
    share = source.step_share(step, PLACE)
    packs = [pack for pack in share.packs[micro_batch].tolist() if pack >= 0]
    return [source.rank_view(step, pack, cp_rank=PLACE.cp_rank).input_ids.tolist() for pack in packs]


def everything(source):
    found = {}
    for step in range(source.num_steps):
        for micro_batch in range(2):
            assert source.wait_for(step, micro_batch, stop=NEVER)
            found[step, micro_batch] = views_of(source, step, micro_batch)
    return found


def test_it_gives_what_the_plan_gives(feed, open_source, plan):
    assert everything(feed) == everything(open_source(plan))
    assert not feed.wait_for(feed.num_steps, 0, stop=NEVER)


def test_it_says_of_the_run_what_the_plan_says(feed, open_source, plan):
    source = open_source(plan)

    for name in (
        "num_steps",
        "packs_per_step",
        "recipe_fingerprint",
        "sources",
        "num_documents",
        "overlay_digest",
    ):
        assert getattr(feed, name) == getattr(source, name), name
    assert feed.max_slots() == source.max_slots()
    assert feed.spec.facts() == source.spec.facts()
    assert [feed.chain(step) for step in (-1, 0, 7)] == [source.chain(step) for step in (-1, 0, 7)]


def test_what_nobody_waited_for_is_fetched_in_any_order(feed, open_source, plan):
    source = open_source(plan)
    for step, micro_batch in ((9, 1), (0, 0), (9, 0), (3, 1)):
        assert views_of(feed, step, micro_batch) == views_of(source, step, micro_batch)


def test_a_known_step_costs_no_request(feed, fetcher):
    feed.wait_for(4, 0, stop=NEVER)
    count = len(fetcher.asked)

    feed.chain(4)
    views_of(feed, 4, 0)

    assert len(fetcher.asked) == count
    feed.chain(15)
    assert fetcher.asked[count:] == [
        replace(fetcher.asked[0], columns=(), first_step=15, first_micro_batch=0, num_micro_batches=1)
    ]


@pytest.mark.parametrize(
    "ask",
    [
        lambda feed: feed.rank_view(0, 0, cp_rank=0),
        lambda feed: feed.step_share(0, replace(PLACE, dp_rank=0)),
        lambda feed: feed.step_share(0, replace(PLACE, dp_size=4)),
    ],
)
def test_the_share_of_another_rank_is_refused(feed, ask):
    with pytest.raises(ValueError, match="open another"):
        ask(feed)


def test_a_pack_or_step_that_is_not_there_is_refused(feed):
    own = set(feed.step_share(0, PLACE).packs.ravel().tolist())
    other = next(pack for pack in range(4) if pack not in own)

    with pytest.raises(ValueError, match=f"step 0 has no pack {other} for dp rank 1"):
        feed.rank_view(0, other, cp_rank=1)
    with pytest.raises(ValueError, match=r"step 20 is not served: there are steps 0 to 19"):
        feed.step_share(20, PLACE)


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (replace(PLACE, cp_size=4), "--cp 4"),
        (replace(PLACE, dp_size=3), r"dp_size may be one of"),
        (replace(PLACE, packs_per_chunk=8), "packs_per_chunk"),
    ],
)
def test_a_place_that_does_not_fit_is_refused_at_once(fetcher, place, told):
    with pytest.raises(ValueError, match=told):
        FeedSource(fetcher, place=place)
    assert not fetcher.asked


def test_a_damaged_block_is_asked_for_again(feed, fetcher, open_source, plan, caplog):
    fetcher.damage = 1

    with caplog.at_level(logging.WARNING, logger="ringfeed.feed"):
        assert feed.wait_for(0, 0, stop=NEVER)

    assert views_of(feed, 0, 0) == views_of(open_source(plan), 0, 0)
    assert "is damaged: its bytes changed; it is asked for again" in caplog.text


def test_a_block_that_stays_damaged_is_refused_and_asked_for_anew_the_next_time(feed, fetcher):
    fetcher.damage = 100
    with pytest.raises(CorruptDataError, match="header of a block is damaged"):
        feed.wait_for(0, 0, stop=NEVER)
    fetcher.damage = 0

    assert feed.wait_for(0, 0, stop=NEVER)


def test_a_slow_consumer_holds_no_more_than_its_budget(feed, fetcher):
    for step in range(feed.num_steps):
        feed.wait_for(step, 0, stop=NEVER)
        assert feed.bytes_held <= 4000
    assert len(fetcher.asked) < feed.num_steps * 2


def test_moving_elsewhere_drops_what_was_asked_for(feed, fetcher, eventually):
    fetcher.hold = True
    stop = threading.Event()
    waiting = threading.Thread(target=feed.wait_for, args=(10, 0), kwargs={"stop": stop})
    waiting.start()
    eventually(lambda: fetcher.held_back)
    stop.set()
    waiting.join(timeout=10)
    fetcher.hold = False

    assert feed.wait_for(2, 0, stop=NEVER)
    assert all(future.cancelled() for _, future in fetcher.held_back)


def test_a_wait_ends_when_it_is_stopped_or_the_source_is_closed(feed, fetcher, eventually):
    fetcher.hold = True
    stop = threading.Event()
    answers = []
    threads = [
        threading.Thread(target=lambda s=step: answers.append(feed.wait_for(s, 0, stop=stop)))
        for step in (5, 9)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: fetcher.held_back)

    stop.set()
    for thread in threads:
        thread.join(timeout=10)
    assert answers == [False, False]


def test_closing_ends_a_wait_and_the_fetcher(feed, fetcher, eventually):
    fetcher.hold = True
    raised = []

    def wait():
        try:
            feed.wait_for(0, 0, stop=NEVER)
        except ValueError as error:
            raised.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually(lambda: fetcher.held_back)
    feed.close()
    waiting.join(timeout=10)

    assert raised == ["the source was closed while it waited for a block"]
    assert fetcher.closed


def test_a_stall_names_step_and_holders_then_the_block_comes(feed, fetcher, caplog):
    fetcher.hold = True
    with caplog.at_level(logging.WARNING, logger="ringfeed.feed"):
        timer = threading.Timer(0.4, fetcher.release)
        timer.start()
        assert feed.wait_for(7, 1, stop=NEVER)
        timer.join()

    text = caplog.messages[0]
    assert "for step 7, micro-batch 1 (dp rank 1 of 2, cp rank 1 of 2)" in text
    assert "asked builder 3, asked once" in text
    assert "builder 3 5.0 MB" in text
    assert "0 blocks at this rank (budget 4,000 B) 0 B" in text
    assert feed.num_stalls == 1
    assert feed.seconds_waited > 0.3


def test_a_stall_without_end_fails(fetcher):
    feed = FeedSource(fetcher, place=PLACE, patience=Patience(fail_seconds=0.2))
    fetcher.hold = True

    with pytest.raises(TimeoutError, match=r"step 3, micro-batch 0.*gave up"):
        feed.wait_for(3, 0, stop=NEVER)
    fetcher.hold = False
    assert feed.wait_for(3, 0, stop=NEVER)


def test_the_error_of_the_service_is_raised_as_it_is(feed, fetcher, make_builder):
    fetcher.builder = make_builder(block_bytes=256)

    with pytest.raises(ValueError, match="this service gives at most 1 in a block"):
        feed.wait_for(0, 0, stop=NEVER)


class Growing:
    """A supply whose plan has more steps each time it is asked, up to the real end."""

    def __init__(self, builder, *, first, per_question):
        self._builder = builder
        self.num_steps = first
        self.per_question = per_question

    def facts(self):
        facts = self._builder.facts()
        self.num_steps = min(self.num_steps + self.per_question, facts.num_steps)
        return facts.grown(
            num_steps=self.num_steps,
            is_growing=self.num_steps < facts.num_steps,
            max_slots=facts.max_slots,
        )

    def block(self, request):
        request.check(replace(self._builder.facts(), num_steps=self.num_steps))
        return self._builder.block(request)


@pytest.mark.parametrize("per_question", [1, 3])
def test_a_plan_that_grows_is_followed_to_its_end(make_builder, open_source, plan, per_question):
    supply = Growing(make_builder(block_bytes=1024), first=0, per_question=per_question)
    with_window = FeedSource(LocalFetcher(supply), place=PLACE, patience=QUICK)
    assert (with_window.num_steps, with_window.is_growing) == (per_question, True)

    found, step = {}, 0
    while with_window.wait_for(step, 0, stop=NEVER):
        found[step] = [
            views_of(with_window, step, m) for m in range(2) if with_window.wait_for(step, m, stop=NEVER)
        ]
        step += 1

    source = open_source(plan)
    assert found == {s: [views_of(source, s, m) for m in range(2)] for s in range(source.num_steps)}
    with_window.close()


def test_steps_that_were_planned_meanwhile_are_fetched_before_they_are_wanted(make_builder):
    supply = Growing(make_builder(block_bytes=1024), first=0, per_question=2)
    feed = FeedSource(LocalFetcher(supply), place=PLACE, patience=QUICK)
    assert feed.wait_for(0, 0, stop=NEVER)
    assert feed._window.asked_to == 2 * 2

    for _ in range(2):
        time.sleep(2 * QUICK.poll_seconds)
        feed.wait_for(0, 1, stop=NEVER)

    assert feed._window.asked_to > 2 * 2
    feed.close()


def test_waiting_for_the_planner_is_told_and_can_be_stopped(make_builder, caplog):
    supply = Growing(make_builder(), first=2, per_question=0)
    feed = FeedSource(LocalFetcher(supply), place=PLACE, patience=QUICK)
    stop = threading.Event()
    timer = threading.Timer(0.4, stop.set)
    timer.start()

    with caplog.at_level(logging.WARNING, logger="ringfeed.feed"):
        assert not feed.wait_for(2, 0, stop=stop)

    timer.join()
    assert "for step 2, to be planned" in caplog.text
    feed.close()


def test_another_run_at_the_same_address_is_refused(make_builder):
    supply = Growing(make_builder(), first=1, per_question=0)
    feed = FeedSource(LocalFetcher(supply), place=PLACE, patience=QUICK)
    supply._builder = make_builder(layout="contiguous")

    with pytest.raises(ValueError, match=r"serves run .* now, this rank follows"):
        feed.wait_for(1, 0, stop=NEVER)
    feed.close()
