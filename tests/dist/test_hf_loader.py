"""A corpus, its plan, a loader and an unchanged Hugging Face model under FSDP2 (dp 2 x cp 2), end to end."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.planner.options import Balance, PlanOptions
from ringfeed.pipeline.planner.run import run_plan

pytestmark = pytest.mark.dist

LAYOUTS = ["te", "head_tail", "contiguous", "whole_document", "magi", "ptrr"]
CASES = {
    # FSDP2 divides the sum of gradients by its ranks, so the loss is scaled up by them ...
    **{layout: {"layout": layout, "reduction": "mean", "checkpointed": False} for layout in LAYOUTS},
    # ... unless it is told to leave the sum as it is.
    "te, summed": {"layout": "te", "reduction": "sum", "checkpointed": False},
    "te, activation checkpointing": {"layout": "te", "reduction": "mean", "checkpointed": True},
}


def make_plan(folder):
    """Two micro-batches of one pack for each of two dp ranks; a document is longer than a pack."""
    rng = np.random.default_rng(3)
    lengths = [300, 1, *np.minimum(rng.lognormal(3, 1, size=40).astype(int) + 1, 200)]
    documents = [rng.integers(1, 97, size=length, dtype=np.int32) for length in lengths]
    write_corpus(folder / "corpus", documents, name="corpus", pad_id=0)
    run_plan(
        PlanOptions(
            output=folder / "plan",
            corpora=[folder / "corpus"],
            pack_tokens=256,
            packs_per_step=4,
            max_cp=2,
            balance=Balance.BEST_FIT,
            slate_size=2,
        )
    )
    torch.save([torch.from_numpy(document).long() for document in documents], folder / "documents.pt")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, run_ranks):
    """What each rank wrote: case -> "ok" or a traceback."""
    folder = tmp_path_factory.mktemp("ranks")
    make_plan(folder)
    (folder / "cases.json").write_text(json.dumps(CASES))
    run_ranks(Path(__file__).with_name("hf_loader_rank.py"), num_ranks=4, folder=folder)
    return [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("case", CASES)
def test_a_step_under_fsdp_trains_as_its_pieces_alone(outcomes, case):
    for rank, outcome in enumerate(outcomes):
        assert outcome[case] == "ok", f"rank {rank}:\n{outcome[case]}"
