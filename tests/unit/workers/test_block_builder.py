"""The builder: one build for all cp ranks, a cache that is bounded, the same bytes from plan and shards."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.block_reader import read_block
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS, BlockRequest
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_source import PlanSource
from ringfeed.pipeline.planner.options import Balance, BlockLimits, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.planner.session import PlanSession
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers import block_builder as module
from ringfeed.workers.block_builder import BlockBuilder, PlanOpener

CP = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(1)
    write_corpus(
        folder / "corpus", [rng.integers(0, 500, n) for n in rng.integers(3, 150, 60)], name="c", pad_id=9
    )
    options: dict[str, Any] = {
        "pack_tokens": 128,
        "packs_per_step": 8,
        "max_cp": CP,
        "balance": "best_fit",
        "window": 2,
    }
    run_plan(PlanOptions(output=folder / "plan", corpora=[folder / "corpus"], **options))
    return folder


def source(folder, *, layout="te"):
    plan = Plan.open(folder / "plan")
    corpora = plan.open_corpora()
    spec = open_spec(plan, OpenOptions(layout=make_layout(layout), cp_size=CP), pad_id=corpora.pad_id)
    return PlanSource(plan, corpora, spec=spec)


def request(first=(0, 0), count=4, *, cp_rank=0, dp=(0, 2), columns=BLOCK_COLUMNS):
    place = RankPlace(dp_rank=dp[0], dp_size=dp[1], cp_rank=cp_rank, cp_size=CP)
    return BlockRequest(
        place=place, first_step=first[0], first_micro_batch=first[1], num_micro_batches=count, columns=columns
    )


@pytest.fixture
def builder(folder):
    builder = BlockBuilder(lambda: source(folder), block_bytes=4096)
    yield builder
    builder.close()


def test_cp_peers_share_one_build_whatever_columns_they_want(builder):
    for rank in range(CP):
        builder.block(request(cp_rank=rank))
        builder.block(request(cp_rank=rank, columns=("pieces", "labels")))

    assert builder.num_builds == 1


def test_tokens_of_a_pack_are_hashed_once_for_all_ranks(folder, monkeypatch):
    checked = []
    real = PlanSource._check_documents
    builder = BlockBuilder(lambda: source(folder))

    def counted(self, documents):
        checked.append(len(documents))
        real(self, documents)

    monkeypatch.setattr(PlanSource, "_check_documents", counted)
    found = builder.build(request(count=4))

    assert len(checked) == found[0].rows.num_rows == 4


def test_any_two_resizes_may_alternate(builder):
    for dp_size in (1, 2, 4, 8, 2, 1):
        for dp_rank in range(dp_size):
            asked = request(count=1, dp=(dp_rank, dp_size))
            read_block(builder.block(asked), asked, builder.facts())


def test_the_cache_is_bounded_in_bytes_and_keeps_the_latest(folder):
    one = BlockBuilder(lambda: source(folder)).build(request())
    size = sum(block.nbytes for block in one)
    builder = BlockBuilder(lambda: source(folder), keep_bytes=int(size * 2.5))
    for step in (0, 1, 2, 0):
        builder.block(request((step, 0)))
        assert builder.bytes_kept <= size * 2.5 + 2000

    # Step 0 was dropped for step 2 and had to be built again; 2 is still there.
    assert builder.num_builds == 4
    builder.block(request((2, 0), cp_rank=3))
    assert builder.num_builds == 4


def test_what_is_asked_for_again_is_kept_longer(folder):
    size = sum(block.nbytes for block in BlockBuilder(lambda: source(folder)).build(request()))
    builder = BlockBuilder(lambda: source(folder), keep_bytes=int(size * 2.5))
    for step in (0, 1, 0, 2, 0):
        builder.block(request((step, 0)))

    assert builder.num_builds == 3


def test_one_build_is_kept_whatever_it_takes(folder):
    builder = BlockBuilder(lambda: source(folder), keep_bytes=0)
    for rank in range(CP):
        builder.block(request(cp_rank=rank))

    assert builder.num_builds == 1


def test_the_same_request_gives_the_same_bytes_in_any_builder(folder, builder):
    other = BlockBuilder(lambda: source(folder), block_bytes=4096)
    other.block(request((2, 1)))
    for mine, theirs in zip(builder.build(request((1, 2))), other.build(request((1, 2))), strict=True):
        assert mine.header == theirs.header
        assert mine.rows.equals(theirs.rows)


def test_requests_out_of_bounds_are_refused_before_anything_is_built(builder):
    for wrong in (
        request((10**9, 0)),
        request(count=10**6),
        replace(request(), place=replace(request().place, cp_size=8)),
        request(dp=(0, 3)),
    ):
        with pytest.raises(ValueError, match=r"is not served|at most|--cp 8|dp_size may be"):
            builder.block(wrong)
    assert builder.num_builds == 0


def test_threads_that_ask_at_once_share_a_build(builder):
    asked = [request(cp_rank=rank) for rank in range(CP)]
    threads = [threading.Thread(target=builder.block, args=[one]) for one in asked * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert builder.num_builds == 1


def test_damaged_tokens_are_refused_by_name_and_nothing_is_kept(folder, tmp_path):
    broken = tmp_path / "broken"
    rng = np.random.default_rng(1)
    write_corpus(broken / "corpus", [rng.integers(0, 500, 40) for _ in range(40)], name="c", pad_id=9)
    options: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 8, "max_cp": CP, "balance": "best_fit"}
    run_plan(PlanOptions(output=broken / "plan", corpora=[broken / "corpus"], **options))
    tokens = broken / "corpus" / "tokens-00000.arrow"
    data = bytearray(tokens.read_bytes())
    data[len(data) // 2] ^= 1
    tokens.write_bytes(data)
    builder = BlockBuilder(lambda: source(broken))

    with pytest.raises(CorruptDataError, match=r"hash|damaged"):
        builder.build(request(count=8, dp=(0, 1)))
    assert builder.bytes_kept == sum(b.nbytes for blocks in builder._kept.values() for b in blocks)


def test_a_plan_that_grows_is_looked_at_again_when_more_is_asked_for(folder, monkeypatch):
    whole = Plan.open(folder / "plan")
    output = folder / "growing"
    options = PlanOptions(
        output=output,
        corpora=[folder / "corpus"],
        pack_tokens=128,
        packs_per_step=8,
        max_cp=CP,
        balance=Balance.BEST_FIT,
        window=2,
        block_limits=BlockLimits(steps=2),
    )
    opener = PlanOpener(plan=output, spec=source(folder).spec)
    with PlanSession.open(options) as session:
        builder, slow = BlockBuilder(opener, block_bytes=4096), BlockBuilder(opener, block_bytes=4096)
        assert (builder.facts().num_steps, builder.facts().is_growing) == (0, True)
        until = session.advance(until_step=1)
        assert 1 < until < whole.num_steps
        builder.block(request((1, 0), 1))
        assert (builder.facts().num_steps, builder.facts().is_growing) == (until, True)
        with pytest.raises(ValueError, match=f"step {until} is not served: there are steps 0 to {until - 1}"):
            builder.block(request((until, 0), 1))
        session.advance()

    # Facts are looked for, too, though not each time.
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    assert (builder.facts().num_steps, builder.facts().is_growing) == (whole.num_steps, False)
    finished = BlockBuilder(lambda: source(folder), block_bytes=4096)
    for step in range(whole.num_steps):
        asked = request((step, 0), 4)
        assert slow.block(asked).rows == finished.block(asked).rows
    assert slow.facts().to_json() == builder.facts().to_json()


def test_a_planner_that_gave_up_is_told_of(folder, tmp_path):
    # After ten steps of whole packs documents of one token each, which no loss can be made of.
    documents = [np.full(n, 5, np.int32) for n in [128] * 80 + [1] * 500]
    write_corpus(tmp_path / "corpus", documents, name="c", pad_id=9)
    options = PlanOptions(
        output=tmp_path / "plan",
        corpora=[tmp_path / "corpus"],
        pack_tokens=128,
        packs_per_step=8,
        max_cp=CP,
        balance=Balance.IN_ORDER,
        window=2,
        block_limits=BlockLimits(steps=2),
    )
    with PlanSession.open(options) as session:
        builder = BlockBuilder(PlanOpener(plan=tmp_path / "plan", spec=source(folder).spec))
        session.advance(until_step=1)
        builder.block(request((0, 0), 1))
        with pytest.raises(ValueError, match="no supervised token"):
            session.advance()
        with pytest.raises(ValueError, match=r"its planner met a mistake and gave the plan up"):
            builder.block(request((1000, 0), 1))
