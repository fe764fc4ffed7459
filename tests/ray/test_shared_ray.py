"""One Ray in this process for a service and others: who stops first takes it from nobody."""

import os
import re
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.workers import serve
from ringfeed.workers.process_journal import processes_below
from ringfeed.workers.ray_session import ray_session

pytestmark = pytest.mark.ray


@pytest.fixture
def plan(tmp_path):
    documents = [np.arange(length) for length in range(1, 100)]
    write_corpus(tmp_path / "corpus", documents, name="corpus", pad_id=5)
    options: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 4, "max_cp": 2}
    run_plan(PlanOptions(output=tmp_path / "plan", corpora=[tmp_path / "corpus"], **options))
    return tmp_path / "plan"


def processes_of_ray():
    return processes_below(os.getpid(), re.compile(rf"/session_[\d_-]+_{os.getpid()}\b"))


def test_a_service_that_started_ray_and_stops_leaves_it_to_who_came_after_and_then_nothing_is_left(plan):
    class Other:
        def pid(self):
            return os.getpid()

    running = serve(plan, cp_size=2, layout="te", builders=1, block_bytes=1024, node_bytes=320 << 20)
    with running, ray_session() as session:
        import ray

        assert session.address == "running"
        make: Any = ray.remote(num_cpus=0, max_restarts=0)(Other)
        actor = make.remote()
        pid = ray.get(actor.pid.remote(), timeout=60)
        running.stop()
        assert ray.get(actor.pid.remote(), timeout=60) == pid
        # The head answers, too: a new actor is placed by it.
        assert ray.get(make.remote().pid.remote(), timeout=60) != pid
        assert processes_of_ray()
    assert not ray.is_initialized()
    assert processes_of_ray() == []
