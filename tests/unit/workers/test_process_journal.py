"""What a killed process leaves is ended by the next one, and nothing else: with real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ringfeed.workers import process_journal as module
from ringfeed.workers.process_journal import (
    ProcessJournal,
    processes_below,
    seconds_to_next_note,
    sweep,
)

OURS = re.compile("ours")
SLEEP = "import time; time.sleep(600); 'ours'"
OTHER = "import time; time.sleep(600)"
DRIVER = """

import re, subprocess, sys, time
from pathlib import Path
from ringfeed.workers.process_journal import ProcessJournal

journal = ProcessJournal(re.compile("ours"), root=Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", {sleep!r}], stdout=subprocess.DEVNULL, start_new_session=True)
journal.note()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", SLEEP])
    yield process
    process.kill()
    process.wait()


def began(number):
    return dict(processes_below(os.getpid(), OURS))[number]


def start_driver(root):
    # From a file: its own command line is none of a service's.
    root.parent.joinpath("driver.py").write_text(DRIVER.format(sleep=SLEEP))
    command = [sys.executable, str(root.parent / "driver.py"), str(root)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    return driver, int(driver.stdout.readline())


def lives(number):
    """Whether a process that is nobody's child here is there and no zombie."""
    fields = module._stat(number)
    return fields is not None and fields[0] != "Z"


def test_the_children_of_a_killed_process_are_ended_by_the_next_one_and_those_of_a_living_one_stay(tmp_path):
    root = tmp_path / "journals"
    living, its_child = start_driver(root)
    killed, orphan = start_driver(root)
    try:
        assert sweep(root) == 0
        killed.kill()
        killed.communicate()
        assert lives(orphan)
        with ProcessJournal(OURS, root=root):
            assert not lives(orphan)
            assert lives(its_child)
            assert len(list(root.iterdir())) == 2
        assert lives(its_child)
    finally:
        living.kill()
        living.communicate()
        assert sweep(root) == 1
    assert not lives(its_child)
    assert list(root.iterdir()) == []


def test_what_is_left_at_the_end_is_ended_children_of_children_too_and_no_other_child(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", OTHER])
    script = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True)"
    )
    with ProcessJournal(OURS, root=tmp_path) as journal:
        child = subprocess.Popen(
            [sys.executable, "-c", script + "\n" + SLEEP], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        journal.note()
        assert {child.pid, grandchild} <= {number for number, _ in processes_below(os.getpid(), OURS)}
    assert child.wait(timeout=5) == -signal.SIGKILL
    child.stdout.close()
    assert not lives(grandchild)
    assert other.poll() is None
    other.kill()
    other.wait()
    assert list(tmp_path.iterdir()) == []
    journal.close()


def test_new_processes_are_noted_by_themselves(tmp_path):
    with ProcessJournal(OURS, root=tmp_path) as journal:
        journal.follow(seconds_to_next=lambda _: 0.02)
        process = subprocess.Popen([sys.executable, "-c", SLEEP])
        [path] = tmp_path.iterdir()
        until = time.monotonic() + 10
        while str(process.pid) not in path.read_text():
            assert time.monotonic() < until
            time.sleep(0.02)
    assert process.wait(timeout=5) == -signal.SIGKILL


def test_a_journal_that_cannot_be_written_is_told_and_tried_again(tmp_path, sleeper, caplog):
    with ProcessJournal(OURS, root=tmp_path) as journal, Path("/dev/full").open("wb") as full:
        [path] = tmp_path.iterdir()
        own, journal._file = journal._file, full.fileno()
        journal.follow(seconds_to_next=lambda _: 0.02)
        until = time.monotonic() + 30
        while "No space left" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.02)
        journal._file = own
        while str(sleeper.pid) not in path.read_text():
            assert time.monotonic() < until
            time.sleep(0.02)


def test_processes_that_are_gone_are_forgotten_and_the_file_is_whole(tmp_path, sleeper):
    with ProcessJournal(OURS, root=tmp_path) as journal:
        [path] = tmp_path.iterdir()
        other = subprocess.Popen([sys.executable, "-c", SLEEP])
        journal.note()
        assert {number for number, _ in json.loads(path.read_text())["processes"]} == {sleeper.pid, other.pid}
        other.kill()
        other.wait()
        journal.note()
        assert [number for number, _ in json.loads(path.read_text())["processes"]] == [sleeper.pid]


def test_children_of_other_threads_are_found():
    started: list[subprocess.Popen[bytes]] = []
    is_over = threading.Event()

    def start():
        started.append(subprocess.Popen([sys.executable, "-c", SLEEP]))
        is_over.wait(60)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        until = time.monotonic() + 30
        while not started:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert started[0].pid in dict(processes_below(os.getpid(), OURS))
    finally:
        is_over.set()
        thread.join()
        started[0].kill()
        started[0].wait()


def test_a_journal_looks_often_while_ray_starts_and_seldom_after_it():
    assert [seconds_to_next_note(age) for age in (0.0, 59.0, 60.0, 1e6)] == [0.5, 0.5, 10.0, 10.0]


@pytest.mark.parametrize("wrong", ["began", "mark", "torn", "foreign"])
def test_a_process_that_is_not_the_one_that_was_noted_is_never_touched(tmp_path, sleeper, wrong):
    noted = {"mark": module._mark(), "processes": [[sleeper.pid, began(sleeper.pid)]]}
    if wrong == "began":
        noted["processes"] = [[sleeper.pid, began(sleeper.pid) + 1]]
    if wrong == "mark":
        noted["mark"] = "another boot"
    text = json.dumps(noted)[: -5 if wrong == "torn" else None]
    name = "service-1-notours.json" if wrong == "foreign" else f"service-1-{'0' * 16}.json"
    (tmp_path / name).write_text(text)
    assert sweep(tmp_path) == 0
    assert sleeper.poll() is None
    assert (tmp_path / name).exists() is (wrong == "foreign")


def test_a_process_that_was_noted_is_ended(tmp_path, sleeper):
    path = tmp_path / f"service-1-{'0' * 16}.json"
    path.write_text(json.dumps({"mark": module._mark(), "processes": [[sleeper.pid, began(sleeper.pid)]]}))
    assert sweep(tmp_path) == 1
    assert sleeper.wait(timeout=5) == -signal.SIGKILL


def test_a_file_without_a_lock_yet_is_left_alone(tmp_path):
    path = tmp_path / f"service-1-{'0' * 16}.json"
    path.touch()
    assert sweep(tmp_path) == 0
    assert path.exists()
    os.utime(path, (0, 0))
    sweep(tmp_path)
    assert not path.exists()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="not a folder of this user alone"):
        ProcessJournal(OURS, root=tmp_path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(OSError, match="not a folder of this user alone"):
        ProcessJournal(OURS, root=link)
