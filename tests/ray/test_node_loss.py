"""A machine of the cluster is lost in the middle of a run: builders move, ranks go on, no byte differs."""

import time
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.workers import serve
from ringfeed.workers.environment import worker_environment

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SETTINGS: dict[str, Any] = {"builders": 2, "block_bytes": 1024, "node_bytes": 320 << 20}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Steps of 4 packs of 128 slots."""
    folder = tmp_path_factory.mktemp("lost")
    rng = np.random.default_rng(8)
    documents = [rng.integers(0, 300, n) for n in rng.integers(1, 200, 500)]
    write_corpus(folder / "corpus", documents, name="corpus", pad_id=5)
    options: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 4, "max_cp": 2, "window": 2}
    run_plan(PlanOptions(output=folder / "plan", corpora=[folder / "corpus"], **options))
    return folder / "plan"


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs, and two nodes with one each: a builder fits on either."""
    import ray
    from ray.cluster_utils import Cluster

    store: dict[str, Any] = {"object_store_memory": 80 << 20}
    with worker_environment():
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
        for _ in range(2):
            made.add_node(num_cpus=1, **store)
        ray.init(address=made.address, log_to_driver=False)
        made.wait_for_nodes()
        yield made
        ray.shutdown()
        made.shutdown()


def load(source, *, cp_rank, **options):
    return Loader(source, dp_rank=0, dp_size=1, cp_rank=cp_rank, cp_size=2, **options)


def feeders_of(running):
    assert running._loop is not None
    return running._loop.roster.feeders


def builders_by_node(running):
    ready = [one for one in running.status().members if one.role == "builder" and one.phase == "ready"]
    return {one.node_id: one.name for one in ready}


def wait_until(is_true, what, *, seconds=90):
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def test_a_node_that_is_killed_costs_time_and_no_byte(plan, cluster):
    expected = [list(load(plan, cp_rank=rank, layout="te")) for rank in range(2)]
    with serve(plan, cp_size=2, layout="te", **SETTINGS) as running:
        wait_until(lambda: len(builders_by_node(running)) == 2, "a builder on each node")
        num_feeders = len(feeders_of(running))
        found: list[list[Any]] = [[], []]
        with (
            load(running.url, cp_rank=0, prefetch_bytes=8192) as flight,
            load(running.ray_url, cp_rank=1, prefetch_bytes=8192) as store,
        ):
            ranks = [iter(flight), iter(store)]
            for number in range(len(expected[0])):
                if number == 20:
                    lost = kill_a_node(cluster, builders_by_node(running))
                    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
                for mine, rank in zip(found, ranks, strict=True):
                    mine.append(next(rank))
            assert [next(rank, None) for rank in ranks] == [None, None]
        wait_until(lambda: len(builders_by_node(running)) == 2, "the lost builder somewhere else")
        assert lost not in builders_by_node(running)
        wait_until(lambda: len(feeders_of(running)) == num_feeders, "feeders where builders are")
        assert {one.node_id for one in running.status().members} & {lost} == set()
    for mine, theirs in zip(found, expected, strict=True):
        for batch, other in zip(mine, theirs, strict=True):
            assert batch.info == other.info
            assert all(batch.tensors[name].equal(tensor) for name, tensor in other.tensors.items())


def kill_a_node(cluster, builders):
    """Kill a node that has a builder, at once and with all that runs there; return its id."""
    node = next(one for one in cluster.worker_nodes if one.node_id in builders)
    cluster.remove_node(node, allow_graceful=False)
    return node.node_id
