"""The offline job without Ray: what it refuses, and where it may be killed."""

import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.config import ShardConfig
from ringfeed.pipeline.ingest import run_ingest
from ringfeed.pipeline.ingest_options import IngestOptions
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.pipeline.store import FileStore
from ringfeed.workers import shard_job
from ringfeed.workers.shard_job import run_shard

SMALL_FOLDERS = (1 << 13, 4 << 30)


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("job")
    (root / "text").mkdir()
    for i in range(40):
        (root / "text" / f"{i:02d}.txt").write_text(f"{i} " * (i * i % 89))
    run_ingest(IngestOptions(sources=(root / "text",), output=root / "corpus"), progress=SilentProgress())
    options: dict[str, Any] = {"pack_tokens": 96, "packs_per_step": 4, "max_cp": 2}
    run_plan(PlanOptions(corpora=(root / "corpus",), output=root / "plan", **options))
    return root / "plan"


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    def run_here(job, journal, *, workers, progress):
        for index in job.missing:
            journal.adopt(shard_job.write_folder(job.task, index))

    monkeypatch.setattr(shard_job, "_run_on_ray", run_here)
    monkeypatch.setattr(shard_job, "_FOLDER_BYTES", SMALL_FOLDERS)


def shard(plan_folder, output, **changes):
    config = ShardConfig(**{"plan": plan_folder, "output": output, "cp": 2, "layout": "te", **changes})
    return run_shard(config, progress=SilentProgress())


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_steps_of_a_folder_depend_on_the_plan_alone(plan_folder, tmp_path):
    plan = Plan.open(plan_folder)
    assert shard_job._steps_per_folder(plan, 96) == SMALL_FOLDERS[0] // (4 * 96 * 8)
    assert shard_job._steps_per_folder(plan, 1 << 30) == 1


def test_the_manifest_says_where_the_plan_is(plan_folder, tmp_path):
    shard(plan_folder, tmp_path / "deep" / "shards")
    stored = FileStore.open(tmp_path / "deep" / "shards").manifest.facts["plan_path"]
    assert (tmp_path / "deep" / "shards" / stored).resolve() == plan_folder


def test_a_layout_that_needs_a_larger_pack_is_refused_before_any_work(plan_folder, tmp_path):
    with pytest.raises(ValueError, match=r"pads them to 6: .* packs then take more than .* slot_budget="):
        shard(plan_folder, tmp_path / "shards", cp=3)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_layout_or_option_is_refused(plan_folder, tmp_path):
    with pytest.raises(ValueError, match="zigzag"):
        shard(plan_folder, tmp_path / "shards", layout="zigzag")
    with pytest.raises(ValueError, match="thresholds"):
        shard(plan_folder, tmp_path / "shards", layout="whole_document", layout_options={"thresholds": 3})


def test_a_skip_list_that_empties_a_step_is_refused(plan_folder, tmp_path):
    everything = tmp_path / "skip.txt"
    everything.write_text("\n".join(map(str, range(Plan.open(plan_folder).recipe.sources[0].num_documents))))
    with pytest.raises(ValueError, match="leaves no supervised token"):
        shard(plan_folder, tmp_path / "shards", skip=everything)


def test_a_skip_list_is_part_of_the_fingerprint(plan_folder, tmp_path):
    skip = tmp_path / "skip.txt"
    skip.write_text("3\n")
    report = shard(plan_folder, tmp_path / "shards", skip=skip)
    store = FileStore.open(tmp_path / "shards")
    assert store.overlay_digest
    assert 3 not in np.concatenate(
        [store.pack_view(step, 0, cp_rank=0).view.documents for step in range(store.num_steps)]
    )
    with pytest.raises(ValueError, match="overlay"):
        shard(plan_folder, tmp_path / "shards")
    assert report.fingerprint == store.manifest.fingerprint


def test_an_option_of_the_layout_reaches_the_shards(plan_folder, tmp_path):
    shard(plan_folder, tmp_path / "shards", layout="whole_document", layout_options={"threshold": 48})
    assert FileStore.open(tmp_path / "shards").spec.layout.options["threshold"] == 48


def test_two_jobs_on_one_output_are_refused(plan_folder, tmp_path, monkeypatch):
    def run_second(job, journal, *, workers, progress):
        shard(plan_folder, tmp_path / "shards")

    monkeypatch.setattr(shard_job, "_run_on_ray", run_second)
    with pytest.raises(ValueError, match="another process is writing"):
        shard(plan_folder, tmp_path / "shards")


KILL = """
import os, signal, sys
from ringfeed.workers import shard_job, shard_journal
from ringfeed.workers.cli import main
from ringfeed.pipeline.staging import StagedFolder

when, adopted = sys.argv.pop(1), []
shard_job._FOLDER_BYTES = {folder_bytes}

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def run_here(job, journal, *, workers, progress):
    for index in job.missing:
        folder = shard_job.write_folder(job.task, index)
        adopted.append(index)
        if when == "between" and len(adopted) == 3:
            shard_journal.write_atomically = die
        if when == "before" and len(adopted) == 3:
            die()
        journal.adopt(folder)
        if when == "after" and len(adopted) == 3:
            die()

shard_job._run_on_ray = run_here
if when == "unnamed":
    StagedFolder._rename = die
sys.exit(main())
"""


@pytest.mark.parametrize(("when", "done"), [("before", 2), ("between", 2), ("after", 3), ("unnamed", None)])
def test_a_job_killed_anywhere_goes_on_and_ends_with_the_same_bytes(plan_folder, when, done):
    undisturbed = plan_folder.with_name(f"undisturbed-{when}")
    output = plan_folder.with_name(f"killed-{when}")
    shard(plan_folder, undisturbed)
    script = KILL.format(folder_bytes=SMALL_FOLDERS)
    command = [sys.executable, "-c", script, when, "shard", str(plan_folder), "-o", str(output)]
    died = subprocess.run([*command, "--cp", "2", "--layout", "te"], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    with pytest.raises(ValueError, match="half-written"):
        FileStore.open(output)

    report = shard(plan_folder, output)

    assert report.num_folders > 4
    assert report.num_folders_written == (0 if done is None else report.num_folders - done)
    assert contents(output) == contents(undisturbed)
    assert not output.with_name(f"{output.name}.partial").exists()
