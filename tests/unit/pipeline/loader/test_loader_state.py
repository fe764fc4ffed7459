"""``state_dict`` and ``load_state_dict``: what a state says, and what it is refused for."""

import json
from itertools import islice

import pytest

from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan


def state_after(run, num_batches, **changes):
    loader = run.load(**changes)
    for _ in islice(loader, num_batches):
        pass
    return loader.state_dict()


def test_counts_what_was_handed_out_not_what_was_built(run):
    loader = run.load(dp_size=2)
    batches = iter(loader)
    places = []
    for _ in range(5):
        state = loader.state_dict()
        places.append((state["step"], state["micro_batch"]))
        next(batches)

    assert places == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


def test_is_small_json(run):
    state = state_after(run, 3, dp_size=2)

    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 400


@pytest.mark.parametrize("num_batches", [0, 3, 4])
def test_is_the_same_on_every_rank(run, num_batches):
    ranks = [(d, c) for d in range(2) for c in range(2)]
    states = [
        state_after(run, num_batches, dp_rank=d, dp_size=2, cp_rank=c, cp_size=2, layout=layout)
        for d, c in ranks
        for layout in ("te", "contiguous")
    ]

    assert states == [states[0]] * len(states)


@pytest.mark.parametrize("num_batches", [0, 1, 4, 9])
def test_load_then_save_gives_the_state_back(run, num_batches):
    state = state_after(run, num_batches, dp_size=2)
    loader = run.load(dp_size=2, dp_rank=1, cp_size=2)

    loader.load_state_dict(state)

    assert loader.state_dict() == state


def test_the_end_is_a_state_like_any_other(run):
    loader = run.load(dp_size=8)
    num_batches = len(list(loader))
    state = loader.state_dict()

    assert (state["step"], state["micro_batch"]) == (loader.num_steps, 0)
    assert num_batches == loader.num_steps
    again = run.load(dp_size=8)
    again.load_state_dict(state)
    assert list(again) == []
    assert list(loader) == []


def test_a_border_names_no_dp_so_that_dp_may_change_there(run):
    state = state_after(run, 4, dp_size=2)
    loader = run.load(dp_size=4, packs_per_chunk=2, cp_size=2)

    loader.load_state_dict(state)

    assert (state["dp_size"], state["packs_per_chunk"]) == (None, None)
    info = next(iter(loader)).info
    assert (info.step, info.micro_batch) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"dp_size": 4}, r"dp_size=2, this loader has dp_size=4"),
        ({"dp_size": 2, "packs_per_chunk": 2}, r"packs_per_chunk=1, this loader has packs_per_chunk=2"),
    ],
)
def test_inside_a_step_another_dp_is_refused_naming_both_borders(run, changes, names):
    state = state_after(run, 6, dp_size=2)
    loader = run.load(**changes)

    with pytest.raises(ValueError, match=rf"inside step 1 \(micro-batch 2\) with {names}; .*") as caught:
        loader.load_state_dict(state)

    assert "before step 1 and before step 2" in str(caught.value)
    assert loader.state_dict()["step"] == 0


def test_inside_a_step_another_cp_layout_and_dtype_are_fine(run):
    state = state_after(run, 6, dp_size=2, cp_size=2)
    loader = run.load(dp_size=2, cp_size=4, layout="head_tail")

    loader.load_state_dict(state)

    assert (next(iter(loader)).info.step, loader.state_dict()["micro_batch"]) == (1, 3)


def test_a_state_of_another_plan_is_refused_with_the_difference(run, tmp_path):
    other = plan_again(run, tmp_path / "plan", seed=4)
    state = state_after(run, 9, source=other)

    with pytest.raises(ValueError, match=r"saved on another plan \(.*recipe: expected '\w+', found '\w+'\)"):
        run.load().load_state_dict(state)


def test_a_changed_chain_is_refused_even_with_the_recipe_of_this_plan(run):
    state = state_after(run, 9)
    state["chain"] = "0" * 32

    with pytest.raises(
        ValueError, match=r"steps that have been replaced .*chain after step 1: expected '0+'"
    ):
        run.load().load_state_dict(state)


def test_a_plan_of_more_epochs_takes_the_state_as_far_as_steps_agree(run, tmp_path):
    short, longer = (plan_again(run, tmp_path / f"{n}", seed=3, epochs=n) for n in (1, 2))
    last = Plan.open(short).num_steps - 1
    states = {border: state_after(run, border, source=short, dp_size=8) for border in (1, last + 1)}
    loader = run.load(source=longer, dp_size=8)

    loader.load_state_dict(states[1])

    assert loader.state_dict() == states[1]
    assert next(iter(loader)).info.step == 1
    # The short plan ends with what was left over; the longer one has other steps there.
    with pytest.raises(ValueError, match=rf"at step {last + 1} was saved on steps that have been replaced"):
        loader.load_state_dict(states[last + 1])


def plan_again(run, output, **changes):
    corpora = [run.plan.parent / "prose", run.plan.parent / "code"]
    fixed = {"pack_tokens": 128, "packs_per_step": 8, "max_cp": 4, "slate_size": 4, "window": 1}
    asked = {**fixed, "balance": "best_fit", **changes}
    run_plan(PlanOptions(output=output, corpora=corpora, **asked))
    return output


def test_a_state_beyond_the_plan_is_refused(run):
    state = state_after(run, 4, dp_size=2)
    beyond = {**state, "step": 10_000}

    with pytest.raises(
        ValueError, match=r"stands at step 10000, .* beyond the plan: it ends after \d+ steps"
    ):
        run.load().load_state_dict(beyond)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"has version 2, this ringfeed reads up to 1"),
        ({"version": None}, r"no loader state of version 1: version None"),
        ({"rank": 0}, r"unknown \['rank'\]"),
        ({"step": -1}, r"has step=-1; it is an integer of at least 0"),
        ({"step": "3"}, r"has step='3'"),
        ({"micro_batch": True}, r"has micro_batch=True"),
        ({"micro_batch": 1}, r"has dp_size=None at micro_batch 1; it is at least 1 inside a step"),
        ({"dp_size": 2}, r"has dp_size=2 at micro_batch 0; it is null at a step border"),
        ({"chain": None}, r"has chain=None; it is a string"),
    ],
)
def test_values_that_make_no_sense_are_refused(run, change, message):
    loader = run.load()

    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})


def test_a_micro_batch_that_the_step_does_not_have_is_refused(run):
    state = state_after(run, 1, dp_size=2)

    with pytest.raises(ValueError, match=r"micro-batch 4 of step 0, which has 4 at dp_size=2"):
        run.load(dp_size=2).load_state_dict({**state, "micro_batch": 4})


def test_what_is_no_dict_is_refused(run):
    with pytest.raises(ValueError, match=r"a loader state is a dict, got int"):
        run.load().load_state_dict(7)
    with pytest.raises(ValueError, match=r"missing \['chain', "):
        run.load().load_state_dict({"version": 1})
