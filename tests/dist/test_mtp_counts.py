"""Loss denominators of every depth over dp and cp, on real gloo ranks, against the pieces of the plan."""

from pathlib import Path

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.planner.options import Balance, PlanOptions
from ringfeed.pipeline.planner.run import run_plan

pytestmark = pytest.mark.dist


def test_all_ranks_know_how_many_labels_each_depth_has(run_ranks, tmp_path):
    rng = np.random.default_rng(2)
    # One of a single token, which has no label at all, and some longer than a pack.
    lengths = [1, 300, *np.minimum(rng.lognormal(3, 1, size=30).astype(int) + 1, 200).tolist()]
    documents = [rng.integers(1, 1000, size=n, dtype=np.int32) for n in lengths]
    write_corpus(tmp_path / "corpus", documents, name="prose", pad_id=0)
    options = PlanOptions(
        output=tmp_path / "plan",
        corpora=[tmp_path / "corpus"],
        pack_tokens=128,
        packs_per_step=8,
        max_cp=4,
        balance=Balance.BEST_FIT,
    )
    run_plan(options)

    run_ranks(Path(__file__).with_name("mtp_rank.py"), num_ranks=4, folder=tmp_path)
