"""Folders appear whole or not at all, and have one writer at a time."""

import json
import multiprocessing
import signal
from pathlib import Path

import pytest

from ringfeed.pipeline.manifest import Manifest, file_entry, fingerprint, read_manifest
from ringfeed.pipeline.staging import StagedFolder, write_atomically

REQUEST = {"seed": 1, "source": {"name": "web"}}
PLAN = "ringfeed-plan"


def open_staged(output, request=REQUEST):
    return StagedFolder.open(output, format=PLAN, made_from=request)


def write_one(staged):
    with write_atomically(staged.path / "rows.bin") as temporary:
        temporary.write_bytes(b"rows")


def publish(staged, request=REQUEST):
    staged.publish(
        Manifest(
            format=PLAN,
            fingerprint=fingerprint(request),
            made_from=request,
            files=(file_entry(staged.path, "rows.bin", 1),),
            facts={},
        )
    )


def test_the_output_appears_with_publish_and_holds_nothing_else(tmp_path):
    output = tmp_path / "deep" / "plan"
    with open_staged(output) as staged:
        write_one(staged)
        (staged.scratch / "journal").write_text("mine")
        assert not output.exists()
        publish(staged)

    assert sorted(path.name for path in output.iterdir()) == ["manifest.json", "rows.bin"]
    assert [path.name for path in output.parent.iterdir()] == ["plan"]


def test_a_finished_output_is_found_finished(tmp_path):
    with open_staged(tmp_path / "plan") as staged:
        write_one(staged)
        publish(staged)
    before = (tmp_path / "plan" / "manifest.json").stat().st_mtime_ns

    with open_staged(tmp_path / "plan") as staged:
        assert staged.finished == read_manifest(tmp_path / "plan", format=PLAN)
    assert (tmp_path / "plan" / "manifest.json").stat().st_mtime_ns == before


def test_another_request_is_refused_with_the_difference(tmp_path):
    with open_staged(tmp_path / "plan") as staged:
        write_one(staged)
    other = {"seed": 2, "source": {"name": "web"}}
    with pytest.raises(ValueError, match=r"plan\.partial was left .*\(seed: has 1, asked for 2\); delete it"):
        open_staged(tmp_path / "plan", other)
    with open_staged(tmp_path / "plan") as staged:
        publish(staged)
    with pytest.raises(ValueError, match=r"plan exists and .*\(seed: has 1, asked for 2\); delete it or"):
        open_staged(tmp_path / "plan", other)


def test_the_request_is_compared_and_not_what_the_data_was_made_from(tmp_path):
    with open_staged(tmp_path / "plan") as staged:
        write_one(staged)
        publish(staged, request={"content": "abc"})

    with open_staged(tmp_path / "plan") as staged:
        assert staged.finished is not None
        assert staged.finished.fingerprint == fingerprint({"content": "abc"})


def test_a_stopped_run_is_resumed_with_its_files(tmp_path):
    with open_staged(tmp_path / "plan") as staged:
        write_one(staged)
        (staged.scratch / "journal").write_text("mine")

    with open_staged(tmp_path / "plan") as staged:
        assert staged.resumed
        assert (staged.path / "rows.bin").read_bytes() == b"rows"
        assert (staged.scratch / "journal").read_text() == "mine"


def test_a_run_that_made_nothing_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="bad input"), open_staged(tmp_path / "plan"):
        raise ValueError("bad input")
    assert list(tmp_path.iterdir()) == []


def test_discard_makes_way_for_another_request(tmp_path):
    with open_staged(tmp_path / "plan") as staged:
        write_one(staged)
        staged.discard()
    with open_staged(tmp_path / "plan", {"seed": 2}) as staged:
        assert not staged.resumed


def test_half_written_files_are_swept(tmp_path):
    with open_staged(tmp_path / "plan") as staged:
        write_one(staged)
        (staged.path / "steps").mkdir()
        (staged.path / "steps" / ".a.bin.tmp").write_text("half")
    with open_staged(tmp_path / "plan") as staged:
        assert sorted(path.name for path in (staged.path / "steps").iterdir()) == []


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"plan exists and is not ringfeed's; choose another"):
        open_staged(tmp_path / "plan")
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"new\.partial exists and is not ringfeed's; move it away"):
        open_staged(tmp_path / "new")
    assert (tmp_path / "new.partial" / "thesis.txt").exists()


def test_an_empty_folder_may_be_the_output(tmp_path):
    (tmp_path / "plan").mkdir()
    with open_staged(tmp_path / "plan") as staged:
        write_one(staged)
        publish(staged)
    assert read_manifest(tmp_path / "plan", format=PLAN).files[0].path == "rows.bin"


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path):
    with open_staged(tmp_path / "plan") as staged:
        with pytest.raises(ValueError, match="another process is writing"):
            open_staged(tmp_path / "plan")
        write_one(staged)
        publish(staged)
    with open_staged(tmp_path / "plan") as staged:
        assert staged.finished


def hold(output, ready):
    with open_staged(output) as staged:
        write_one(staged)
        ready.set()
        signal.pause()


def test_kill_minus_nine_gives_the_lock_back(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "plan", ready))
    process.start()
    assert ready.wait(60)
    with pytest.raises(ValueError, match="another process is writing"):
        open_staged(tmp_path / "plan")
    process.kill()
    process.join()

    with open_staged(tmp_path / "plan") as staged:
        assert staged.resumed


def test_killed_between_manifest_and_rename_only_the_name_is_missing(tmp_path):
    with open_staged(tmp_path / "plan") as staged:
        write_one(staged)
        publish(staged)
    # As the kill would leave it: the manifest is there, the final name is not.
    partial = tmp_path / "plan.partial"
    (tmp_path / "plan").rename(partial)
    (partial / ".staging").mkdir()
    request = {"format": PLAN, "format_version": 1, **REQUEST}
    (partial / ".staging" / "made_from.json").write_text(json.dumps(request))

    with open_staged(tmp_path / "plan") as staged:
        assert staged.finished
    assert sorted(path.name for path in (tmp_path / "plan").iterdir()) == ["manifest.json", "rows.bin"]


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "rows.bin"
    path.write_text("old")

    def write_half():
        with write_atomically(path) as temporary:
            temporary.write_text("half of the n")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.bin"]


def finished(output, request=REQUEST):
    with open_staged(output, request) as staged:
        write_one(staged)
        publish(staged, request)
    return read_manifest(output, format=PLAN)


def replacing(output, old):
    return StagedFolder.open(output, format=PLAN, made_from={"seed": 2}, replaces=old.fingerprint)


def test_a_folder_that_is_replaced_stays_until_the_new_one_is_whole(tmp_path):
    old = finished(tmp_path / "plan")
    with replacing(tmp_path / "plan", old) as staged:
        write_one(staged)
        assert read_manifest(tmp_path / "plan", format=PLAN) == old
        publish(staged, {"seed": 2})

    assert read_manifest(tmp_path / "plan", format=PLAN).made_from == {"seed": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]
    assert sorted(path.name for path in (tmp_path / "plan").iterdir()) == ["manifest.json", "rows.bin"]


def test_only_the_folder_that_was_meant_is_replaced(tmp_path):
    old = finished(tmp_path / "plan")
    finished(tmp_path / "other", {"seed": 3})
    with pytest.raises(ValueError, match="was made from something else"):
        replacing(tmp_path / "other", old)


def test_killed_between_the_two_renames_the_new_folder_gets_its_name(tmp_path, monkeypatch):
    old = finished(tmp_path / "plan")
    calls = []
    replace = Path.replace

    def dying(self, target):
        if target == tmp_path / "plan":
            raise KeyboardInterrupt
        calls.append(target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", dying)
    with replacing(tmp_path / "plan", old) as staged:
        write_one(staged)
        with pytest.raises(KeyboardInterrupt):
            publish(staged, {"seed": 2})
    monkeypatch.undo()
    assert not (tmp_path / "plan").exists()
    StagedFolder.recover(tmp_path / "plan", format=PLAN)

    assert read_manifest(tmp_path / "plan", format=PLAN).made_from == {"seed": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


def test_there_is_nothing_to_recover_from_half_a_folder(tmp_path):
    with open_staged(tmp_path / "plan") as staged:
        write_one(staged)
    StagedFolder.recover(tmp_path / "plan", format=PLAN)

    assert not (tmp_path / "plan").exists()
