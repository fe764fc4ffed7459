"""A plan is read while it is made: block by block, to its end, and when its planner fails."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_growth import follow_plan
from ringfeed.pipeline.planner.options import Balance, BlockLimits, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.planner.session import PlanSession


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("growth") / "web"
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 60, size=300)
    write_corpus(folder, (rng.integers(1, 99, size=n, dtype=np.int32) for n in lengths), name="web", pad_id=0)
    return folder


@pytest.fixture
def options(corpus, tmp_path):
    return PlanOptions(
        corpora=[corpus],
        output=tmp_path / "plan",
        pack_tokens=64,
        packs_per_step=2,
        pad_multiple=1,
        balance=Balance.BEST_FIT,
        window=3,
        seed=1,
        block_limits=BlockLimits(steps=7),
    )


@pytest.fixture
def whole(options, tmp_path):
    """The chain of the plan when it is finished."""
    run_plan(replace(options, output=tmp_path / "whole"))
    plan = Plan.open(tmp_path / "whole")
    return [plan.chain(i) for i in range(plan.num_steps)]


def chain(plan):
    return [plan.chain(i) for i in range(plan.num_steps)]


def loader(plan, **options):
    return Loader(plan, dp_rank=0, dp_size=1, cp_rank=0, cp_size=1, layout="te", **options)


def test_blocks_can_be_read_before_the_next_ones_are_planned(options, whole):
    with PlanSession.open(options) as session:
        plan = follow_plan(options.output)
        assert (plan.num_steps, plan.is_growing, plan.pack_tokens) == (0, True, 64)
        assert plan.largest_footprint(2) == 0
        assert session.advance(until_step=10) == 14
        assert plan.refresh() == 14
        assert chain(plan) == whole[:14]
        assert plan.step(13).num_rows == 2
        with pytest.raises(ValueError, match="half-written"):
            Plan.open(options.output)
        session.advance()

    assert plan.step_packs(3).step == 3
    assert plan.wait_for_step(len(whole) - 1)
    assert not plan.wait_for_step(len(whole))
    assert not plan.is_growing
    assert chain(plan) == whole
    assert plan.report == Plan.open(options.output).report


def test_a_planner_is_asked_for_as_many_steps_as_are_needed(options, whole):
    with PlanSession.open(options) as session:
        assert session.advance(until_step=0) == 0
        assert session.advance(until_step=1) == 7
        assert session.advance(until_step=7) == 7
        assert session.manifest is None
    with PlanSession.open(options) as session:
        assert session.num_steps == 7
        assert session.advance(until_step=10**9) == len(whole)
        assert session.manifest is not None

    assert chain(follow_plan(options.output)) == whole
    assert type(follow_plan(options.output)) is Plan


def test_a_reader_waits_for_the_next_block(options, whole):
    with PlanSession.open(options) as session:
        session.advance(until_step=1)
        plan = follow_plan(options.output)
        timer = threading.Timer(0.3, session.advance)
        timer.start()
        assert plan.wait_for_step(20)
        timer.join()

    assert chain(plan)[:21] == whole[:21]


def test_a_planner_that_is_gone_is_named_in_the_end(options):
    with PlanSession.open(options) as session:
        session.advance(until_step=1)
    plan = follow_plan(options.output, timeout_s=0.3)

    with pytest.raises(
        TimeoutError, match=r"is still being planned and has 7 steps; step 9 did not come.*again"
    ):
        plan.wait_for_step(9)


def test_a_wait_ends_when_it_is_told_to(options):
    with PlanSession.open(options) as session:
        session.advance(until_step=1)
    plan, stop = follow_plan(options.output), threading.Event()
    threading.Timer(0.2, stop.set).start()
    begun = time.monotonic()

    assert not plan.wait_for_step(9, stop=stop)
    assert time.monotonic() - begun < 20


def test_a_plan_that_was_given_up_is_told(corpus, tmp_path):
    write_corpus(
        tmp_path / "ones", (np.full(n, 5, np.int32) for n in [8] * 40 + [1] * 400), name="ones", pad_id=0
    )
    options = PlanOptions(
        corpora=[tmp_path / "ones"], output=tmp_path / "plan", pack_tokens=8, packs_per_step=1,
        pad_multiple=1, balance=Balance.IN_ORDER, window=2, block_limits=BlockLimits(steps=4),
    )  # fmt: skip
    with PlanSession.open(options) as session:
        session.advance(until_step=4)
        plan = follow_plan(options.output)
        with pytest.raises(ValueError, match="no supervised token"):
            session.advance()
        with pytest.raises(ValueError, match="is gone: its planner met a mistake"):
            plan.wait_for_step(10**6)


def test_another_plan_of_the_same_name_is_not_taken_for_the_one_that_grew(options, tmp_path):
    with PlanSession.open(options) as session:
        session.advance(until_step=4)
        plan = follow_plan(options.output)
    run_plan(replace(options, seed=2, output=tmp_path / "other"))
    (tmp_path / "plan.partial").rename(tmp_path / "away")
    (tmp_path / "other").rename(options.output)

    with pytest.raises(ValueError, match="is another plan than the one that was being made"):
        plan.refresh()


def test_a_loader_trains_on_a_plan_while_it_is_made(options, corpus):
    with PlanSession.open(options) as session:
        session.advance(until_step=7)
        with loader(options.output) as batches:
            assert batches.num_steps == 7
            found = []
            for batch in batches:
                found.append(batch.info.digest)
                if len(found) % 10 == 0:
                    session.advance(until_step=len(found) // 2 + 8)
    with loader(options.output) as batches:
        assert [batch.info.digest for batch in batches] == found


def test_whole_steps_of_a_growing_plan_need_their_width(options):
    with PlanSession.open(options) as session:
        session.advance(until_step=7)
        with loader(options.output) as batches, pytest.raises(ValueError, match="pass max_documents="):
            batches.steps()
        with loader(options.output, max_documents=40) as batches:
            assert next(batches.steps()).tensors["cu_seqlens"].shape == (2, 41)


def test_a_loader_that_waits_for_a_planner_can_be_closed(options):
    with PlanSession.open(options) as session:
        session.advance(until_step=1)
        batches = loader(options.output)
        for _ in zip(range(14), batches, strict=False):
            pass
        begun = time.monotonic()
        batches.close()
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_wait_takes_time(options, seconds):
    with pytest.raises(ValueError, match=r"timeout_s=.* must be above 0"):
        follow_plan(options.output, timeout_s=seconds)


def test_without_a_plan_there_is_nothing_to_follow(tmp_path):
    with pytest.raises(ValueError, match="there is no plan at"):
        follow_plan(tmp_path / "plan")
