"""Steps in which nothing is trained on: packs change places until every step has a supervised token."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfeed.pipeline.cli import main
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import BlockLimits, PlanOptions
from ringfeed.pipeline.planner.packing import Packing
from ringfeed.pipeline.planner.redraw import redraw_steps
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.planner.stream import StreamPieces
from ringfeed.pipeline.step_packs import Pieces
from ringfeed.pipeline.verify import verify


def packing_of(sizes):
    """Packs of so many pieces; piece i is document i."""
    ids = np.arange(sum(sizes))
    pieces = Pieces(ids, np.zeros_like(ids), np.ones_like(ids), np.zeros(len(ids), np.int32))
    stream = StreamPieces(pieces, np.ones_like(ids), ids, np.full_like(ids, -1))
    return Packing(stream, np.concatenate([[0], np.cumsum(sizes)]), StreamPieces.concat([]))


def packs_of(packing):
    return [part.tolist() for part in np.split(packing.packed.pieces.documents, packing.offsets[1:-1])]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_step_gets_a_supervised_token_and_no_pack_is_lost(data):
    steps = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    count = sum(steps)
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    supervised = np.array(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    costs = np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    first_packs = np.concatenate([[0], np.cumsum(steps)])
    packing = packing_of(sizes)
    redraw = partial(redraw_steps, supervised=supervised, costs=costs, first_step=7)
    if (supervised > 0).sum() < len(steps):
        with pytest.raises(ValueError, match=r"steps 7 to .* raise window"):
            redraw(packing, first_packs)
        return
    before, after = packs_of(packing), packs_of(redraw(packing, first_packs))
    assert sorted(before) == sorted(after)
    counts = {tuple(pack): int(n) for pack, n in zip(before, supervised, strict=True)}
    for low, high in pairwise(first_packs):
        assert any(counts[tuple(pack)] for pack in after[low:high])


def test_the_nearest_step_gives_the_pack_of_the_closest_cost():
    packing = packing_of([1] * 8)
    # Steps of two: 0 has two to spare but is further away than 3; 2 has none.
    supervised = np.array([1, 1, 1, 0, 0, 0, 1, 1])
    costs = np.array([5, 5, 5, 5, 10, 20, 90, 19])
    moved = redraw_steps(packing, np.arange(0, 10, 2), supervised=supervised, costs=costs, first_step=0)
    assert packs_of(moved) == [[0], [1], [2], [3], [4], [7], [6], [5]]


def test_steps_that_have_one_each_are_left_as_they_are():
    packing = packing_of([2, 1])
    counts, ones = np.array([1, 4]), np.ones(2, np.int64)
    same = redraw_steps(packing, np.arange(3), supervised=counts, costs=ones, first_step=0)
    assert same is packing


@pytest.fixture
def corpus(tmp_path):
    """Documents of which every other step's worth has nothing to train on."""
    draw = np.random.default_rng(0)
    documents = [np.arange(n) for n in draw.integers(4, 9, size=200)]
    masks = [np.full(len(d), i // 8 % 2 == 0) for i, d in enumerate(documents)]
    return write_corpus(tmp_path / "corpus", documents, name="chat", masks=masks).path


def options_for(corpus, output, **more):
    given_to = {"pack_tokens": 16, "packs_per_step": 4, "pad_multiple": 1, "balance": "in_order", **more}
    return PlanOptions(corpora=[corpus], output=output, **given_to)


def test_a_plan_that_would_be_refused_is_redrawn(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"step 8 would have no supervised token.*unsupervised=redraw"):
        run_plan(options_for(corpus, tmp_path / "refused"))
    report = run_plan(options_for(corpus, tmp_path / "plan", unsupervised="redraw"))
    plan = Plan.open(tmp_path / "plan")
    assert plan.least_supervised
    assert plan.recipe.unsupervised == "redraw"
    # It stays inside the look-ahead, and is told of as displacement.
    assert 0 < report.displacement_max <= 16
    assert verify(tmp_path / "plan").findings == ()


def test_blocks_of_any_size_hold_the_same_redrawn_steps(corpus, tmp_path):
    chains = []
    for number, steps in enumerate((1, 3, 4096)):
        limits = BlockLimits(steps=steps)
        output = tmp_path / f"plan-{number}"
        run_plan(options_for(corpus, output, unsupervised="redraw", block_limits=limits, window=5))
        plan = Plan.open(output)
        chains.append(plan.chain(plan.num_steps - 1))
    assert len(set(chains)) == 1


def test_too_few_supervised_packs_in_the_look_ahead_are_refused(corpus, tmp_path, capsys):
    flags = ["--pack-tokens", "16", "--packs-per-step", "4", "--pad-multiple", "1", "--balance", "in_order"]
    command = ["plan", str(corpus), "-o", str(tmp_path / "plan"), *flags, "--unsupervised", "redraw"]
    assert main([*command, "--window", "1"]) == 2
    told = capsys.readouterr().err
    assert "have 0 packs with a supervised token, 1 steps need one each; raise window" in told
    assert main(command) == 0


@pytest.fixture
def rarely_trained(tmp_path):
    """Documents of which a stretch of many steps is not trained on."""
    draw = np.random.default_rng(1)
    documents = [np.arange(n) for n in draw.integers(4, 9, size=400)]
    trained = np.arange(400) % 200 >= 150
    masks = [np.full(len(d), bool(trained[i])) for i, d in enumerate(documents)]
    return write_corpus(tmp_path / "corpus", documents, name="chat", masks=masks).path


@pytest.mark.parametrize("schedule", ["spread", "homogeneous"])
def test_slates_find_what_trains_in_the_whole_look_ahead(rarely_trained, tmp_path, schedule):
    sizes = {"packs_per_step": 4, "slate_size": 2, "balance": "work", "window": 32, "schedule": schedule}
    run_plan(options_for(rarely_trained, tmp_path / "plan", unsupervised="redraw", **sizes))
    plan = Plan.open(tmp_path / "plan")

    assert plan.least_supervised
    assert plan.report["displacement_max"] <= 33
    assert verify(tmp_path / "plan").findings == ()


def test_blocks_of_any_size_hold_the_same_pieces_from_ahead(rarely_trained, tmp_path):
    sizes = {"packs_per_step": 4, "slate_size": 2, "balance": "work", "window": 32, "unsupervised": "redraw"}
    chains = []
    for steps in (1, 3, 4096):
        limits, output = BlockLimits(steps=steps), tmp_path / f"plan-{steps}"
        run_plan(options_for(rarely_trained, output, block_limits=limits, **sizes))
        plan = Plan.open(output)
        chains.append(plan.chain(plan.num_steps - 1))

    assert len(set(chains)) == 1
