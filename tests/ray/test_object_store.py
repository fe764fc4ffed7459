"""``ray-actor://`` on a real Ray: the plan's bytes whoever dies, and no tensor over shared memory."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringfeed.pipeline.block_fetcher import FeedQuestion
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.digest_check import RankMismatchError
from ringfeed.pipeline.digest_report import DigestReport
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS, BlockRequest
from ringfeed.pipeline.flight_client import open_fetcher
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.step_block import BlockHeader, EncodedBlock, column_digests
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers import serve
from ringfeed.workers.block_builder import PlanOpener
from ringfeed.workers.ray_session import ray_session
from ringfeed.workers.roster import BuilderMember, Roster
from ringfeed.workers.service_actor import ServiceActor

pytestmark = pytest.mark.ray

LAYOUTS = [
    ("te", {}),
    ("head_tail", {}),
    ("contiguous", {}),
    ("whole_document", {}),
    ("magi", {}),
    ("magi", {"uneven": True}),
    ("ptrr", {"block": 16}),
    ("identity", {}),
]
# Ray returns less than 100 KB by value: blocks must be larger to lie in the object store.
BLOCK_BYTES = 1 << 18
URL = "ray-actor://tests/feed"


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """240 documents of up to 9,000 tokens in steps of 8 packs of 8,192 slots."""
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(2)
    documents = [rng.integers(0, 90_000, n) for n in rng.integers(1, 9000, 240)]
    write_corpus(folder / "corpus", documents, name="corpus", pad_id=5)
    options: dict[str, Any] = {
        "balance": "best_fit",
        "window": 2,
        "pack_tokens": 8192,
        "packs_per_step": 8,
        "max_cp": 4,
    }
    run_plan(PlanOptions(output=folder / "plan", corpora=[folder / "corpus"], **options))
    return folder / "plan"


@pytest.fixture(scope="module")
def local_ray():
    with ray_session(num_cpus=4):
        yield


def builder_shell():
    """Return the class of builder actors; defined here, so that it travels by value."""

    class Shell:
        def use(self, opener, block_bytes):
            from ringfeed.workers.block_builder import BlockBuilder

            self.builder = BlockBuilder(opener, block_bytes=block_bytes)

        def facts(self):
            return self.builder.facts().to_json()

        def block(self, request):
            from ringfeed.pipeline.feed_request import BlockRequest

            return self.builder.block(BlockRequest.from_json(request)).to_batch()

        def look(self):
            import ray

            node_id = ray.get_runtime_context().get_node_id()
            return {"pid": os.getpid(), "torch": "torch" in sys.modules, "node_id": node_id}

        def num_builds(self):
            return self.builder.num_builds

    return Shell


class Service:
    """What ``ringfeed serve`` has on Ray, and a hand on it: builders that can be killed and made again."""

    def __init__(self, num_builders):
        import ray

        self.ray = ray
        self.opener: Any = None
        self.version = 0
        self.actors: dict[str, Any] = {f"builder-{i}": self._make() for i in range(num_builders)}
        self.pids: dict[str, int] = {}
        self.start_directory()

    def _make(self):
        return self.ray.remote(num_cpus=0.1, max_restarts=0)(builder_shell()).remote()

    def start_directory(self):
        service = self.ray.remote(num_cpus=0)(ServiceActor)
        self.directory = service.options(name="feed", namespace="tests").remote()
        if self.opener is not None:
            self.tell()

    def use(self, plan, layout, cp_size=2, block_bytes=BLOCK_BYTES):
        """Serve this plan in this layout."""
        layout = make_layout(layout[0], **layout[1]) if isinstance(layout, tuple) else make_layout(layout)
        spec = open_spec(Plan.open(plan), OpenOptions(layout=layout, cp_size=cp_size), pad_id=5)
        self.opener = (PlanOpener(plan=plan, spec=spec), block_bytes)
        self.ray.get([actor.use.remote(*self.opener) for actor in self.actors.values()])
        self.tell()

    def tell(self):
        looks = self.ray.get([actor.look.remote() for actor in self.actors.values()])
        self.pids = {name: look["pid"] for name, look in zip(self.actors, looks, strict=True)}
        members = tuple(
            BuilderMember(name=name, node_id=look["node_id"], actor=actor)
            for (name, actor), look in zip(self.actors.items(), looks, strict=True)
        )
        self.version += 1
        facts = self.ray.get(next(iter(self.actors.values())).facts.remote())
        roster = Roster(version=self.version, facts_json=facts, builders=members)
        self.ray.get(self.directory.set_roster.remote(roster))

    def replace(self, name):
        self.actors[name] = self._make()
        self.ray.get(self.actors[name].use.remote(*self.opener))
        self.tell()


@pytest.fixture(scope="module")
def service(local_ray):
    return Service(2)


def load(source, *, cp=(0, 2), dp=(0, 2), **options):
    return Loader(source, dp_rank=dp[0], dp_size=dp[1], cp_rank=cp[0], cp_size=cp[1], **options)


def assert_same_batches(found, expected):
    count = 0
    for batch, other in zip(found, expected, strict=True):
        assert batch.info == other.info
        assert batch.tensors.keys() == other.tensors.keys()
        for name, tensor in other.tensors.items():
            assert batch.tensors[name].dtype == tensor.dtype
            assert batch.tensors[name].equal(tensor), name
        count += 1
    assert count


def lies_in_the_object_store(block):
    address = block.rows.column("input_ids").values.buffers()[1].address
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return "plasma" in line
    return False


@pytest.mark.parametrize(("name", "options"), LAYOUTS)
def test_a_rank_gets_the_bytes_of_the_plan(service, plan, name, options):
    service.use(plan, (name, options))
    for rank in range(2):
        place: dict[str, Any] = {"cp": (rank, 2), "dp": (1, 2)}
        with load(URL, **place) as loader:
            assert_same_batches(loader, load(plan, layout=make_layout(name, **options), **place))
    builds = sum(service.ray.get([actor.num_builds.remote() for actor in service.actors.values()]))
    # cp peers share them.
    per_block = 4 if name == "identity" else 8
    assert builds == -(-Plan.open(plan).num_steps * 4 // per_block)


def test_builders_have_no_torch(service):
    looks = service.ray.get([actor.look.remote() for actor in service.actors.values()])
    assert [look["torch"] for look in looks] == [False, False]


def test_blocks_lie_in_the_object_store_and_tensors_do_not(service, plan):
    """A rank scribbles over all that it gets; nobody else sees it (plasma is mapped writable)."""
    service.use(plan, "te")
    # Kept as they are stored, tensors could lie over what came.
    as_stored: dict[str, Any] = {"token_dtype": torch.int32}
    expected = list(islice(load(plan, layout="te", **as_stored), 8))
    actor = service.actors["builder-0"]
    place = RankPlace(dp_rank=0, dp_size=2, cp_rank=0, cp_size=2)
    request = BlockRequest(
        place=place, first_step=0, first_micro_batch=0, num_micro_batches=8, columns=BLOCK_COLUMNS
    )
    reference = actor.block.remote(request.to_json())
    before = column_digests(EncodedBlock.from_batch(service.ray.get(reference)).rows)

    with (
        load(URL, **as_stored) as loader,
        load(URL, **as_stored) as other,
        load(URL, cp=(1, 2), **as_stored) as peer,
    ):
        blocks = keep_blocks(loader)
        for batch in islice(loader, 8):
            for tensor in batch.tensors.values():
                tensor.fill_(1)
        assert_same_batches(islice(other, 8), expected)
        assert_same_batches(islice(peer, 8), islice(load(plan, layout="te", cp=(1, 2), **as_stored), 8))
        assert blocks
        assert all(lies_in_the_object_store(block) for block in blocks)
        (same,) = (block for block in blocks if BlockHeader.from_bytes(block.header).request == request)
        assert column_digests(same.rows) == before

    assert column_digests(EncodedBlock.from_batch(service.ray.get(reference)).rows) == before


def keep_blocks(loader):
    """Return a list that gets every block that this loader is given; it keeps them."""
    kept = []
    fetcher = loader._source._fetcher
    real = fetcher.fetch

    def fetch(request):
        future = real(request)
        future.add_done_callback(lambda done: None if done.cancelled() else kept.append(done.result()))
        return future

    fetcher.fetch = fetch
    loader._source._window._fetcher = fetcher
    return kept


def bytes_in_use():
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.object_store_bytes_used


def test_what_a_rank_is_past_leaves_the_object_store(service, plan):
    service.use(plan, "te")
    # Other tests keep blocks, in cycles.
    gc.collect()
    eventually(lambda: bytes_in_use() == 0)
    budget = 3 * BLOCK_BYTES
    with load(URL, prefetch_bytes=2 * budget) as loader:
        total = 0
        for number, batch in enumerate(loader):
            total += 8 * len(batch.tensors["input_ids"])
            if number % 16 == 15:
                # Ray gives bytes back once a second.
                eventually(lambda: bytes_in_use() <= budget)
    assert total > 8 * BLOCK_BYTES
    eventually(lambda: bytes_in_use() == 0)


def eventually(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"it did not happen within {seconds} s"
        time.sleep(0.05)


def test_builders_are_killed_in_both_ways_and_no_byte_changes(service, plan):
    service.use(plan, "te", block_bytes=1 << 15)
    kills = []

    def kill():
        for i in range(6):
            name = f"builder-{i % 2}"
            if i % 3:
                os.kill(service.pids[name], signal.SIGKILL)
            else:
                service.ray.kill(service.actors[name])
            kills.append(name)
            # The other one serves alone meanwhile; a new one takes the name.
            time.sleep(0.3)
            service.replace(name)

    with (
        ThreadPoolExecutor(1) as threads,
        # A window of a few blocks: what is asked for is asked for between the kills.
        load(URL, prefetch_bytes=1 << 17) as loader,
        load(URL, cp=(1, 2), dp=(1, 2), prefetch_bytes=1 << 17) as other,
    ):
        killer = threads.submit(kill)
        found, found_by_other = [], []
        for batch, others in zip(loader, other, strict=True):
            found.append(batch)
            found_by_other.append(others)
            # Slow enough for all kills to hit a run.
            while len(kills) < len(found) // 8 and not killer.done():
                time.sleep(0.02)
        assert_same_batches(found, load(plan, layout="te"))
        assert_same_batches(found_by_other, load(plan, layout="te", cp=(1, 2), dp=(1, 2)))
        killer.result()
        assert len(kills) == 6
        assert loader._source._fetcher._pool.num_retries > 0


def test_a_service_that_is_started_again_is_found_again(service, plan):
    service.use(plan, "te", block_bytes=1 << 15)
    with load(URL, prefetch_bytes=1 << 17) as loader:
        found = list(islice(loader, 6))
        for actor in [*service.actors.values(), service.directory]:
            service.ray.kill(actor)

        def start():
            time.sleep(1.0)
            for name in service.actors:
                service.actors[name] = service._make()
            service.ray.get([actor.use.remote(*service.opener) for actor in service.actors.values()])
            service.start_directory()

        with ThreadPoolExecutor(1) as threads:
            starter = threads.submit(start)
            found += list(loader)
            starter.result()
        assert_same_batches(found, load(plan, layout="te"))
        assert "asked again" in loader._source._fetcher.status().asked


def test_a_frozen_builder_is_left(service, plan):
    from ringfeed.workers.builder_pool import BuilderPool
    from ringfeed.workers.object_store import ObjectStoreFetcher
    from ringfeed.workers.pool_patience import PoolPatience
    from ringfeed.workers.ray_builders import RayBuilderCalls, RosterLookup

    service.use(plan, "te")
    pool = BuilderPool(
        RosterLookup("feed", "tests"), RayBuilderCalls(), patience=PoolPatience(reply_seconds=1.0)
    )
    os.kill(service.pids["builder-1"], signal.SIGSTOP)
    try:
        with load(ObjectStoreFetcher(pool)) as loader:
            assert_same_batches(loader, load(plan, layout="te"))
    finally:
        os.kill(service.pids["builder-1"], signal.SIGCONT)
    assert re.search(r"builder-1 did not answer within \d+ s", pool.status())


def test_refusals_of_a_builder_come_as_they_are(service, plan):
    service.use(plan, "te")
    with pytest.raises(
        ValueError, match=r"cp_size=4: this service cuts for cp_size=2; start one with --cp 4"
    ):
        load(URL, cp=(0, 4))
    with pytest.raises(ValueError, match="the service cuts with another layout"):
        load(URL, layout="contiguous")


def test_nobody_of_this_name_is_told_with_what_to_do(service):
    with pytest.raises(ConnectionError, match=r"no service is called 'nobody' .* --name nobody"):
        load("ray-actor://tests/nobody")


def test_a_state_of_another_transport_cp_and_layout_goes_on_here(service, plan):
    """In the middle of a step; what dp may do at its border is in test_elastic.py."""
    service.use(plan, "contiguous", cp_size=4)
    with load(plan, layout="te", dp=(1, 2)) as loader:
        list(islice(loader, 10))
        state = loader.state_dict()
    assert state["micro_batch"]
    for rank in (0, 3):
        expected = load(plan, layout="contiguous", cp=(rank, 4), dp=(1, 2))
        with load(URL, cp=(rank, 4), dp=(1, 2)) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            assert_same_batches(loader, islice(expected, 10, None))
    with (
        load(URL, cp=(0, 4), dp=(0, 4)) as loader,
        pytest.raises(ValueError, match=r"inside step 2 .*dp_size=2"),
    ):
        loader.load_state_dict(state)


def test_a_rank_with_other_packs_than_its_peers_stops_with_both_digests(service, plan):
    service.use(plan, "te")
    place = RankPlace(dp_rank=0, dp_size=2, cp_rank=1, cp_size=2, packs_per_chunk=2)
    with load(URL, packs_per_chunk=2, dp=(1, 2)) as loader:
        assert len(list(loader)) == 2 * loader.num_steps
        loader._check._asking.join(20)
        assert loader._check.num_checks == 1
    other = DigestReport.of(place, step=0, digest=0xABCD)
    service.ray.get(service.directory.compare.remote(other.to_json()))

    with load(URL, packs_per_chunk=2) as loader:
        batches = iter(loader)
        own = f"{next(batches).info.step_digest:016x}"
        loader._check._asking.join(20)
        with pytest.raises(RankMismatchError, match=rf"step 0 .*{own}, but cp rank 1 of 2 .*00abcd"):
            next(batches)


RANK = """
import sys
from ringfeed.pipeline.loader import Loader

with Loader(sys.argv[1], dp_rank=0, dp_size=2, cp_rank=1, cp_size=2) as loader:
    print([batch.info.digest for batch in loader])
"""


def test_a_process_of_its_own_joins_the_ray_and_is_served(service, plan):
    service.use(plan, "te")
    address = service.ray.get_runtime_context().gcs_address
    result = subprocess.run(
        [sys.executable, "-c", RANK, URL],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert result.returncode == 0, result.stderr
    expected = [batch.info.digest for batch in load(plan, layout="te", cp=(1, 2))]
    assert result.stdout.splitlines()[-1] == str(expected)


def test_the_real_service_serves_both_ways_through_kills_and_compares_for_both(local_ray, plan):
    options: dict[str, Any] = {"block_bytes": 1 << 15, "node_bytes": 320 << 20, "name": "real"}
    killed: set[int] = set()
    with serve(plan, cp_size=2, layout="te", builders=2, **options) as running:
        expected = [batch.info.digest for batch in load(plan, layout="te")]
        with load(running.ray_url, prefetch_bytes=1 << 17) as loader:
            found = []
            for number, batch in enumerate(loader):
                found.append(batch.info.digest)
                if number in (4, 20):
                    eventually(lambda: len(builder_pids(running) - killed) == 2)
                    pid = min(builder_pids(running) - killed)
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            loader._check._asking.join(20)
            assert loader._check.num_checks == 1
        assert found == expected

        # What a rank on Ray said of step 0 is held against a rank on Flight.
        place = RankPlace(dp_rank=0, dp_size=2, cp_rank=1, cp_size=2)
        fetcher = open_fetcher(running.url, FeedQuestion(place=place, columns=BLOCK_COLUMNS))
        other = fetcher.compare(DigestReport.of(place, step=0, digest=1))
        fetcher.close()
        assert other is not None
        assert other.who.startswith("cp rank 0 of 2")
        eventually(lambda: running.status().num_restarts["builder"] == 2)


def builder_pids(running):
    return {member.pid for member in running.status().members if member.role == "builder" and member.pid}
