"""The service over two Ray nodes, one of which is killed: a feeder on each, ranks on two transports, and
the same bytes."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.workers import serve

pytestmark = [
    pytest.mark.ray,
    # Ray's Cluster leaves a socket open where the port of its dashboard is taken by another Ray.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    rng = np.random.default_rng(2)
    write_corpus(folder / "corpus", [rng.integers(0, 300, n) for n in rng.integers(1, 200, 600)], name="c")
    options: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 8, "max_cp": 2, "window": 2}
    run_plan(PlanOptions(output=folder / "plan", corpora=[folder / "corpus"], **options))
    return folder / "plan"


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
    # Two builders fit on the head, and SPREAD puts one of them on the other node as long as it is there.
    made = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
    ray.shutdown()
    made.shutdown()


def load(source, rank, **options):
    return Loader(source, dp_rank=rank, dp_size=2, cp_rank=1, cp_size=2, **options)


def test_a_node_that_is_killed_changes_no_byte(plan, cluster):
    other = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    expected = [list(load(plan, rank, layout="te")) for rank in range(2)]
    token = "a-token-of-ranks"  # noqa: S105
    small: dict[str, Any] = {"block_bytes": 1024, "node_bytes": 320 << 20}
    with serve(
        plan,
        cp_size=2,
        layout="te",
        builders=2,
        host="0.0.0.0",  # noqa: S104 - ranks need the token
        public_host="127.0.0.1",
        token=token,
        **small,
    ) as running:
        wait_for(running, {"builder": 2, "feeder": 2, "service": 1})
        nodes = {one.node_id for one in running.status().members if one.role == "feeder"}
        assert other.node_id in nodes
        assert len(nodes) == 2
        urls = [running.url, running.ray_url]
        loaders = [
            load(url, rank, token=token if url == running.url else None, prefetch_bytes=8192)
            for url in urls
            for rank in range(2)
        ]
        with ThreadPoolExecutor(len(loaders)) as threads:
            # Ranks go on while the node dies: what they asked of it is lost.
            reading = [threads.submit(read_slowly, loader) for loader in loaders]
            wait_until_begun(loaders)
            cluster.remove_node(other, allow_graceful=False)
            found = [one.result() for one in reading]
        for batches, theirs in zip(found, expected * 2, strict=True):
            assert [batch.info for batch in batches] == [batch.info for batch in theirs]
            for batch, their in zip(batches, theirs, strict=True):
                assert all(batch.tensors[name].equal(tensor) for name, tensor in their.tensors.items())
        # The other node's feeder is given up once Ray has told that the node is dead.
        wait_for(running, {"builder": 2, "feeder": 1, "service": 1})


def read_slowly(loader):
    """Return all batches; the last ones come seconds after the first."""
    found = []
    with loader:
        for batch in loader:
            found.append(batch)
            time.sleep(0.02)
    return found


def wait_until_begun(loaders):
    until = time.monotonic() + 60
    while not all(loader.state_dict()["step"] for loader in loaders):
        assert time.monotonic() < until
        time.sleep(0.01)


def wait_for(running, wanted):
    """Wait until exactly these members are ready, and there are no others."""
    until = time.monotonic() + 120
    while True:
        members = running.status().members
        ready = Counter(one.role for one in members if one.phase == "ready")
        if ready == wanted and len(members) == sum(wanted.values()):
            return
        assert time.monotonic() < until, running.status()
        time.sleep(0.1)
