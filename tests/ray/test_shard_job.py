"""The offline job on a real local Ray: same bytes for any workers, deaths and restarts."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ringfeed.pipeline.config import ShardConfig
from ringfeed.pipeline.ingest import run_ingest
from ringfeed.pipeline.ingest_options import IngestOptions
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.pipeline.shard_writer import num_folders, write_steps
from ringfeed.pipeline.store import FileStore
from ringfeed.pipeline.verify import verify
from ringfeed.workers import shard_job
from ringfeed.workers.ray_session import ray_session
from ringfeed.workers.shard_job import run_shard

pytestmark = pytest.mark.ray

# A few steps a folder, so that little text makes many folders.
SMALL_FOLDERS = (1 << 15, 4 << 30)


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("sharded")
    (root / "text").mkdir()
    for i in range(60):
        (root / "text" / f"{i:03d}.txt").write_text(f"document {i} " * (i * i % 97))
    run_ingest(IngestOptions(sources=(root / "text",), output=root / "corpus"), progress=SilentProgress())
    run_plan(
        PlanOptions(
            corpora=(root / "corpus",),
            output=root / "plan",
            pack_tokens=512,
            packs_per_step=4,
            max_cp=2,
            seed=3,
        )
    )
    return root / "plan"


@pytest.fixture(scope="module")
def local_ray():
    with ray_session(num_cpus=2) as session:
        yield session


@pytest.fixture(autouse=True)
def small_folders(monkeypatch):
    monkeypatch.setattr(shard_job, "_FOLDER_BYTES", SMALL_FOLDERS)


def config(plan_folder, output, **changes):
    return ShardConfig(**{"plan": plan_folder, "output": output, "cp": 2, "layout": "te", **changes})


def shard(plan_folder, output, **changes):
    return run_shard(config(plan_folder, output, **changes), progress=SilentProgress())


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(plan_folder, local_ray, tmp_path_factory):
    """The bytes of shards that one worker wrote without a disturbance, beside the plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_job, "_FOLDER_BYTES", SMALL_FOLDERS)
        output = plan_folder.with_name("undisturbed")
        report = shard(plan_folder, output, workers=1)
    assert report.num_folders_written == report.num_folders > 4
    return contents(output)


def test_tasks_on_ray_give_the_bytes_of_a_plain_call(plan_folder, undisturbed, tmp_path):
    plan = Plan.open(plan_folder)
    task = replace(shard_job._plan_task(plan, config(plan_folder, tmp_path)), folder=tmp_path)
    for index in range(num_folders(plan, steps_per_folder=task.steps_per_folder)):
        write_steps(task, index)
    assert {name: data for name, data in undisturbed.items() if name != "manifest.json"} == contents(tmp_path)


def test_the_number_of_workers_changes_no_byte(plan_folder, undisturbed):
    shard(plan_folder, plan_folder.with_name("two"), workers=2)
    assert contents(plan_folder.with_name("two")) == undisturbed


def test_a_finished_job_does_nothing(plan_folder, undisturbed):
    output = plan_folder.with_name("undisturbed")
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    report = shard(plan_folder, output)
    assert report.num_folders_written == 0
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_an_output_of_other_shards_is_refused_with_the_difference(plan_folder, undisturbed):
    with pytest.raises(ValueError, match=r"spec.cp_size: has 2, asked for 1"):
        shard(plan_folder, plan_folder.with_name("undisturbed"), cp=1)


def test_a_killed_worker_is_replaced(plan_folder, undisturbed, local_ray, tmp_path, monkeypatch):
    original = shard_job.write_folder

    def die_twice(task, index):
        marks = sorted(tmp_path.iterdir())
        if index == 2 and len(marks) < 2:
            (tmp_path / str(len(marks))).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(task, index)

    monkeypatch.setattr(shard_job, "write_folder", die_twice)
    shard(plan_folder, plan_folder.with_name("survived"), workers=2)
    assert len(list(tmp_path.iterdir())) == 2
    assert contents(plan_folder.with_name("survived")) == undisturbed


def test_workers_do_not_import_torch_and_use_one_thread(plan_folder, local_ray, tmp_path):
    import ray

    plan = Plan.open(plan_folder)
    (tmp_path / "attempts").mkdir()
    task = replace(shard_job._plan_task(plan, config(plan_folder, tmp_path)), folder=tmp_path)
    original = shard_job.write_folder

    def look(index):
        import numba
        import pyarrow as pa

        original(task, index)
        threads = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        return "torch" in sys.modules, threads, pa.cpu_count()

    assert ray.get(ray.remote(num_cpus=1)(look).remote(0)) == (False, 1, 1)


def test_verify_runs_on_ray(plan_folder, undisturbed, local_ray):
    from ringfeed.workers.ray_executor import RayExecutor

    report = verify(plan_folder.with_name("undisturbed"), executor=RayExecutor(num_in_flight=2))
    assert (report.findings, report.unchecked) == ((), ())
    assert report.counts["folders"] > 4


def test_damage_found_by_a_worker_is_one_error_and_finished_folders_stay(plan_folder, local_ray, monkeypatch):
    original = shard_job.write_folder

    def find_damage(task, index):
        if index == 3:
            raise CorruptDataError("tokens-00000.arrow: document 7 is damaged")
        return original(task, index)

    monkeypatch.setattr(shard_job, "write_folder", find_damage)
    output = plan_folder.with_name("damaged")
    with pytest.raises(CorruptDataError, match=r"^tokens-00000.arrow: document 7 is damaged$"):
        shard(plan_folder, output, workers=1)
    with pytest.raises(ValueError, match=r"half-written .*run the same `ringfeed shard` again"):
        FileStore.open(output)
    monkeypatch.setattr(shard_job, "write_folder", original)
    report = shard(plan_folder, output, workers=1)
    assert report.num_folders_written == report.num_folders - 3


DIE_AFTER_TWO_FOLDERS = """
import os, signal, sys
from ringfeed.workers import shard_job
from ringfeed.workers.cli import main
from ringfeed.workers.shard_journal import ShardJournal

shard_job._FOLDER_BYTES = {folder_bytes}
original = ShardJournal.adopt

def adopt(self, folder):
    if len(self.finished) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, folder)

ShardJournal.adopt = adopt
main(sys.argv[1:])
"""


def end_session(session):
    """Kill what a dead driver left: its raylet and workers are in its session."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def test_a_killed_job_goes_on_and_ends_with_the_same_bytes(plan_folder, undisturbed):
    output = plan_folder.with_name("killed")
    script = DIE_AFTER_TWO_FOLDERS.format(folder_bytes=SMALL_FOLDERS)
    command = [sys.executable, "-c", script, "shard", str(plan_folder), "-o", str(output)]
    driver = subprocess.Popen(
        [*command, "--cp", "2", "--layout", "te", "--workers", "2"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert driver.wait(timeout=300) == -signal.SIGKILL
    finally:
        end_session(driver.pid)
    assert not output.exists()
    with pytest.raises(ValueError, match="half-written"):
        FileStore.open(output)

    report = shard(plan_folder, output)

    assert report.num_folders_written == report.num_folders - 2
    assert contents(output) == undisturbed
    assert not output.with_name("killed.partial").exists()
