"""A trainer rank's counters, as a scrape shows them."""

import threading
import time
import urllib.request
from concurrent.futures import Future
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from ringfeed.pipeline.block_fetcher import FetcherStatus
from ringfeed.pipeline.feed_source import FeedSource
from ringfeed.pipeline.feed_stall import Patience
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.loader_metrics import StallCause
from ringfeed.pipeline.local_fetcher import LocalFetcher
from ringfeed.pipeline.rank_metrics import RankMetrics
from ringfeed.pipeline.ranks import RankPlace

PLACE = RankPlace(dp_rank=0, dp_size=2, cp_rank=1, cp_size=2)
NEVER = threading.Event()


def scrape(port):
    """What Prometheus gets: (name, cause) -> value, and the labels of every sample."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {
        (sample.name, sample.labels.get("cause")): sample.value
        for sample in samples
        if not sample.name.endswith("_created")
    }
    return values, [sample.labels for sample in samples]


@pytest.fixture
def metrics():
    return RankMetrics(labels={"rank": "3"})


@pytest.fixture
def server(metrics):
    with metrics.serve(0) as server:
        yield server


def test_a_scrape_shows_what_a_loader_did(make_builder, metrics, server):
    with Loader(
        LocalFetcher(make_builder()), metrics=metrics, dp_rank=0, dp_size=2, cp_rank=1, cp_size=2
    ) as loader:
        tokens = [len(batch.tensors["input_ids"]) for batch in loader]
        source = loader._source
    assert isinstance(source, FeedSource)

    values, labels = scrape(server.port)

    assert values["ringfeed_tokens_total", None] == sum(tokens) > 0
    assert values["ringfeed_batches_total", None] == len(tokens)
    # Ids and labels of four bytes at the least; offsets and headers beside.
    assert 8 * sum(tokens) < values["ringfeed_bytes_total", None] < 20 * sum(tokens)
    assert values["ringfeed_wait_seconds_total", None] > 0
    stalled = {cause: values["ringfeed_stall_seconds_total", cause.value] for cause in StallCause}
    assert sum(stalled.values()) == pytest.approx(source.seconds_waited)
    assert stalled[StallCause.BUILDER] > 0
    assert {values["ringfeed_stalls_total", cause.value] for cause in StallCause} == {0}
    assert values["ringfeed_retries_total", None] == 0
    assert all(label["rank"] == "3" for label in labels)


def test_the_names_are_those_that_dashboards_and_rules_know(server):
    names = {name for name, _ in scrape(server.port)[0]}

    assert names == {
        "ringfeed_tokens_total",
        "ringfeed_batches_total",
        "ringfeed_bytes_total",
        "ringfeed_wait_seconds_total",
        "ringfeed_retries_total",
        "ringfeed_stall_seconds_total",
        "ringfeed_stalls_total",
    }


class Slow:
    """A fetcher over a real builder that answers late, damages an answer, and tells of retries."""

    def __init__(self, builder, *, seconds=0.0, damage=0):
        self.builder, self.seconds, self.damage = builder, seconds, damage
        self.known_steps = 1
        self.retries = 0

    def facts(self):
        facts = self.builder.facts()
        self.known_steps += 1
        return replace(facts, num_steps=min(self.known_steps, facts.num_steps), is_growing=True)

    def fetch(self, request):
        future: Future = Future()

        def answer():
            block = self.builder.block(request)
            if self.damage:
                self.damage -= 1
                block = replace(block, header=block.header[:-1] + b"!")
            future.set_result(block)

        threading.Timer(self.seconds, answer).start()
        return future

    def status(self):
        return FetcherStatus(asked="the slow one", bytes_held={}, retries=self.retries)

    def close(self):
        pass


def feed_of(fetcher, metrics):
    patience = Patience(warn_seconds=0.1, fail_seconds=60, poll_seconds=0.15)
    return FeedSource(fetcher, place=PLACE, window_bytes=1, patience=patience, metrics=metrics)


def test_waits_are_told_by_what_was_waited_for(make_builder, metrics, server):
    source = feed_of(Slow(make_builder(block_bytes=512), seconds=0.2), metrics)
    assert source.wait_for(0, 0, stop=NEVER)
    after_block, _ = scrape(server.port)
    assert source.step_share(1, PLACE).step == 1
    after_facts, _ = scrape(server.port)
    assert source.wait_for(6, 0, stop=NEVER)
    after_plan, _ = scrape(server.port)
    source.close()

    def stalls(values):
        return [values["ringfeed_stalls_total", cause] for cause in ("builder", "facts", "planner")]

    def seconds(values, cause):
        return values["ringfeed_stall_seconds_total", cause]

    assert (stalls(after_block), stalls(after_facts)) == ([1, 0, 0], [1, 1, 0])
    assert stalls(after_plan)[2] == 1
    assert seconds(after_block, "builder") >= 0.2
    assert seconds(after_facts, "facts") >= 0.2
    assert seconds(after_plan, "planner") - seconds(after_facts, "planner") >= 0.15


def test_a_damaged_block_and_what_the_fetcher_asked_again_are_retries(make_builder, metrics, server):
    fetcher = Slow(make_builder(), damage=1)
    fetcher.retries = 5
    source = feed_of(fetcher, metrics)
    assert source.wait_for(0, 0, stop=NEVER)
    fetcher.retries = 7
    assert source.wait_for(1, 0, stop=NEVER)
    source.close()

    assert scrape(server.port)[0]["ringfeed_retries_total", None] == 1 + 7


def test_the_time_that_a_training_loop_stands_still_is_its_own(make_builder, metrics, server):
    """A slow trainer waits for nothing, however long the loader's thread waits."""
    with Loader(
        LocalFetcher(make_builder()), metrics=metrics, dp_rank=0, dp_size=2, cp_rank=1, cp_size=2
    ) as loader:
        batches = iter(loader)
        next(batches)
        before = scrape(server.port)[0]["ringfeed_wait_seconds_total", None]
        time.sleep(1.5)
        next(batches)
        after = scrape(server.port)[0]["ringfeed_wait_seconds_total", None]

    assert after - before < 1.0


def test_a_closed_port_is_free_again(metrics):
    with metrics.serve(0) as server:
        port = server.port
    with metrics.serve(port) as again:
        assert again.port == port


def test_counters_can_be_registered_beside_a_users_own():
    registry = CollectorRegistry()
    RankMetrics(registry=registry).batch(tokens=7, seconds=0.0)

    assert registry.get_sample_value("ringfeed_tokens_total") == 7
    with pytest.raises(ValueError, match="ringfeed_tokens"):
        RankMetrics(registry=registry)


def test_a_label_that_the_counters_use_themselves_is_refused():
    with pytest.raises(ValueError, match="'cause' is taken"):
        RankMetrics(labels={"cause": "mine"})
