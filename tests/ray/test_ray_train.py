"""The example for Ray Train: ranks that are Ray actors load from the object store, and go on after a stop."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringfeed.pipeline.ingest import run_ingest
from ringfeed.pipeline.ingest_options import IngestOptions
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.workers import serve
from ringfeed.workers.ray_session import ray_session

pytestmark = [pytest.mark.ray, pytest.mark.dist, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = re.compile(r"step (\d+) loss (\S+) gradient (\S+)")
SMALL: dict[str, Any] = {"block_bytes": 4096, "node_bytes": 320 << 20}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / "texts" / f"{number:02}.txt").write_text(f"text {number} " * (number * number % 37 + 1))
    run_ingest(
        IngestOptions(sources=(folder / "texts",), output=folder / "corpus"), progress=SilentProgress()
    )
    run_plan(
        PlanOptions(
            corpora=(folder / "corpus",), output=folder / "plan", pack_tokens=512, packs_per_step=2, max_cp=2
        )
    )
    return folder / "plan"


@pytest.fixture(scope="module")
def address():
    """Of a local Ray that other processes may join."""
    with ray_session(num_cpus=4, object_store_bytes=100 << 20):
        import ray

        yield ray.get_runtime_context().gcs_address


def run(script, *arguments, **variables):
    """Run an example to its end; return its (step, loss, norm)."""
    result = subprocess.run(
        [sys.executable, EXAMPLES / script, *map(str, arguments)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # Ray may bring what a rank prints on both.
    found = dict.fromkeys(LINE.findall(result.stdout + result.stderr))
    return [(int(step), float(loss), float(norm)) for step, loss, norm in found]


@pytest.fixture(scope="module")
def alone(plan, tmp_path_factory):
    """The plain loop without Ray, on one rank, from the plan."""
    folder = tmp_path_factory.mktemp("alone")
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    return run("train_plain.py", plan, "--cp", 1, "--steps", 3, "--checkpoint", folder / "plain.pt", **place)


def test_ranks_on_the_object_store_train_as_one_from_the_plan_and_go_on_where_they_stopped(
    plan, address, alone, tmp_path
):
    with serve(plan, cp_size=2, layout="whole_document", builders=1, **SMALL) as running:
        assert running.ray_url.startswith("ray-actor://")
        common = (running.ray_url, "--cp", 2, "--ranks", 2, "--storage", tmp_path)
        first = run("ray_train.py", *common, "--steps", 2, RAY_ADDRESS=address)
        second = run("ray_train.py", *common, "--steps", 3, RAY_ADDRESS=address)

    assert [step for step, _, _ in first] == [0, 1]
    assert [step for step, _, _ in second] == [2]
    for (step, *numbers), (expected, *wanted) in zip([*first, *second], alone, strict=True):
        assert step == expected
        assert numbers == pytest.approx(wanted, rel=2e-4)
