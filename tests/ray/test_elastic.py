"""A run that goes on with other sizes, layouts and transports trains on the same global batches."""

import json
from contextlib import ExitStack
from itertools import islice
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.sharding.index_map import merge
from ringfeed.workers import serve
from ringfeed.workers.ray_session import ray_session

pytestmark = pytest.mark.ray

SMALL: dict[str, Any] = {"builders": 1, "block_bytes": 1024, "node_bytes": 320 << 20}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """More than 70 steps of 8 packs of 128 slots."""
    folder = tmp_path_factory.mktemp("elastic")
    rng = np.random.default_rng(4)
    documents = [rng.integers(0, 300, n) for n in rng.integers(1, 200, 800)]
    write_corpus(folder / "corpus", documents, name="corpus", pad_id=5)
    options: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 8, "max_cp": 4, "window": 4, "seed": 1}
    run_plan(PlanOptions(output=folder / "plan", corpora=[folder / "corpus"], **options))
    assert Plan.open(folder / "plan").num_steps > 70
    return folder / "plan"


@pytest.fixture(scope="module")
def services(plan):
    """Two layouts of one plan, served on one Ray; and where a rank finds each of them."""
    with (
        ray_session(num_cpus=2, object_store_bytes=80 << 20),
        serve(plan, cp_size=2, layout="te", **SMALL) as te,
        serve(plan, cp_size=4, layout="whole_document", name="other", **SMALL) as other,
    ):
        yield {"flight": te.url, "object store": te.ray_url, "other layout": other.url}


class Run:
    """All ranks of a run, in step with each other."""

    def __init__(self, source, *, dp, cp, state=None, **options):
        self.stack = ExitStack()
        self.cp = cp
        self.loaders = [
            self.stack.enter_context(
                Loader(source, dp_rank=d, dp_size=dp, cp_rank=c, cp_size=cp, prefetch_bytes=8192, **options)
            )
            for d in range(dp)
            for c in range(cp)
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(json.loads(state))
        self.iterators = [iter(loader) for loader in self.loaders]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stack.close()

    def train(self, num_batches):
        """Take so many micro-batches on every rank, or all; return each step's packs, in one order."""
        steps: dict[int, list[Any]] = {}
        for row in islice(zip(*self.iterators, strict=True), num_batches):
            for first in range(0, len(row), self.cp):
                peers = row[first : first + self.cp]
                steps.setdefault(peers[0].info.step, []).extend(whole_pack(peers))
        return {step: sorted(packs) for step, packs in steps.items()}

    def state(self):
        """The state, which is the same on every rank, as text."""
        states = {json.dumps(loader.state_dict(), sort_keys=True) for loader in self.loaders}
        assert len(states) == 1
        return states.pop()


def whole_pack(peers):
    """Return the pack that cp peers hold parts of, as its documents and real tokens; none if it is empty."""
    info = peers[0].info
    if not info.num_documents:
        return []
    maps = [peer.sharder.index_map for peer in peers]
    whole = {
        name: merge(maps, [peer.tensors[name].numpy() for peer in peers])
        for name in ("input_ids", "labels", "position_ids", "padding_mask")
    }
    real = ~whole.pop("padding_mask")
    return [(info.documents, *(values[real].tobytes() for values in whole.values()))]


@pytest.fixture(scope="module")
def expected(plan):
    """What each step holds, from one rank that never stops."""
    with Run(plan, dp=1, cp=1, layout="identity") as run:
        return run.train(None)


def test_global_batches_are_the_same_over_dp_4_then_2_then_8(plan, services, expected):
    with Run(services["flight"], dp=4, cp=2) as run:
        found = run.train(37 * 2)
        at_37 = run.state()
    with Run(services["other layout"], dp=2, cp=4, state=at_37) as run:
        found |= run.train((61 - 37) * 4)
        at_61 = run.state()
    with Run(services["object store"], dp=8, cp=2, state=at_61) as run:
        found |= run.train(6)
        at_67 = run.state()
    with Run(plan, dp=8, cp=1, layout="identity", state=at_67) as run:
        found |= run.train(None)
    assert [json.loads(state)["step"] for state in (at_37, at_61, at_67)] == [37, 61, 67]
    assert found.keys() == expected.keys()
    assert found == expected


def test_a_stop_inside_a_step_goes_on_with_its_dp_and_with_no_other(plan, services, expected):
    with Run(services["object store"], dp=4, cp=2) as run:
        found = run.train(5)
        inside = run.state()
    assert (json.loads(inside)["step"], json.loads(inside)["micro_batch"]) == (2, 1)
    for source, options in ((services["flight"], {}), (plan, {"layout": "te"})):
        with pytest.raises(
            ValueError, match=r"dp_size=4, this loader has .*=2; .*before step 2 and before step 3"
        ):
            Run(source, dp=2, cp=2, state=inside, **options)
    with Run(services["other layout"], dp=4, cp=4, state=inside) as run:
        rest = run.train(None)
    halves = {2: sorted(found[2] + rest[2])}
    assert found | rest | halves == expected


def test_each_document_is_had_once(expected):
    documents = [one for packs in expected.values() for pack in packs for one in pack[0]]
    assert sorted(set(documents)) == list(range(800))
    # A document that comes twice was split over packs.
    assert len(documents) >= 800
