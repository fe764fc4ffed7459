"""Ranks that do not hold parts of the same packs are all stopped, over real gloo processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan

pytestmark = pytest.mark.dist


@pytest.fixture
def folder(tmp_path):
    """A plan of more steps than lie between two comparisons, one that goes on after it, and another one."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 500, n) for n in rng.integers(5, 60, 900)]
    write_corpus(tmp_path / "corpus", documents, name="c", pad_id=0)
    sizes: dict[str, Any] = {"pack_tokens": 64, "packs_per_step": 4, "max_cp": 2, "window": 2}
    plans: dict[str, dict[str, Any]] = {
        "plan": {"balance": "in_order"},
        "longer": {"balance": "in_order", "epochs": 2},
        "other": {"balance": "best_fit"},
    }
    for name, options in plans.items():
        run_plan(PlanOptions(output=tmp_path / name, corpora=[tmp_path / "corpus"], **sizes, **options))
    (tmp_path / "skip.txt").write_text("800\n")
    return tmp_path


def test_ranks_that_disagree_are_all_stopped_with_both_digests(run_ranks, folder):
    run_ranks(Path(__file__).with_name("digest_check_rank.py"), num_ranks=2, folder=folder)
