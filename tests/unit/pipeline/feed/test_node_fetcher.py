"""Members of a node group over a real hub, socket and files, in one process."""

import gc
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from ringfeed.pipeline import node_fetcher, shm_slots
from ringfeed.pipeline.block_fetcher import FetcherStatus
from ringfeed.pipeline.block_reader import read_block
from ringfeed.pipeline.digest_report import DigestReport
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS
from ringfeed.pipeline.feed_source import FeedSource
from ringfeed.pipeline.feed_stall import Patience
from ringfeed.pipeline.feed_window import BlockGrid
from ringfeed.pipeline.local_fetcher import LocalFetcher
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.node_fetcher import HubAddress, NodeFetcher
from ringfeed.pipeline.node_hub import SOCKET, HubOptions, NodeHub
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.shm_files import SHARED_MEMORY

PLACE = RankPlace(dp_rank=1, dp_size=2, cp_rank=1, cp_size=2)
BUDGET = 5000
NEVER = threading.Event()


class Answers:
    """A fetcher whose answers are a builder's, or an error, or never come."""

    def __init__(self, builder):
        self._local = LocalFetcher(builder)
        self.asked = []
        self.error: Exception | None = None
        self.is_silent = False
        self.is_closed = False

    def facts(self):
        return self._local.facts()

    def fetch(self, request):
        self.asked.append(request)
        future: Future = Future()
        if self.error is not None:
            future.set_exception(self.error)
        elif not self.is_silent:
            return self._local.fetch(request)
        return future

    def status(self):
        return FetcherStatus(asked="builder 7", bytes_held={"builder 7": 123}, retries=2)

    def close(self):
        self.is_closed = True
        self._local.close()


@pytest.fixture
def inner(make_builder):
    return Answers(make_builder(block_bytes=512))


@pytest.fixture
def join(inner):
    """Return a function that opens a group: its hub, and a fetcher for each member."""
    hubs = []

    def open_group(members=2, *, columns=BLOCK_COLUMNS, budget=BUDGET, patience=5.0):
        ranks = tuple(range(10, 10 + members))
        options = HubOptions(place=PLACE, columns=columns, members=ranks, budget=budget, patience=patience)
        hub = NodeHub(inner, options)
        hubs.append(hub)
        address = HubAddress(folder=hub.folder.name, proof=hub.folder.proof, leader=10, pid=99)
        ends = [None if member else hub.close for member in range(members)]
        return hub, [
            NodeFetcher(address, member=m, socket_name=SOCKET, on_close=end) for m, end in enumerate(ends)
        ]

    yield open_group
    for hub in hubs:
        hub.abort()


def requests(inner, columns=BLOCK_COLUMNS):
    facts = inner.facts()
    grid = BlockGrid.of(facts, PLACE, columns)
    end = grid.index(facts.num_steps, 0)
    return [grid.request(first, end) for first in range(0, end, grid.batches_per_block)]


def test_members_get_the_same_bytes_of_one_fetch_and_what_they_want_of_it(inner, join):
    columns = [BLOCK_COLUMNS, ("pieces", "labels"), ("pieces",)]
    _, members = join(3)
    facts = members[0].facts()
    for member in members[1:]:
        member.facts()
    for number, request in enumerate(requests(inner)[:6]):
        read = []
        for member, wanted in zip(members, columns, strict=True):
            own = requests(inner, wanted)[number]
            read.append(read_block(member.fetch(own).result(timeout=20), own, facts))
        expected = read_block(LocalFetcher(inner._local._supply).fetch(request).result(), request, facts)
        for block in read:
            assert block.shares.keys() == expected.shares.keys()
        for place in expected._rows:
            assert read[0].view(*place).input_ids.tolist() == expected.view(*place).input_ids.tolist()
            assert read[1].view(*place).labels.tolist() == expected.view(*place).labels.tolist()
            assert read[1].view(*place).chunk_digest == read[2].view(*place).chunk_digest
    assert inner.asked == requests(inner)[:6]


def test_fewer_columns_than_all_are_fetched_where_nobody_wants_more(inner, join):
    _, members = join(2, columns=("pieces", "labels"))
    facts = members[0].facts()
    members[1].facts()
    for member, wanted in zip(members, [("pieces", "labels"), ("pieces",)], strict=True):
        own = requests(inner, wanted)[0]
        block = read_block(member.fetch(own).result(timeout=20), own, facts)
        assert block.request.columns == wanted
    assert [request.columns for request in inner.asked] == [("pieces", "labels")]


def test_files_stay_within_the_budget_and_go_with_their_members(inner, join, eventually):
    hub, members = join()
    sources = [FeedSource(member, place=PLACE, window_bytes=BUDGET // 2) for member in members]
    used = []
    for step in range(sources[0].num_steps):
        for source in sources:
            assert source.wait_for(step, 0, stop=NEVER)
            source.wait_for(step, 1, stop=NEVER)
            used.append(hub.folder.bytes_held)
    # A file may be an eighth larger than what it is for.
    assert 0 < max(used) <= BUDGET * 9 / 8
    assert len(inner.asked) == len(set(inner.asked)) > 10
    sources[0].close()
    assert not inner.is_closed
    sources[1].close()
    eventually(lambda: inner.is_closed)
    assert not (SHARED_MEMORY / hub.folder.name).exists()


@pytest.mark.parametrize("budget", [0, BUDGET])
def test_files_that_nobody_uses_go_while_there_are_more_than_the_budget(inner, join, eventually, budget):
    hub, members = join(1, budget=budget)
    members[0].facts()
    together = 2 if budget else 1
    for width in (1, 2):
        # Wider ones do not fit into the files that were there before.
        wanted = [replace(request, num_micro_batches=width) for request in requests(inner)[:together]]
        held = [members[0].fetch(request).result(timeout=20) for request in wanted]
        assert 0 < hub.folder.bytes_held <= (budget * 9 / 8 or BUDGET)
        held.clear()
        gc.collect()
        eventually(lambda: not hub._pool._used)
        assert hub.folder.bytes_held <= budget


def test_a_block_that_cannot_be_put_into_a_file_is_an_error_and_may_be_asked_for_again(
    inner, join, monkeypatch
):
    hub, members = join()
    members[0].facts()
    request = requests(inner)[0]
    real = shm_slots._Slot.write

    def fail(self, batch):
        raise OSError("no space")

    monkeypatch.setattr(shm_slots._Slot, "write", fail)
    with pytest.raises(ConnectionError, match="no space"):
        members[0].fetch(request).result(timeout=20)
    assert hub._shelf.bytes_used() == hub.folder.bytes_held == 0
    monkeypatch.setattr(shm_slots._Slot, "write", real)
    assert members[0].fetch(request).result(timeout=20).rows.num_rows


def test_a_surprise_in_the_reading_thread_ends_what_waits(inner, join, monkeypatch):
    def fail(*_):
        raise RuntimeError("a surprise")

    _, members = join()
    members[0].facts()
    monkeypatch.setattr(node_fetcher, "read_file_body", fail)
    with pytest.raises(RuntimeError, match="a surprise"):
        members[0].fetch(requests(inner)[0]).result(timeout=20)
    inner.is_silent = True
    # The hub tells of its status while somebody waits.
    monkeypatch.setattr(node_fetcher, "read_status", fail)
    monkeypatch.setattr(node_fetcher, "sweep", fail_to_sweep)
    with pytest.raises(ConnectionError, match=r"is gone \(a surprise\)"):
        members[0].fetch(requests(inner)[1]).result(timeout=20)


def fail_to_sweep():
    raise PermissionError("not yours")


def test_one_that_stops_holds_the_others_up_once(inner, join):
    _, members = join(budget=0, patience=0.5)
    for member in members:
        member.facts()
    blocks = requests(inner)
    members[0].fetch(blocks[0]).result(timeout=20)
    began = time.monotonic()
    for request in blocks[1:4]:
        gc.collect()
        members[0].fetch(request).result(timeout=20)
    assert 0.4 < time.monotonic() - began < 10
    assert members[1].fetch(blocks[2]).result(timeout=20).rows.num_rows


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("not served"), ValueError),
        (CorruptDataError("a flipped byte"), CorruptDataError),
        (ConnectionError("nobody there"), ConnectionError),
        (RuntimeError("a surprise"), ConnectionError),
    ],
)
def test_what_a_fetch_fails_with_is_what_members_see_and_they_may_ask_again(inner, join, error, kind):
    _, members = join()
    request = requests(inner)[0]
    members[0].facts()
    inner.error = error
    with pytest.raises(kind, match=str(error)) as caught:
        members[0].fetch(request).result(timeout=20)
    assert type(caught.value) is kind
    inner.error = None
    assert members[0].fetch(request).result(timeout=20).rows.num_rows


def test_a_wait_says_who_fetches_who_is_asked_and_who_holds_what(inner, join):
    _, members = join()
    first, second = requests(inner)[:2]
    members[0].facts()
    kept = members[0].fetch(first).result(timeout=20)
    inner.is_silent = True
    patience = Patience(warn_seconds=60, fail_seconds=3)
    source = FeedSource(members[1], place=PLACE, window_bytes=0, patience=patience)
    source._window.move_to(second.num_micro_batches, end=1000)
    with pytest.raises(TimeoutError) as caught:
        source.wait_for(second.first_step, second.first_micro_batch, stop=NEVER)
    text = str(caught.value)
    assert f"step {second.first_step}" in text
    assert "asked rank 10 (pid 99), which fetches for this node group, which asks builder 7" in text
    assert "node group's files (budget 5,000 B)" in text
    assert "rank 10 of the node" in text
    assert "builder 7 123 B" in text
    assert kept.rows.num_rows


def test_a_hub_that_is_gone_is_named_and_its_blocks_stay_readable(inner, join):
    hub, members = join()
    first, second = requests(inner)[:2]
    members[1].facts()
    kept = members[1].fetch(first).result(timeout=20)
    inner.is_silent = True
    waiting = members[1].fetch(second)
    hub.abort()
    with pytest.raises(
        ConnectionError, match=r"rank 10 \(pid 99\), which fetches for this node group, is gone"
    ):
        waiting.result(timeout=20)
    with pytest.raises(ConnectionError, match="is gone"):
        members[1].fetch(second)
    assert read_block(kept, first, inner.facts()).nbytes


def test_ranks_are_compared_through_the_leader_where_its_source_does(inner, join):
    _, members = join()
    own = DigestReport.of(PLACE, step=3, digest=1)
    with pytest.raises(ValueError, match="does not compare ranks"):
        members[1].compare(own)
    said = {3: own}
    inner.compare = lambda report: said[report.step] if said[report.step] != report else None
    assert members[1].compare(own) is None
    assert members[1].compare(DigestReport.of(PLACE, step=3, digest=2)) == own


def test_who_closes_while_it_asks_is_told(inner, join):
    _, members = join()
    asked, answer = threading.Event(), threading.Event()

    def compare(_):
        asked.set()
        answer.wait(20)

    def close():
        assert asked.wait(20)
        members[1].close()

    inner.compare = compare
    threading.Thread(target=close).start()
    with pytest.raises(ConnectionError, match="closed"):
        members[1].compare(DigestReport.of(PLACE, step=3, digest=1))
    answer.set()


def test_what_one_that_vanished_may_still_map_is_never_written_again(inner, join):
    _, members = join()
    for member in members:
        member.facts()
    blocks = requests(inner)
    kept = members[1].fetch(blocks[0]).result(timeout=20)
    before = kept.rows.column("input_ids").values.to_numpy().copy()
    # As if it were killed, but for the block in its hands.
    members[1].close()
    for request in blocks:
        members[0].fetch(request).result(timeout=20)
    assert kept.rows.column("input_ids").values.to_numpy().tolist() == before.tolist()
    assert read_block(kept, blocks[0], inner.facts()).nbytes


def test_a_cancelled_request_is_not_served_and_leaves_nothing(inner, join, eventually):
    hub, members = join()
    for member in members:
        member.facts()
    inner.is_silent = True
    future = members[0].fetch(requests(inner)[0])
    eventually(lambda: inner.asked)
    future.cancel()
    members[1].close()
    eventually(lambda: not hub._fetching)
    assert hub._shelf.bytes_used() == 0


def test_nobody_joins_without_the_proof(inner, join):
    hub, _ = join(1)
    address = HubAddress(folder=hub.folder.name, proof="0" * 64, leader=10, pid=99)
    stranger = NodeFetcher(address, member=0, socket_name=SOCKET)
    with pytest.raises(ConnectionError, match="is gone"):
        stranger.facts()
