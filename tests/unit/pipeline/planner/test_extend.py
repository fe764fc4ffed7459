"""What an extension takes from the plan, and what from whoever asks for it."""

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.cost import cost_model_of
from ringfeed.pipeline.planner.extend import Extension
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_extension, run_plan

LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 60, size=120)]


def planned(folder, *, lengths=None, corpora=(), cost_model="7b"):
    run_plan(
        PlanOptions(
            lengths=lengths,
            corpora=corpora,
            output=folder / "plan",
            pack_tokens=64,
            packs_per_step=2,
            pad_multiple=4,
            window=4,
            cost_model=cost_model_of(cost_model),
        )
    )
    return Plan.open(folder / "plan")


@pytest.mark.parametrize("workers", [1, 2])
def test_corpora_that_moved_and_a_cost_table_are_given_again(tmp_path, workers):
    write_corpus(tmp_path / "web", [np.arange(n) for n in LENGTHS], name="web")
    (tmp_path / "costs.csv").write_text("length,milliseconds\n1,1\n64,100\n")
    table = f"table:{tmp_path / 'costs.csv'}"
    before = planned(tmp_path, corpora=(tmp_path / "web",), cost_model=table)
    (tmp_path / "web").rename(tmp_path / "moved")

    asked = Extension(
        plan=before.path,
        epochs=2,
        corpora=[tmp_path / "moved"],
        cost_model=cost_model_of(table),
        workers=workers,
    )
    run_extension(asked)
    after = Plan.open(before.path)
    assert after.num_steps > before.num_steps
    assert after.corpus_paths() == [tmp_path / "moved"]


def test_a_plan_of_lengths_goes_on_with_its_own_file(tmp_path):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    before = planned(tmp_path, lengths=tmp_path / "lengths.npy")

    run_extension(Extension(plan=before.path, epochs=2))
    assert Plan.open(before.path).num_steps > before.num_steps
