"""A small real run: two corpora of very uneven documents, planned; and what its views must be."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import Balance, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.shard_writer import ShardTask, num_folders, shards_manifest, write_steps
from ringfeed.pipeline.skip import skip_list
from ringfeed.pipeline.staging import StagedFolder
from ringfeed.pipeline.store import SHARDS_FORMAT
from ringfeed.sharding.layouts import make_layout

PAD = 0
PACK_TOKENS = 128
PACKS_PER_STEP = 8


@dataclass(frozen=True)
class Run:
    plan: Path
    documents: list[np.ndarray]
    num_prose: int

    def load(self, **changes):
        asked = {"dp_rank": 0, "dp_size": 1, "cp_rank": 0, "cp_size": 1, "layout": "te", **changes}
        return Loader(asked.pop("source", self.plan), **asked)

    def step_rows(self, step):
        return Plan.open(self.plan).step(step).to_pylist()

    def expected_pack(self, row, multiple, skipped=()):
        """One pack from the plan's table and the documents, token by token in plain Python."""
        out: dict[str, list] = {"input_ids": [], "labels": [], "position_ids": [], "padding_mask": []}
        real, slots, documents = [0], [0], []
        for document, start, length in zip(row["documents"], row["starts"], row["lengths"], strict=True):
            tokens = self.documents[document].tolist()
            kept = 0 if document in skipped else length
            slot = -(-length // multiple) * multiple
            after = [*tokens[1:], -100]
            out["input_ids"] += tokens[start : start + kept] + [PAD] * (slot - kept)
            out["labels"] += after[start : start + kept] + [-100] * (slot - kept)
            out["position_ids"] += [*range(kept)] + [0] * (slot - kept)
            out["padding_mask"] += [False] * kept + [True] * (slot - kept)
            real.append(real[-1] + kept)
            slots.append(slots[-1] + slot)
            documents += [document] if kept else []
        return self._with_tail(out, real, slots), documents

    @staticmethod
    def _with_tail(out, real, slots):
        tail = PACK_TOKENS - slots[-1]
        fills = {"input_ids": PAD, "labels": -100, "position_ids": 0, "padding_mask": True}
        out = {name: values + [fills[name]] * tail for name, values in out.items()}
        if tail:
            real, slots = [*real, real[-1]], [*slots, PACK_TOKENS]
        return {**out, "cu_seqlens": real, "cu_seqlens_padded": slots}


def make_shards(plan_path, output, *, layout, cp_size, skipped=()):
    """Pre-shard a whole plan, as ``ringfeed shard`` does on Ray."""
    plan = Plan.open(plan_path)
    asked = OpenOptions(layout=make_layout(layout), cp_size=cp_size)
    with StagedFolder.open(output, format=SHARDS_FORMAT, made_from={"test": str(output)}) as staged:
        task = ShardTask(
            plan=plan.path,
            folder=staged.path,
            spec=open_spec(plan, asked, pad_id=PAD),
            steps_per_folder=2,
            overlay=skip_list(skipped),
        )
        folders = range(num_folders(plan, steps_per_folder=2))
        entries = [entry for index in folders for entry in write_steps(task, index)]
        staged.publish(shards_manifest(plan, task, entries))
    return output


def make_documents(seed, lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 30_000, size=length, dtype=np.int32) for length in lengths]


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(5)
    # Mostly short, some longer than a pack, a few of one token.
    lengths = np.minimum(rng.lognormal(3.2, 1.1, size=150).astype(int) + 1, 400).tolist()
    prose, code = make_documents(1, [*lengths[:90], 1, 1, 300]), make_documents(2, lengths[90:])
    for name, documents in (("prose", prose), ("code", code)):
        write_corpus(folder / name, documents, name=name, pad_id=PAD)
    options = PlanOptions(
        output=folder / "plan",
        corpora=[folder / "prose", folder / "code"],
        pack_tokens=PACK_TOKENS,
        packs_per_step=PACKS_PER_STEP,
        max_cp=4,
        balance=Balance.BEST_FIT,
        slate_size=4,
        seed=3,
    )
    run_plan(options)
    return Run(plan=folder / "plan", documents=[*prose, *code], num_prose=len(prose))


@pytest.fixture(scope="session")
def shards(run, tmp_path_factory):
    """Shards of the run by (layout, cp size, skipped documents), each made once."""
    made = {}

    def get(layout="te", cp_size=2, skipped=()):
        key = (layout, cp_size, tuple(skipped))
        if key not in made:
            output = tmp_path_factory.mktemp("shards") / "out"
            made[key] = make_shards(run.plan, output, layout=layout, cp_size=cp_size, skipped=skipped)
        return made[key]

    return get
