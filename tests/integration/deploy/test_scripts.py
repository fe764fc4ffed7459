"""The scripts of deploy/ run: a real service, real ranks, and nothing left afterwards.

Slurm's own commands are stand-ins that run here what they are given; Ray, service and torchrun are real.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan

HERE = Path(__file__).parent
DEPLOY = HERE.parents[2] / "deploy"
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
tr , '\\n' <<<"$3"
"""

pytestmark = [pytest.mark.ray, pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    write_corpus(
        folder / "corpus", [rng.integers(0, 1000, n) for n in rng.integers(5, 200, 80)], name="c", pad_id=0
    )
    run_plan(
        PlanOptions(
            output=folder / "plan", corpora=[folder / "corpus"], pack_tokens=256, packs_per_step=4, max_cp=2
        )
    )
    return folder / "plan"


@pytest.fixture(scope="module")
def expected(plan):
    """Digests of every batch, by cp rank."""
    found = []
    for rank in range(2):
        with Loader(plan, layout="whole_document", dp_rank=0, dp_size=1, cp_rank=rank, cp_size=2) as loader:
            found.append([batch.info.digest for batch in loader])
    return found


def start(script, *arguments, **variables):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RINGFEED_"))
    }
    return subprocess.Popen(
        [DEPLOY / script, *map(str, arguments)],
        env={**environment, "PATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def told(folder):
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def left_over(token):
    """Processes that still have this run's token in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (path / "environ").read_bytes():
                found.append((path.name, (path / "cmdline").read_bytes().replace(b"\0", b" ")))
        except OSError:
            continue
    return found


def assert_nothing_left(token):
    deadline = time.monotonic() + 30
    while left_over(token) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left_over(token) == []
    assert not Path(token).exists()


def test_one_box_feeds_its_ranks_the_bytes_of_the_plan(plan, expected, tmp_path):
    process = start("one_box.sh", plan, HERE / "rank.py", tmp_path)
    output, _ = process.communicate(timeout=300)

    assert process.returncode == 0, output
    assert [rank["digests"] for rank in told(tmp_path)] == expected
    assert {rank["token_mode"] for rank in told(tmp_path)} == {0o600}
    assert_nothing_left(told(tmp_path)[0]["token"])


def test_one_box_that_is_stopped_takes_everything_with_it(plan, tmp_path):
    process = start("one_box.sh", plan, HERE / "rank.py", tmp_path, "wait")
    deadline = time.monotonic() + 300
    while len(list(tmp_path.glob("*.json"))) < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)

    assert process.returncode == 143, output
    assert_nothing_left(told(tmp_path)[0]["token"])


def test_one_box_tells_why_a_service_does_not_start(tmp_path):
    process = start("one_box.sh", tmp_path / "none", HERE / "rank.py", tmp_path)
    output, _ = process.communicate(timeout=120)

    assert process.returncode == 2, output
    assert "one_box.sh: the service ended before it was up (exit code 2)" in output
    assert list(tmp_path.glob("*.json")) == []


def test_the_slurm_job_feeds_its_ranks_the_bytes_of_the_plan(plan, expected, tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    node = socket.gethostbyname(socket.gethostname())
    process = start(
        "slurm/train.sbatch",
        plan,
        HERE / "rank.py",
        tmp_path,
        PATH=f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        SLURM_JOB_ID=str(os.getpid()),
        SLURM_JOB_NODELIST_HET_GROUP_0=f"{node},{node}",
        SLURM_JOB_NODELIST_HET_GROUP_1=node,
        RUN=str(tmp_path / "job"),
        CP="2",
        CPUS="1",
        GPUS="2",
        NODE_BYTES=str(320 << 20),
        STORE_BYTES=str(100 << 20),
    )
    output, _ = process.communicate(timeout=400)

    assert process.returncode == 0, output
    assert [rank["digests"] for rank in told(tmp_path)] == expected
    assert {rank["token_mode"] for rank in told(tmp_path)} == {0o600}
    assert node in told(tmp_path)[0]["url"]
    assert_nothing_left(told(tmp_path)[0]["token"])
    assert list((tmp_path / "job").iterdir()) == []
