"""What counts as finished in a shard job."""

import shutil

import pytest

from ringfeed.pipeline.manifest import CorruptDataError, file_entry
from ringfeed.workers.shard_journal import FinishedFolder, ShardJournal


@pytest.fixture
def output(tmp_path):
    (tmp_path / "out.partial" / ".staging").mkdir(parents=True)
    return tmp_path / "out.partial"


def open_journal(output):
    return ShardJournal(output, output / ".staging")


def write_attempt(output, index, text="views"):
    attempt = ShardJournal.new_attempt(output / ".staging")
    name = f"steps-{index:05d}/cp-00.arrow"
    (attempt / name).parent.mkdir()
    (attempt / name).write_text(text)
    return FinishedFolder(index=index, attempt=attempt.name, entries=(file_entry(attempt, name, 3),))


def test_an_adopted_folder_is_in_place_and_known_to_the_next_run(output):
    journal = open_journal(output)
    written = write_attempt(output, 2)
    journal.adopt(written)
    assert journal.finished == {2: written.entries}
    assert (output / "steps-00002" / "cp-00.arrow").read_text() == "views"
    assert open_journal(output).finished == {2: written.entries}
    assert list((output / ".staging" / "attempts").iterdir()) == []


def test_the_last_of_two_attempts_at_one_folder_counts(output):
    journal = open_journal(output)
    journal.adopt(write_attempt(output, 2, "first"))
    journal.adopt(write_attempt(output, 2, "again"))
    assert (output / "steps-00002" / "cp-00.arrow").read_text() == "again"


def test_attempts_of_a_killed_run_are_cleared_away(output):
    open_journal(output)
    write_attempt(output, 0)
    assert open_journal(output).finished == {}
    assert list((output / ".staging" / "attempts").iterdir()) == []


def test_a_noted_folder_that_is_gone_or_cut_is_written_again(output):
    journal = open_journal(output)
    for index in range(3):
        journal.adopt(write_attempt(output, index))
    shutil.rmtree(output / "steps-00000")
    (output / "steps-00001" / "cp-00.arrow").write_text("view")
    assert set(open_journal(output).finished) == {2}


def test_a_folder_that_the_driver_cannot_see_is_refused(output):
    journal = open_journal(output)
    written = write_attempt(output, 0)
    shutil.rmtree(output / ".staging" / "attempts" / written.attempt)
    with pytest.raises(CorruptDataError, match="is missing"):
        journal.adopt(written)


def test_a_late_worker_finds_no_place_after_the_job_is_over(output):
    with pytest.raises(FileNotFoundError):
        ShardJournal.new_attempt(output / ".staging")
