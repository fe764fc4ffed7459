"""What holds for every cut of a run: any dp, cp, layout and packs per chunk, any place to stop."""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import Balance, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.sharding.index_map import merge

PACKS_PER_STEP = 12
PACK_TOKENS = 64
LAYOUTS = ["te", "head_tail", "contiguous", "whole_document", "identity"]
MANY_PACKS = ["te", "identity"]


@dataclass(frozen=True)
class Run:
    documents: list[np.ndarray]
    plan: Path

    def load(self, cut, *, dp_rank=0, cp_rank=0):
        # Layouts that pad more than the plan foresaw need room; the budget is part of the cut.
        return Loader(self.plan, dp_rank=dp_rank, cp_rank=cp_rank, slot_budget=PACK_TOKENS * 2, **cut)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Documents of 1 to 150 tokens and their plan; the last step is short."""
    root = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(11)
    lengths = np.minimum(rng.lognormal(2.8, 1.0, size=165).astype(int) + 1, 150)
    documents = [rng.integers(1, 60_000, size=length) for length in lengths]
    write_corpus(root / "corpus", documents, name="corpus", token_dtype="uint16")  # noqa: S106
    options = PlanOptions(
        output=root / "plan",
        corpora=[root / "corpus"],
        pack_tokens=PACK_TOKENS,
        packs_per_step=PACKS_PER_STEP,
        max_cp=2,
        balance=Balance.BEST_FIT,
        slate_size=3,
        seed=1,
    )
    run_plan(options)
    assert Plan.open(root / "plan").num_packs % PACKS_PER_STEP
    return Run(documents=documents, plan=root / "plan")


@st.composite
def cuts(draw):
    """One way to cut a run over ranks."""
    layout = draw(st.sampled_from(LAYOUTS))
    packs_per_chunk = draw(st.sampled_from([1, 2, 3, 4])) if layout in MANY_PACKS else 1
    sizes = [dp for dp in (1, 2, 3, 4, 6, 12) if PACKS_PER_STEP % (dp * packs_per_chunk) == 0]
    return {
        "layout": layout,
        "packs_per_chunk": packs_per_chunk,
        "dp_size": draw(st.sampled_from(sizes)),
        "cp_size": draw(st.sampled_from([1, 2, 4])),
    }


def reference_steps(run):
    """Per step the packs' real (id, label, position) rows, from plan and documents alone."""
    plan = Plan.open(run.plan)
    steps = []
    for step in range(plan.num_steps):
        packs: Counter = Counter()
        for row in plan.step(step).to_pylist():
            tokens = []
            for document, start, length in zip(row["documents"], row["starts"], row["lengths"], strict=True):
                words = [*run.documents[document].tolist(), -100]
                tokens += [(words[i], words[i + 1], i - start) for i in range(start, start + length)]
            packs[tuple(tokens)] += 1
        steps.append(packs)
    return steps


def loaded_steps(run, cut):
    """The same, put together from what every rank of ``cut`` is handed."""
    steps: dict[int, Counter] = {}
    for dp_rank in range(cut["dp_size"]):
        ranks = [run.load(cut, dp_rank=dp_rank, cp_rank=r) for r in range(cut["cp_size"])]
        for batches in zip(*ranks, strict=True):
            names = ("input_ids", "labels", "position_ids", "padding_mask")
            maps = batches[0].sharder.index_maps
            columns = [merge(maps, [batch.tensors[name] for batch in batches]).tolist() for name in names]
            rows = list(zip(*columns, strict=True))
            packs = steps.setdefault(batches[0].info.step, Counter())
            for first in range(0, len(rows), PACK_TOKENS * 2):
                real = tuple(row[:3] for row in rows[first : first + PACK_TOKENS * 2] if not row[3])
                packs.update([real] if real else [])
    return [steps[step] for step in sorted(steps)]


@given(cut=cuts())
@settings(max_examples=25)
def test_packs_of_a_step_depend_on_nothing_but_corpus_and_plan(run, cut):
    assert loaded_steps(run, cut) == reference_steps(run)


def fingerprints(batches):
    return [(b.info, {name: t.tolist() for name, t in b.tensors.items()}) for b in batches]


@given(cut=cuts(), data=st.data())
@settings(max_examples=25)
def test_resume_at_any_batch_equals_an_uninterrupted_run(run, cut, data):
    place = {
        "dp_rank": data.draw(st.integers(0, cut["dp_size"] - 1)),
        "cp_rank": data.draw(st.integers(0, cut["cp_size"] - 1)),
    }
    whole = fingerprints(run.load(cut, **place))
    stop = data.draw(st.integers(0, len(whole)))
    first = run.load(cut, **place)
    got = fingerprints(islice(first, stop))
    saved = json.dumps(first.state_dict())

    second = run.load(cut, **place)
    second.load_state_dict(json.loads(saved))

    assert json.dumps(second.state_dict()) == saved
    assert got + fingerprints(second) == whole


@given(first=cuts(), second=cuts(), data=st.data())
@settings(max_examples=25)
def test_any_cut_goes_on_from_any_border_of_any_other(run, first, second, data):
    before, after = run.load(first), run.load(second)
    border = data.draw(st.integers(0, before.num_steps))
    for _ in islice(before, border * before.num_micro_batches):
        pass

    after.load_state_dict(before.state_dict())

    assert after.state_dict() == before.state_dict()
    places = [(batch.info.step, batch.info.micro_batch) for batch in after]
    steps, micro_batches = range(border, after.num_steps), range(after.num_micro_batches)
    assert places == [(step, m) for step in steps for m in micro_batches]
