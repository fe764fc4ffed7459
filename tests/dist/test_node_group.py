"""tp peers on one node share one fetch, over real gloo processes and a real Flight server."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.shm_files import sweep
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.block_builder import BlockBuilder, PlanOpener
from ringfeed.workers.flight_options import ServerOptions
from ringfeed.workers.flight_server import FlightServer

pytestmark = pytest.mark.dist

RANK = Path(__file__).with_name("node_group_rank.py")


class Counting:
    """A builder that notes what it is asked for."""

    def __init__(self, builder):
        self._builder = builder
        self.asked = []

    def facts(self):
        return self._builder.facts()

    def block(self, request):
        self.asked.append(request)
        return self._builder.block(request)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 500, n) for n in rng.integers(5, 150, 100)]
    write_corpus(folder / "corpus", documents, name="c", pad_id=0)
    sizes: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 4, "max_cp": 2, "window": 2, "balance": "best_fit"}
    run_plan(PlanOptions(output=folder / "plan", corpora=[folder / "corpus"], **sizes))
    (folder / "other").symlink_to(folder / "plan")
    return folder


@pytest.fixture
def service(folder):
    """A Flight server of the plan; its URL is in the folder."""
    opened = OpenOptions(layout=make_layout("te"), cp_size=2)
    opener = PlanOpener(plan=folder / "plan", spec=open_spec(Plan.open(folder / "plan"), opened, pad_id=0))
    supply = Counting(BlockBuilder(opener, block_bytes=1024))
    with FlightServer(supply, ServerOptions()) as server:
        (folder / "url.txt").write_text(server.url)
        yield server, supply
    for path in folder.glob("rendezvous-*"):
        path.unlink()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_peers_get_the_bytes_of_the_plan(run_ranks, folder, service, num_ranks):
    run_ranks(RANK, num_ranks=num_ranks, folder=folder)
    assert not service[0].num_streams


def test_the_service_sees_one_fetch_of_two_peers_also_when_one_is_quicker(folder, service):
    _, supply = service
    ranks = [begin(folder, rank) for rank in range(2)]
    for rank in ranks:
        assert json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) == "done"
    blocks = [request for request in supply.asked if request.columns]
    assert len(blocks) > 10
    assert len(blocks) == len(set(blocks))


@pytest.mark.parametrize("killed", [0, 1], ids=["leader", "follower"])
def test_one_that_is_killed_ends_its_group_or_is_done_without(folder, service, killed):
    ranks = [begin(folder, rank) for rank in range(2)]
    other = ranks[1 - killed]
    shared = Path(read(other))
    assert shared.exists()
    read(other)
    os.kill(ranks[killed].pid, signal.SIGKILL)
    ranks[killed].communicate()
    told = read(other)
    while isinstance(told, int):
        told = read(other)
    gone = f"ConnectionError: rank 0 (pid {ranks[0].pid}), which fetches for this node group, is gone"
    assert told == "done" if killed else gone in told
    other.communicate(timeout=60)
    sweep()
    assert not shared.exists()


def begin(folder, rank):
    return subprocess.Popen(
        [sys.executable, str(RANK), str(folder), "2", str(rank), "kill"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def read(process):
    line = process.stdout.readline()
    assert line, process.wait()
    return json.loads(line)
