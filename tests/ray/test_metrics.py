"""Counters of actors and of the driver, as a scrape of Ray's own port shows them."""

import time
import urllib.request
from collections import defaultdict
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ringfeed.workers.environment import choose_ray_auth, worker_environment
from ringfeed.workers.metrics import Role, WorkerMetrics

pytestmark = pytest.mark.ray

OWN_TAGS = {"role", "service"}


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


def wait_for_samples(url, expected):
    deadline = time.monotonic() + 30
    found: dict[tuple[str, str, str], float] = {}
    while time.monotonic() < deadline and found != expected:
        time.sleep(0.5)
        found = own_samples(url)
    return found


def test_a_scrape_shows_what_actors_and_driver_counted(metrics_url):
    import ray

    class Counting:
        def __init__(self, role):
            self.metrics = WorkerMetrics(Role(role), service="one")

        def build(self, blocks):
            for _ in range(blocks):
                self.metrics.built(tokens=4096, nbytes=32_768)

        def serve(self):
            self.metrics.sent(nbytes=1000)
            self.metrics.retried(0)
            self.metrics.retried(2)
            self.metrics.streams(3)
            self.metrics.streams(1)

    actor: Any = ray.remote(num_cpus=0)(Counting)
    builders = [actor.remote("builder") for _ in range(2)]
    feeder = actor.remote("feeder")
    ray.get([builders[0].build.remote(2), builders[1].build.remote(3), feeder.serve.remote()])
    supervisor = WorkerMetrics(Role.SUPERVISOR, service="one")
    supervisor.restarted(Role.BUILDER)
    supervisor.restarted(Role.BUILDER)
    supervisor.restarted(Role.FEEDER)

    expected = {
        ("ray_ringfeed_builds_total", "builder", "one"): 5,
        ("ray_ringfeed_tokens_total", "builder", "one"): 5 * 4096,
        ("ray_ringfeed_bytes_total", "builder", "one"): 5 * 32_768,
        ("ray_ringfeed_bytes_total", "feeder", "one"): 1000,
        ("ray_ringfeed_retries_total", "feeder", "one"): 2,
        ("ray_ringfeed_streams", "feeder", "one"): 1,
        ("ray_ringfeed_restarts_total", "builder", "one"): 2,
        ("ray_ringfeed_restarts_total", "feeder", "one"): 1,
    }
    assert wait_for_samples(metrics_url, expected) == expected
