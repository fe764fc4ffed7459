"""A plan is the same bytes however often its planner was killed, and wherever its blocks are cut."""

import tempfile
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.extend import Extension
from ringfeed.pipeline.planner.options import BlockLimits, PlanOptions
from ringfeed.pipeline.planner.run import run_extension, run_plan

balances = st.sampled_from(
    [
        {"balance": "work"},
        {"balance": "work", "schedule": "homogeneous"},
        {"balance": "best_fit"},
        {"balance": "in_order"},
        {"balance": "concat"},
        {"balance": "work", "pack_shape": "variable"},
    ]
)
others = st.fixed_dictionaries(
    {
        "overflow": st.sampled_from(["split", "truncate", "drop"]),
        "packs_per_step": st.integers(1, 3),
        "window": st.integers(1, 3),
        "seed": st.one_of(st.none(), st.integers(0, 5)),
        "pad_multiple": st.sampled_from([1, 4]),
        "epochs": st.integers(1, 2),
    }
)
recipes = st.builds(lambda balance, other: {**balance, **other}, balances, others)
limits = st.builds(BlockLimits, steps=st.integers(1, 6), pieces=st.integers(10, 60))
lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=40).map(lambda lengths: [5, *lengths])
# No shrinking: a failing example is small as it is, and each one writes files.
few_examples = settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.fixture(autouse=True, scope="module")
def no_fsync():
    # Many small plans: whether they outlive a power cut is not what is tested here.
    with mock.patch("os.fsync"):
        yield


class Killed(BaseException):
    """Stands for kill -9: nothing in the planner handles it."""


def plan(folder, lengths, *, name, **asked):
    np.save(Path(folder, "lengths.npy"), np.array(lengths))
    options = PlanOptions(
        lengths=Path(folder, "lengths.npy"), output=Path(folder, name), pack_tokens=24, **asked
    )
    run_plan(options)
    return Plan.open(options.output)


def content(plan):
    return {path.name: path.read_bytes() for path in plan.path.iterdir()}


def dying(kill_at):
    """Return a ``Path.replace`` that does not return the ``kill_at``-th time."""
    calls = 0
    replace = Path.replace

    def dying_replace(self, target):
        nonlocal calls
        calls += 1
        if calls == kill_at:
            raise Killed
        return replace(self, target)

    return dying_replace


@few_examples
@example(
    # Losses of a window must stay with the block of its first step.
    lengths=[5, 21, 18, 28, 0, 33],
    recipe={
        "balance": "best_fit",
        "overflow": "split",
        "packs_per_step": 1,
        "window": 1,
        "seed": None,
        "pad_multiple": 1,
        "epochs": 2,
    },
    limits=BlockLimits(steps=2, pieces=10),
    kills=[5],
)
@given(lengths=lengths_lists, recipe=recipes, limits=limits, kills=st.lists(st.integers(1, 12), max_size=4))
def test_killed_anywhere_a_rerun_ends_with_the_same_bytes(lengths, recipe, limits, kills):
    asked = {**recipe, "block_limits": limits}
    with tempfile.TemporaryDirectory() as folder:
        whole = content(plan(folder, lengths, name="whole", **asked))
        for kill_at in kills:
            with suppress(Killed), mock.patch.object(Path, "replace", dying(kill_at)):
                plan(folder, lengths, name="killed", **asked)

        assert content(plan(folder, lengths, name="killed", **asked)) == whole


@few_examples
@given(lengths=lengths_lists, recipe=recipes, limits=limits)
def test_where_blocks_are_cut_changes_no_step(lengths, recipe, limits):
    with tempfile.TemporaryDirectory() as folder:
        small = plan(folder, lengths, name="small", block_limits=limits, **recipe)
        large = plan(folder, lengths, name="large", **recipe)
        reports = [
            {key: value for key, value in opened.report.items() if not key.startswith("bytes")}
            for opened in (small, large)
        ]

        assert [small.chain(i) for i in range(small.num_steps)] == [
            large.chain(i) for i in range(large.num_steps)
        ]
        assert reports[0] == reports[1]


@few_examples
@given(lengths=lengths_lists, recipe=recipes)
def test_the_flush_begins_with_a_block_of_its_own(lengths, recipe):
    with tempfile.TemporaryDirectory() as folder:
        short = plan(folder, lengths, name="short", **recipe)
        long = plan(folder, lengths, name="long", **{**recipe, "epochs": recipe["epochs"] + 1})
        # With default limits there are two blocks at most: before the flush, and the flush.
        before = short.block(short.num_blocks - 1).facts.first_step

        assert short.num_blocks <= 2
        assert short.chain(before - 1) == long.chain(before - 1)


@few_examples
@given(lengths=lengths_lists, recipe=recipes, limits=limits, kills=st.lists(st.integers(1, 12), max_size=3))
def test_an_extended_plan_has_the_chain_of_one_made_at_once(lengths, recipe, limits, kills):
    epochs = recipe["epochs"] + 1
    with tempfile.TemporaryDirectory() as folder:
        at_once = plan(folder, lengths, name="at-once", **{**recipe, "epochs": epochs})
        short = plan(folder, lengths, name="plan", block_limits=limits, **recipe)
        extension = Extension(plan=short.path, epochs=epochs)
        for kill_at in kills:
            with suppress(Killed), mock.patch.object(Path, "replace", dying(kill_at)):
                run_extension(extension)
        run_extension(extension)
        longer = Plan.open(short.path)

        assert [longer.chain(i) for i in range(longer.num_steps)] == [
            at_once.chain(i) for i in range(at_once.num_steps)
        ]
        assert {name: longer.report[name] for name in COUNTED} == {n: at_once.report[n] for n in COUNTED}


COUNTED = ("tokens", "pieces", "split", "empty", "dropped", "truncated_tokens", "displacement_max")
