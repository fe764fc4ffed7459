"""What the demo reads, and what it tells its processes."""

import sysconfig

import pytest

from ringfeed.workers import demo
from ringfeed.workers.demo_job import TrainJob, TrainResult, read_record


def test_sources_are_those_of_the_standard_library_only(tmp_path, monkeypatch):
    for name in ("site-packages/other.py", "dist-packages/other.py", "json/__init__.py", "os.py", "lib/a.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "LICENSE.txt").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))

    assert demo.standard_library_sources() == (tmp_path / "json", tmp_path / "os.py")


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ValueError, match=r"has no \*\.py files"):
        demo.standard_library_sources()


def test_a_job_survives_json(tmp_path):
    for job in demo.train_jobs(tmp_path, steps=20):
        assert TrainJob.from_json(job.to_json()) == job


def test_the_runs_have_four_ranks_and_one(tmp_path):
    assert [job.num_ranks for job in demo.train_jobs(tmp_path, steps=20)] == [4, 1]


def test_a_record_is_losses_and_a_result(tmp_path):
    (tmp_path / "record").write_text(
        '{"step": 0, "loss": 5.5}\n{"step": 1, "loss": 5.25}\n'
        '{"tokens": 7, "bytes": 8, "train_seconds": 1.5, "load_tokens": 6, "load_seconds": 0.5}\n'
    )
    record = read_record(tmp_path / "record")

    assert record.losses == (5.5, 5.25)
    assert record.result == TrainResult(tokens=7, bytes=8, train_seconds=1.5, load_tokens=6, load_seconds=0.5)
