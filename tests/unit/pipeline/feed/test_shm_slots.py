"""Files under /dev/shm are written again: never under a reader, and an old note gives no new bytes."""

import gc
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.shm_files import BlockFolder
from ringfeed.pipeline.shm_slots import SlotMaps, SlotNote, SlotPool
from ringfeed.pipeline.step_block import EncodedBlock

WRITE = """
import ctypes, sys
from pathlib import Path
from ringfeed.pipeline.shm_slots import SlotMaps, SlotNote
note = SlotNote(name=sys.argv[2], generation=1, size=int(sys.argv[3]))
block = SlotMaps(sys.argv[1], root=Path(sys.argv[4])).open(note, on_release=lambda: None)
address = block.rows.column("x").buffers()[1].address
print(ctypes.c_int32.from_address(address).value, flush=True)
ctypes.c_int32.from_address(address).value = 777
print("written", flush=True)
"""


def block_of(value, count=100):
    rows = pa.RecordBatch.from_arrays([pa.array(np.full(count, value, dtype=np.int32))], names=["x"])
    return EncodedBlock(header=b"header %d" % value, rows=rows)


def values(block):
    return set(block.rows.column("x").to_numpy().tolist())


@pytest.fixture
def folder(tmp_path):
    folder = BlockFolder(budget=4000, root=tmp_path)
    yield folder
    folder.close()


@pytest.fixture
def pool(folder):
    pool = SlotPool(folder)
    yield pool
    pool.close()


@pytest.fixture
def maps(folder, tmp_path):
    return SlotMaps(folder.name, root=tmp_path)


def nothing():
    """Take no notice."""


def test_a_file_is_written_again_once_it_is_free_and_never_before(pool, maps):
    first, second = pool.write(block_of(1)), pool.write(block_of(2))
    kept = maps.open(first, on_release=nothing)
    assert first.name != second.name
    pool.free(second.name)
    third = pool.write(block_of(3))
    assert (third.name, third.generation) == (second.name, 2)
    assert values(maps.open(third, on_release=nothing)) == {3}
    assert values(kept) == {1}
    assert (kept.header, kept.rows.schema.names) == (b"header 1", ["x"])


def test_an_old_note_gives_no_new_bytes(pool, maps):
    old = pool.write(block_of(1))
    pool.free(old.name)
    pool.write(block_of(2))
    with pytest.raises(CorruptDataError, match=r"holds generation 2 of \d+ bytes, expected 1"):
        maps.open(old, on_release=nothing)


def test_a_mapping_is_kept_and_let_go_of_once_nothing_refers_to_the_block(pool, maps):
    released: list[int] = []
    for generation in range(1, 4):
        note = pool.write(block_of(generation))
        block = maps.open(note, on_release=partial(released.append, generation))
        part = block.rows.column("x").to_numpy()[3:5]
        del block
        gc.collect()
        assert len(released) == generation - 1
        assert part.tolist() == [generation] * 2
        del part
        assert len(released) == generation
        pool.free(note.name)
    assert len(maps._maps) == 1


def test_the_budget_holds_and_what_is_unused_makes_room(folder, pool, maps):
    notes = [pool.write(block_of(i)) for i in range(8)]
    fitting = [note for note in notes if note is not None]
    assert 2 < len(fitting) < 8
    assert folder.bytes_held <= 4000
    maps.open(fitting[0], on_release=nothing)
    for note in fitting[:3]:
        pool.free(note.name)
    # Larger than each of the free files: the oldest goes.
    larger = pool.write(block_of(9, count=200))
    assert values(maps.open(larger, on_release=nothing)) == {9}
    assert folder.bytes_held <= 4000
    assert not folder.path_of(fitting[0].name).exists()
    # What went is not kept mapped either.
    assert set(maps._maps) == {larger.name}
    assert pool.write(block_of(1, count=10_000)) is None


def test_another_rank_gives_up_what_it_does_not_use(folder, pool):
    other = SlotPool(folder)
    while (note := other.write(block_of(1))) is not None:
        last = note
    assert pool.write(block_of(2)) is None
    other.free(last.name)
    assert pool.write(block_of(2)) is not None
    other.close()
    assert len(folder.givers) == 1


def test_what_a_rank_still_maps_is_removed_with_the_pool_and_stays_whole(folder, pool, maps):
    kept = maps.open(pool.write(block_of(5)), on_release=nothing)
    pool.close()
    assert folder.bytes_held == 0
    assert SlotPool(folder).write(block_of(6)) is not None
    assert values(kept) == {5}


def test_a_full_disk_is_no_room(folder, pool, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert pool.write(block_of(1)) is None
    assert folder.bytes_held == 0


@pytest.mark.parametrize("change", [{"name": "../proof"}, {"name": "block-9.arrow"}, {"size": 1 << 20}])
def test_what_is_no_block_is_damaged_data(pool, maps, change):
    note = pool.write(block_of(1))
    with pytest.raises(CorruptDataError, match=r"no block|no name|is said to be there"):
        maps.open(replace(note, **change), on_release=nothing)


def test_a_block_that_is_not_whole_yet_is_damaged_data(folder, maps):
    folder.path_of("block-0.arrow").write_bytes(b"RFBLOCK1 and no more" + bytes(200))
    with pytest.raises(CorruptDataError, match="holds generation"):
        maps.open(SlotNote(name="block-0.arrow", generation=1, size=100), on_release=nothing)


def test_a_write_to_a_mapped_block_ends_the_process_and_changes_nothing(folder, pool, maps, tmp_path):
    note = pool.write(block_of(7))
    command = [sys.executable, "-c", WRITE, folder.name, note.name, str(note.size), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "7\n"
    assert ended.returncode == -11, ended.stderr
    assert values(maps.open(note, on_release=nothing)) == {7}


def test_what_one_may_still_map_is_dropped_and_not_written_again(folder, pool, maps):
    dropped = pool.write(block_of(1))
    kept = maps.open(dropped, on_release=nothing)
    pool.drop(dropped.name)
    pool.free(dropped.name)
    assert folder.bytes_held == 0
    assert pool.write(block_of(2)).name != dropped.name
    assert values(kept) == {1}
