"""Writing shards: pure, resumable, and told by their manifest."""

from dataclasses import replace

import pyarrow as pa
import pytest

from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.shard_files import FolderFacts
from ringfeed.pipeline.shard_writer import (
    ShardTask,
    ShardWriter,
    num_folders,
    shards_made_from,
    write_steps,
)
from ringfeed.pipeline.skip import skip_list
from ringfeed.sharding.layouts import make_layout


@pytest.fixture
def task(plan, tmp_path):
    spec = open_spec(plan, OpenOptions(layout=make_layout("te"), cp_size=2), pad_id=9)
    return ShardTask(plan=plan.path, folder=tmp_path / "work", spec=spec, steps_per_folder=2)


def test_a_finished_folder_is_not_written_again(task):
    first = write_steps(task, 0)
    times = {entry.path: (task.folder / entry.path).stat().st_mtime_ns for entry in first}

    assert write_steps(task, 0) == first
    assert times == {entry.path: (task.folder / entry.path).stat().st_mtime_ns for entry in first}


def test_a_folder_without_its_last_file_is_written_again_with_the_same_bytes(task):
    first = write_steps(task, 0)
    (task.folder / "steps-00000" / "packs.arrow").unlink()
    (task.folder / "steps-00000" / "cp-01.arrow").write_bytes(b"half")

    assert write_steps(task, 0) == first


def place_of(name, whole):
    """Return where a number lies that the file says."""
    if name == "packs.arrow":
        return whole.index(FolderFacts.read(whole).costs.tobytes())
    if name == "cp-00.index.arrow":
        return whole.index(pa.ipc.open_file(whole).get_batch(0).column("xxh3_64").to_numpy().tobytes())
    return len(whole) // 2


@pytest.mark.parametrize("name", ["cp-01.arrow", "cp-00.index.arrow", "packs.arrow"])
def test_a_folder_that_was_damaged_while_nobody_wrote_is_written_again(task, name):
    first = write_steps(task, 0)
    path = task.folder / "steps-00000" / name
    whole = path.read_bytes()
    place = place_of(name, whole)
    for damaged in (whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], whole[:-1], b""):
        path.write_bytes(damaged)
        assert write_steps(task, 0) == first
        assert path.read_bytes() == whole


@pytest.mark.parametrize("failing", ["write", "finish"])
def test_a_full_disk_leaves_no_folder_that_looks_finished(task, monkeypatch, failing):
    calls = []

    def no_space(*_):
        calls.append(1)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"ringfeed.pipeline.shard_files.ViewFileWriter.{failing}", no_space)
        with pytest.raises(OSError, match="No space left"):
            write_steps(task, 0)
    assert calls
    assert not list(task.folder.glob("steps-00000/*"))
    assert len(write_steps(task, 0)) == 5


def test_folders_cover_the_steps_once_and_the_last_may_be_short(plan, task):
    steps = []
    with ShardWriter(task) as writer:
        for index in range(num_folders(plan, steps_per_folder=2)):
            writer.write_steps(index)
            path = task.folder / f"steps-{index:05d}" / "packs.arrow"
            steps += pa.ipc.open_file(path).read_all()["step"].to_pylist()

    assert steps == [step for step in range(plan.num_steps) for _ in range(plan.step(step).num_rows)]


def test_any_arrow_reader_opens_a_view_file(plan, task):
    write_steps(task, 0)
    table = pa.ipc.open_file(task.folder / "steps-00000" / "cp-01.arrow").read_all()

    assert table["pack"].to_pylist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert {len(ids) for ids in table["input_ids"].to_pylist()} == {32}
    assert table["documents"].to_pylist()[:4] == plan.step(0)["documents"].to_pylist()


def test_all_that_shapes_the_shards_is_in_their_key(plan, make_plan, task):
    base = shards_made_from(plan, task)
    other_layout = open_spec(plan, OpenOptions(layout=make_layout("contiguous"), cp_size=2), pad_id=9)
    changed = [
        shards_made_from(plan, replace(task, spec=other_layout)),
        shards_made_from(plan, replace(task, spec=replace(task.spec, cp_size=1))),
        shards_made_from(plan, replace(task, spec=replace(task.spec, pack_slots=128))),
        shards_made_from(plan, replace(task, overlay=skip_list([1]))),
        shards_made_from(plan, replace(task, steps_per_folder=3)),
        shards_made_from(make_plan(seed=1), task),
    ]

    assert all(one != base for one in changed)
    assert shards_made_from(plan, replace(task, folder=task.folder / "elsewhere")) == base
