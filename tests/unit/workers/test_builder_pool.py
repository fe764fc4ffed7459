"""The pool: any builder may fail in any way, blocks come all the same, and errors keep their meaning.

Builders are real; what is played here is the way to them, which can be cut.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.block_reader import read_block
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.feed_request import BlockRequest
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers import builder_pool
from ringfeed.workers.block_builder import BlockBuilder, PlanOpener
from ringfeed.workers.builder_calls import BuilderError, BuilderLostError
from ringfeed.workers.builder_pool import BuilderPool
from ringfeed.workers.pool_patience import PoolPatience
from ringfeed.workers.roster import BuilderMember, Roster

CP = 2
QUICK = PoolPatience(
    open_seconds=0.3,
    retry_seconds=5.0,
    reply_seconds=0.5,
    roster_seconds=0.05,
    first_wait=0.01,
    most_wait=0.05,
)


@pytest.fixture(scope="module")
def opener(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 500, n) for n in rng.integers(3, 150, 60)]
    write_corpus(folder / "corpus", documents, name="c", pad_id=9)
    options: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 8, "max_cp": CP, "balance": "best_fit"}
    run_plan(PlanOptions(output=folder / "plan", corpora=[folder / "corpus"], **options))
    asked = OpenOptions(layout=make_layout("te"), cp_size=CP)
    return PlanOpener(plan=folder / "plan", spec=open_spec(Plan.open(folder / "plan"), asked, pad_id=9))


class Service:
    """Real builders behind calls that can be cut; also the roster, and what happened."""

    def __init__(self, opener, count):
        self.builders = {f"builder-{i}": BlockBuilder(opener, block_bytes=4096) for i in range(count)}
        self.trouble: dict[str, Any] = {}
        """Name -> an error to raise, or a number of seconds to be silent."""
        self.asked: list[str] = []
        self.given_seconds: list[float] = []
        self.looks = 0
        self.roster_error: Exception | None = None
        self.facts_now = next(iter(self.builders.values())).facts() if count else None
        self.names = list(self.builders)
        self.actors: dict[str, str] = {name: f"{name} the first" for name in self.names}

    def roster(self):
        self.looks += 1
        if self.roster_error is not None:
            raise self.roster_error
        members = [BuilderMember(name=name, node_id="n", actor=self.actors[name]) for name in self.names]
        facts = b"" if self.facts_now is None else self.facts_now.to_json()
        return Roster(version=self.looks, facts_json=facts, builders=tuple(members))

    def facts(self, builder, *, seconds, stop):
        self._meet(builder, seconds, stop)
        assert self.facts_now is not None
        return self.facts_now.to_json()

    def block(self, builder, request, *, seconds, stop):
        self._meet(builder, seconds, stop)
        return self.builders[builder.name].block(BlockRequest.from_json(request)).to_batch()

    def _meet(self, builder, seconds, stop):
        self.asked.append(builder.name)
        self.given_seconds.append(seconds)
        trouble = self.trouble.get(builder.name)
        if isinstance(trouble, Exception):
            raise trouble
        if trouble is not None and trouble > seconds:
            stop.wait(seconds)
            raise BuilderLostError(f"{builder.name} was silent for {seconds:g} s")


def request(step=0, *, cp_rank=0, count=2):
    place = RankPlace(dp_rank=0, dp_size=2, cp_rank=cp_rank, cp_size=CP)
    return BlockRequest(place=place, first_step=step, first_micro_batch=0, num_micro_batches=count)


@pytest.fixture
def make_pool(opener):
    """Return a function that makes a service of so many builders and a pool over it."""
    pools = []

    def make(count=3, patience=QUICK):
        service = Service(opener, count)
        pools.append(BuilderPool(service.roster, service, patience=patience))
        return service, pools[-1]

    yield make
    for pool in pools:
        pool.close()


LOST = BuilderLostError("the process is gone")


def test_cp_peers_ask_one_builder_and_get_what_it_builds(make_pool, opener):
    service, pool = make_pool()
    expected = BlockBuilder(opener, block_bytes=4096).build(request())
    for rank in range(CP):
        block = pool.block(request(cp_rank=rank))
        assert (block.header, block.rows) == (expected[rank].header, expected[rank].rows)

    assert len(set(service.asked)) == 1
    assert sum(builder.num_builds for builder in service.builders.values()) == 1
    assert pool.num_retries == 0


def test_a_lost_builder_costs_one_retry_and_is_not_asked_again_for_a_while(make_pool):
    service, pool = make_pool()
    pool.block(request())
    first = service.asked[0]
    service.trouble[first] = LOST
    for _ in range(5):
        pool.block(request())

    assert service.asked.count(first) == 2
    assert pool.num_retries == 1
    assert "asked again 1 times, the last: the process is gone" in pool.status()


def test_a_new_process_under_an_old_name_is_asked_at_once(make_pool):
    service, pool = make_pool()
    pool.block(request())
    first = service.asked[0]
    service.trouble[first] = LOST
    pool.block(request())
    del service.trouble[first]
    service.actors[first] = "another one"
    time.sleep(0.1)

    pool.block(request())

    assert service.asked[-1] == first


def test_a_silent_builder_is_left_and_the_next_has_twice_the_time(make_pool):
    service, pool = make_pool(2)
    pool.block(request())
    service.trouble[service.asked[0]] = 60
    began = time.monotonic()

    pool.block(request())

    assert 0.5 <= time.monotonic() - began < 5
    assert service.given_seconds == [0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    "error", [ValueError("step 9 is not served"), CorruptDataError("document 7 is damaged")]
)
def test_what_another_builder_would_not_mend_comes_back_as_it_is(make_pool, error):
    service, pool = make_pool()
    service.trouble = dict.fromkeys(service.builders, error)

    with pytest.raises(type(error), match=f"^{error}$") as raised:
        pool.block(request())
    assert type(raised.value) is type(error)
    assert (len(service.asked), pool.num_retries) == (1, 0)


def test_a_builders_own_refusal_comes_through(make_pool):
    _, pool = make_pool()
    with pytest.raises(ValueError, match="step 100000 is not served"):
        pool.block(request(100_000))


def test_builders_that_fail_alike_are_not_asked_for_ever(make_pool):
    service, pool = make_pool(4)
    service.trouble = dict.fromkeys(service.builders, BuilderError("builder: KeyError: 'x'"))

    with pytest.raises(ConnectionError, match=r"KeyError: 'x'; tried 3 times"):
        pool.block(request())
    assert len(set(service.asked)) == 3


def test_when_nobody_answers_patience_ends_with_the_last_error(make_pool):
    service, pool = make_pool(2, replace(QUICK, retry_seconds=0.3))
    service.trouble = dict.fromkeys(service.builders, LOST)
    began = time.monotonic()

    with pytest.raises(ConnectionError, match=r"the process is gone; tried \d+ times"):
        pool.block(request())
    assert 0.3 <= time.monotonic() - began < 3
    # With growing waits between, so not as fast as it can.
    assert len(service.asked) < 40


def test_a_service_without_builders_is_waited_for(make_pool):
    service, pool = make_pool(1)
    names, service.names = service.names, []
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pool.block, request())
        time.sleep(0.3)
        assert not waiting.done()
        assert "the service has no builder now" in pool.status()
        service.names = names
        assert waiting.result(timeout=10).rows.num_rows == 2


def test_a_directory_that_is_gone_is_waited_for(make_pool):
    service, pool = make_pool(1)
    service.roster_error = ConnectionError("nobody is called 'feed'")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pool.block, request())
        time.sleep(0.3)
        assert not waiting.done()
        service.roster_error = None
        assert waiting.result(timeout=10).rows.num_rows == 2
    service.roster_error = ConnectionError("gone again")
    time.sleep(0.1)

    # Who is known can be asked without it.
    assert pool.block(request(1)).rows.num_rows == 2


def test_another_run_under_the_same_name_is_refused(make_pool):
    service, pool = make_pool()
    pool.facts()
    service.facts_now = replace(service.facts_now, recipe_fingerprint="of another plan")
    time.sleep(0.1)

    with pytest.raises(ValueError, match="start a service of the same plan, layout and skip list again"):
        pool.block(request())
    with pytest.raises(ValueError, match="serves run"):
        pool.facts()


def test_many_threads_get_their_blocks_while_builders_come_and_go(make_pool):
    service, pool = make_pool(3)
    over = threading.Event()

    def cut():
        while not over.is_set():
            for name in service.builders:
                service.trouble = {name: LOST}
                over.wait(0.01)

    breaker = threading.Thread(target=cut)
    breaker.start()
    asked = [request(step, cp_rank=rank) for step in range(4) for rank in range(CP)] * 10
    try:
        with ThreadPoolExecutor(8) as threads:
            blocks = list(threads.map(pool.block, asked))
    finally:
        over.set()
        breaker.join()

    for block, one in zip(blocks, asked, strict=True):
        read_block(block, one, pool.facts())
    assert pool.num_retries > 0


def test_facts_of_a_finished_plan_are_the_rosters(make_pool):
    service, pool = make_pool()

    assert pool.facts().to_json() == service.facts_now.to_json()
    assert service.asked == []


def test_facts_of_a_growing_plan_are_a_builders(make_pool, monkeypatch):
    # As long as a builder's facts count as new; however slow the machine is.
    monkeypatch.setattr(builder_pool, "_FACTS_SECONDS", 1000.0)
    service, pool = make_pool()
    end = service.facts_now
    service.facts_now = replace(end, num_steps=2, is_growing=True)
    assert (pool.facts().num_steps, pool.facts().is_growing) == (2, True)
    service.facts_now = end
    # The roster says still what it said.
    service.roster_error = ConnectionError("no news")
    # Asked at once again, it asks nobody.
    assert pool.facts().num_steps == 2
    assert len(service.asked) == 1
    monkeypatch.setattr(builder_pool, "_FACTS_SECONDS", 0.0)

    assert (pool.facts().num_steps, pool.facts().is_growing) == (end.num_steps, False)
    assert service.asked


def test_facts_that_nobody_can_renew_are_the_last_ones(make_pool):
    service, pool = make_pool()
    service.facts_now = replace(service.facts_now, num_steps=2, is_growing=True)
    pool.facts()
    service.trouble = dict.fromkeys(service.builders, LOST)
    time.sleep(0.35)

    assert pool.facts().num_steps == 2
    assert len(service.asked) == 2


def test_first_facts_need_somebody(make_pool):
    service, pool = make_pool(1)
    service.roster_error = ConnectionError("nobody is called 'feed'")
    began = time.monotonic()

    with pytest.raises(ConnectionError, match="nobody is called 'feed'"):
        pool.facts()
    assert 0.3 <= time.monotonic() - began < 3


def test_closing_ends_what_waits(make_pool):
    service, pool = make_pool(1, replace(QUICK, reply_seconds=60.0))
    service.trouble = {"builder-0": 1000}
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pool.block, request())
        time.sleep(0.1)
        pool.close()
        with pytest.raises(ConnectionError, match="closed"):
            waiting.result(timeout=10)
    with pytest.raises(ConnectionError, match="closed"):
        pool.block(request())


@pytest.mark.parametrize("name", ["open_seconds", "retry_seconds", "reply_seconds", "most_wait"])
def test_patience_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be above 0"):
        PoolPatience(**{name: 0})
