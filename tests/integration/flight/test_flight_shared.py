"""Ranks on the feeder's machine map its blocks: the same bytes, and nothing stays behind."""

import os
from itertools import islice

import numpy as np
import pytest

from ringfeed.pipeline.block_fetcher import FeedQuestion
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS, BlockRequest
from ringfeed.pipeline.flight_client import open_fetcher
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.shm_files import SHARED_MEMORY, BlockFolder, read_proof, sweep
from ringfeed.pipeline.shm_slots import SlotMaps
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.flight_options import ServerOptions

PLACE = RankPlace(dp_rank=0, dp_size=2, cp_rank=0, cp_size=2)
QUESTION = FeedQuestion(place=PLACE, columns=BLOCK_COLUMNS)
REQUEST = BlockRequest(place=PLACE, first_step=0, first_micro_batch=0, num_micro_batches=1)
LAYOUTS = ["te", "head_tail", "contiguous", "whole_document", "magi", "ptrr", "identity"]


@pytest.fixture
def opened(monkeypatch):
    """Names of the files that ranks mapped."""
    names = []
    real = SlotMaps.open

    def noted(maps, note, **options):
        names.append(note.name)
        return real(maps, note, **options)

    monkeypatch.setattr(SlotMaps, "open", noted)
    return names


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_and_stream_give_the_bytes_of_the_plan(serve, plan, load, assert_same_batches, opened, layout):
    made = make_layout(layout, **({"block": 16} if layout == "ptrr" else {}))
    mapped, sent = serve(layout=made), serve(ServerOptions(shared_bytes=0), layout=made)
    expected = list(load(mapped.url))
    assert opened
    opened.clear()
    with load(sent.url) as loader:
        assert_same_batches(loader, expected)
    assert not opened
    assert_same_batches(expected, load(plan, layout=made))


def test_what_does_not_fit_is_sent_and_budgets_are_given_back(
    serve, plan, load, assert_same_batches, opened, eventually
):
    server = serve(ServerOptions(shared_bytes=3000))
    with load(server.url) as loader:
        assert_same_batches(loader, load(plan, layout="te"))
    assert opened
    eventually(lambda: server._folder.bytes_held == 0)


def test_a_block_stays_whole_after_its_feeder_and_a_file_goes_with_its_block(serve, eventually):
    server = serve()
    fetcher = open_fetcher(server.url, QUESTION)
    block = fetcher.fetch(REQUEST).result(timeout=60)
    assert server._folder.bytes_held
    kept = block.rows.column("input_ids")
    tokens = kept.values.to_numpy().copy()
    del block
    fetcher.fetch(REQUEST).result(timeout=60)
    eventually(lambda: len(files(server)) == 2)
    fetcher.close()
    server.stop()
    assert not (SHARED_MEMORY / server._folder.name).exists()
    assert np.array_equal(kept.values.to_numpy(), tokens)


def test_files_are_written_again_as_a_rank_goes_on_and_go_with_it(serve, opened, eventually):
    server = serve()
    fetcher = open_fetcher(server.url, QUESTION)
    for _ in range(20):
        fetcher.fetch(REQUEST).result(timeout=60)
    assert len(opened) == 20
    assert len(set(opened)) == len(files(server)) <= 3
    fetcher.close()
    eventually(lambda: not files(server))


def test_what_a_killed_feeder_left_is_swept_and_a_living_one_is_let_be(start, load, serve):
    living = serve()
    # Also those of other programs, which live on.
    before = set(SHARED_MEMORY.glob("ringfeed-*"))
    feeders = start({"layout": ["te", {}], "cp": 2})
    with load(feeders.urls[0]) as loader:
        list(islice(loader, 2))
        left = [path for path in SHARED_MEMORY.glob("ringfeed-*") if path not in before]
        feeders.kill()
    assert any(path.exists() for path in left)
    serve()
    assert not any(path.exists() for path in left)
    assert (SHARED_MEMORY / living._folder.name).exists()
    with load(living.url) as loader:
        assert next(iter(loader))


def test_only_dead_folders_of_this_kind_are_swept(tmp_path):
    living, dead = BlockFolder(budget=100, root=tmp_path), BlockFolder(budget=100, root=tmp_path)
    os.close(dead._owner)
    (tmp_path / "another-program").mkdir()
    (tmp_path / "ringfeed-notes").mkdir()

    assert sweep(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [living.name, "another-program", "ringfeed-notes"]
    )
    living.close()


def test_a_rank_that_cannot_read_the_folder_has_no_proof(tmp_path):
    folder = BlockFolder(budget=100, root=tmp_path)
    assert read_proof(folder.name, root=tmp_path) == folder.proof
    assert read_proof("../etc", root=tmp_path) is None
    (tmp_path / folder.name / "proof").unlink()
    (tmp_path / folder.name / "proof").symlink_to("/etc/hostname")
    assert read_proof(folder.name, root=tmp_path) is None
    folder.close()


def files(server):
    return list((SHARED_MEMORY / server._folder.name).glob("block-*"))
