"""A run that is stopped, resized, moved to other files and damaged: the same global batches, or an error."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import Balance, BlockLimits, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.shard_writer import ShardTask, num_folders, shards_manifest, write_steps
from ringfeed.pipeline.staging import StagedFolder
from ringfeed.pipeline.store import SHARDS_FORMAT
from ringfeed.sharding.index_map import merge
from ringfeed.sharding.layouts import make_layout

PACKS_PER_STEP = 8


def make_run(folder, *, num_documents):
    rng = np.random.default_rng(2)
    lengths = np.minimum(rng.lognormal(3.0, 1.0, size=num_documents).astype(int) + 1, 200)
    documents = [rng.integers(1, 50_000, size=length, dtype=np.int32) for length in lengths]
    write_corpus(folder / "corpus", documents, name="corpus")
    options = PlanOptions(
        output=folder / "plan",
        corpora=[folder / "corpus"],
        pack_tokens=64,
        packs_per_step=PACKS_PER_STEP,
        max_cp=2,
        balance=Balance.BEST_FIT,
        slate_size=4,
        seed=6,
        block_limits=BlockLimits(steps=16),
    )
    run_plan(options)
    plan = Plan.open(folder / "plan")
    spec = open_spec(plan, OpenOptions(layout=make_layout("te"), cp_size=2), pad_id=0)
    with StagedFolder.open(folder / "shards", format=SHARDS_FORMAT, made_from={"test": 1}) as staged:
        task = ShardTask(plan=plan.path, folder=staged.path, spec=spec, steps_per_folder=16)
        folders = range(num_folders(plan, steps_per_folder=16))
        entries = [entry for index in folders for entry in write_steps(task, index)]
        staged.publish(shards_manifest(plan, task, entries))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), num_documents=1_400)


def open_ranks(source, *, dp_size, cp_size=2, layout="te"):
    """All ranks' loaders, [dp][cp]."""
    return [
        [
            Loader(source, dp_rank=d, dp_size=dp_size, cp_rank=c, cp_size=cp_size, layout=layout)
            for c in range(cp_size)
        ]
        for d in range(dp_size)
    ]


def train(ranks, num_steps, state=None):
    """Run ``num_steps`` on all ranks; return each step's packs (real tokens) and the state after."""
    steps: list[Counter] = [Counter() for _ in range(num_steps)]
    states = set()
    for peers in ranks:
        for loader in peers:
            if state is not None:
                loader.load_state_dict(json.loads(state))
        num_batches = num_steps * peers[0].num_micro_batches
        for i, batches in enumerate(islice(zip(*peers, strict=True), num_batches)):
            maps = batches[0].sharder.index_maps
            tokens, padding = (
                merge(maps, [batch.tensors[name] for batch in batches])
                for name in ("input_ids", "padding_mask")
            )
            if not padding.all():
                steps[i // peers[0].num_micro_batches][tuple(tokens[~padding].tolist())] += 1
        states |= {json.dumps(loader.state_dict()) for loader in peers}
    assert len(states) == 1, "every rank has the same state"
    return steps, states.pop()


def test_dp_4_stop_at_37_dp_2_until_61_dp_8_gives_the_same_global_batches(run):
    num_steps = Plan.open(run / "plan").num_steps
    assert num_steps > 70
    undisturbed, _ = train(open_ranks(run / "plan", dp_size=1, cp_size=1), num_steps)

    first, state = train(open_ranks(run / "plan", dp_size=4), 37)
    second, state = train(open_ranks(run / "shards", dp_size=2), 61 - 37, state)
    third, state = train(
        open_ranks(run / "plan", dp_size=8, cp_size=4, layout="contiguous"), num_steps - 61, state
    )

    assert first + second + third == undisturbed
    assert json.loads(state)["step"] == num_steps


def test_a_stop_inside_a_step_resumes_under_the_same_dp_only(run):
    loader = open_ranks(run / "plan", dp_size=2)[0][0]
    whole = [batch.tensors["input_ids"].tolist() for batch in open_ranks(run / "plan", dp_size=2)[0][0]]
    got = [batch.tensors["input_ids"].tolist() for batch in islice(loader, 10)]
    state = loader.state_dict()

    with pytest.raises(ValueError, match="before step 2 and before step 3"):
        open_ranks(run / "plan", dp_size=4)[0][0].load_state_dict(state)
    same = open_ranks(run / "shards", dp_size=2)[0][0]
    same.load_state_dict(state)

    assert got + [batch.tensors["input_ids"].tolist() for batch in same] == whole


@pytest.mark.parametrize(
    ("source", "pattern"), [("plan", "corpus/tokens-*.arrow"), ("shards", "shards/*1/cp-00.arrow")]
)
def test_a_flipped_byte_is_found_named_and_never_handed_out(tmp_path, source, pattern):
    folder = make_run(tmp_path, num_documents=400)
    clean = [batch.tensors["input_ids"].tolist() for batch in open_ranks(folder / source, dp_size=1)[0][0]]
    path = sorted(folder.glob(pattern))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)

    got = []
    with pytest.raises(CorruptDataError, match=path.name):
        got.extend(open_ranks(folder / source, dp_size=1)[0][0])

    assert 0 < len(got) < len(clean)
    assert [batch.tensors["input_ids"].tolist() for batch in got] == clean[: len(got)]


@pytest.mark.parametrize(
    ("source", "pattern"),
    [("plan", "corpus/tokens-*.arrow"), ("plan", "plan/block-*"), ("shards", "shards/*1/cp-00.arrow")],
)
def test_a_truncated_file_is_refused(tmp_path, source, pattern):
    folder = make_run(tmp_path, num_documents=400)
    path = sorted(folder.glob(pattern))[-1]
    path.write_bytes(path.read_bytes()[:-9])

    with pytest.raises(CorruptDataError, match=path.name):
        list(open_ranks(folder / source, dp_size=1)[0][0])
