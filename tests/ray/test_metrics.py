"""Counters of actors and of the driver, as a scrape of Ray's own port shows them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.rank_metrics import RankMetrics
from ringfeed.workers import serve
from ringfeed.workers.environment import choose_ray_auth, worker_environment
from ringfeed.workers.metrics import WorkerMetrics

pytestmark = pytest.mark.ray

OWN_TAGS = {"role", "service"}
SMALL: dict[str, Any] = {"block_bytes": 1024, "node_bytes": 320 << 20}


@pytest.fixture(scope="module")
def metrics_url():
    """A local Ray that shows counters after a second."""
    choose_ray_auth()
    import ray

    with worker_environment():
        ray.init(
            address="local",
            num_cpus=1,
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
            _system_config={"metrics_report_interval_ms": 1000},
        )
    node = ray.nodes()[0]
    yield f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    ray.shutdown()


def own_samples(url):
    """(name, role, service) -> what ringfeed counts, over all workers; names as Prometheus has them."""
    assert url.startswith("http://")
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
        text = answer.read().decode()
    found: dict[tuple[str, str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.keys() >= OWN_TAGS and "ringfeed" in sample.name:
                found[sample.name, sample.labels["role"], sample.labels["service"]] += sample.value
    return found


def wait_for(url, is_there):
    """What is counted once it is as wanted, or after half a minute."""
    deadline = time.monotonic() + 30
    found = own_samples(url)
    while time.monotonic() < deadline and not is_there(found):
        time.sleep(0.5)
        found = own_samples(url)
    return found


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    rng = np.random.default_rng(2)
    documents = [rng.integers(0, 300, n) for n in rng.integers(1, 100, 60)]
    write_corpus(folder / "corpus", documents, name="corpus", pad_id=5)
    options: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 4, "max_cp": 2}
    run_plan(PlanOptions(output=folder / "plan", corpora=[folder / "corpus"], **options))
    return folder / "plan"


def test_a_scrape_shows_what_a_service_did(metrics_url, plan):
    """Every name that actors have; the ranks are this process."""
    ranks = RankMetrics()
    with serve(plan, cp_size=2, layout="te", builders=1, name="one", **SMALL) as running:
        place: dict[str, Any] = {"dp_rank": 0, "dp_size": 1, "cp_size": 2}
        loaders = [Loader(running.url, cp_rank=rank, metrics=ranks, **place) for rank in range(2)]
        batches = [batch for loader in loaders for batch in loader]

        # One build makes both cp ranks' blocks; nothing is built twice. One pack more, for warmth.
        steps = [Plan.open(plan).step_packs(step) for step in range(Plan.open(plan).num_steps)]
        packs = sum(step.num_packs for step in steps)

        def is_built(found):
            return (
                found["ray_ringfeed_streams", "feeder", "one"] == 2
                and found["ray_ringfeed_tokens_total", "builder", "one"] == 128 * (packs + 1)
                and 0 < found["ray_ringfeed_builds_total", "builder", "one"] < len(batches)
                and found["ray_ringfeed_bytes_total", "builder", "one"] > 8 * 128 * packs
                and found["ray_ringfeed_bytes_total", "feeder", "one"] > 8 * 128 * packs
            )

        built = wait_for(metrics_url, is_built)
        assert is_built(built), built
        for loader in loaders:
            loader.close()
        (builder,) = [one for one in running.status().members if one.role == "builder"]
        assert builder.pid is not None
        os.kill(builder.pid, signal.SIGKILL)
        restarted = ("ray_ringfeed_restarts_total", "builder", "one")

        def is_restarted(found):
            return found[restarted] == 1 and not found["ray_ringfeed_streams", "feeder", "one"]

        found = wait_for(metrics_url, is_restarted)
        assert is_restarted(found), found


def test_what_was_seen_is_counted_once_and_by_whom(metrics_url):
    metrics = WorkerMetrics("feeder", service="two")
    metrics.see(bytes=0, retries=1)
    metrics.see(bytes=5, retries=1)
    metrics.see(bytes=7, retries=4)
    metrics.see_restarts({"builder": 2, "feeder": 0})
    metrics.see_restarts({"builder": 3, "feeder": 1})

    expected = {
        ("ray_ringfeed_bytes_total", "feeder", "two"): 7,
        ("ray_ringfeed_retries_total", "feeder", "two"): 4,
        ("ray_ringfeed_restarts_total", "builder", "two"): 3,
        ("ray_ringfeed_restarts_total", "feeder", "two"): 1,
    }

    def own(found):
        return {key: value for key, value in found.items() if key[2] == "two"}

    assert own(wait_for(metrics_url, lambda found: own(found) == expected)) == expected


def test_a_service_shows_its_metrics_where_it_was_told_to(plan):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "ringfeed.workers.cli",
        "serve",
        str(plan),
        "--cp",
        "2",
        "--layout",
        "te",
    ]
    options = ["--builders", "1", "--metrics-port", str(port), "--name", "three", "--json"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        with Loader(url, dp_rank=0, dp_size=1, cp_rank=0, cp_size=2) as loader:
            assert list(loader)
        key = ("ray_ringfeed_builds_total", "builder", "three")
        assert wait_for(f"http://127.0.0.1:{port}/metrics", lambda found: found[key] > 0)[key] > 0
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_metrics_port_is_refused_where_ray_has_one_already(metrics_url, plan):
    with pytest.raises(ValueError, match=r"metrics_port=9000 is for a Ray that is started here"):
        serve(plan, cp_size=2, layout="te", metrics_port=9000, **SMALL)
