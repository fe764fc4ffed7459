"""Builders, feeders, the service actor and ranks are killed while four ranks train: no byte differs.

A kill comes only once the last victim's place is filled again: whoever kills faster than Ray starts actors
tests nothing but patience.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.workers import serve
from ringfeed.workers.ray_session import ray_session

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RANK = Path(__file__).with_name("chaos_rank.py")
EVERY = 5
STEPS_A_KILL = 15
KILLS = [
    ("builder", "os"),
    ("builder", "ray"),
    ("feeder", "os"),
    ("builder", "os"),
    ("rank", "os"),
    ("feeder", "ray"),
    ("builder", "ray"),
    ("service", "os"),
    ("rank", "os"),
    ("builder", "os"),
    ("feeder", "os"),
    ("builder", "ray"),
]
NUM_STEPS = STEPS_A_KILL * (len(KILLS) + 1) + EVERY
PLACES = [(dp, cp) for dp in range(2) for cp in range(2)]
DEADLINE_SECONDS = 300


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Steps of 4 packs of 128 slots: 200 of them, and some more."""
    folder = tmp_path_factory.mktemp("chaos")
    rng = np.random.default_rng(7)
    documents = [rng.integers(0, 300, n) for n in rng.integers(1, 200, 1100)]
    write_corpus(folder / "corpus", documents, name="corpus", pad_id=5)
    options: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 4, "max_cp": 2, "window": 4, "seed": 3}
    run_plan(PlanOptions(output=folder / "plan", corpora=[folder / "corpus"], **options))
    assert Plan.open(folder / "plan").num_steps >= NUM_STEPS
    return folder / "plan"


@dataclass(slots=True)
class Rank:
    """A rank, which is started again from its checkpoint when it was killed."""

    folder: Path
    asked: dict[str, Any]
    address: str
    process: Any = None

    def start(self):
        # A file: nobody reads a pipe while the test waits for something else.
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(RANK), json.dumps(self.asked)],
                stdout=log,
                stderr=log,
                env={**os.environ, "RAY_ADDRESS": self.address},
            )

    def open_gate(self, step):
        part = self.folder / "gate.part"
        part.write_text(str(step))
        part.rename(self.folder / "gate")

    def lines(self):
        path = self.folder / "batches"
        return path.read_text().splitlines() if path.exists() else []

    def step(self):
        """The step that it is in, -1 before the first."""
        lines = self.lines()
        return int(lines[-1].split()[0]) if lines else -1

    def check(self):
        assert self.process.poll() in (None, 0), (self.folder / "log").read_text()[-3000:]


@pytest.fixture
def ranks(plan, tmp_path):
    """Four ranks; those with cp rank 0 load over Flight, their peers over the object store."""
    made = []

    def make(running):
        for dp, cp in PLACES:
            folder = tmp_path / f"dp{dp}cp{cp}"
            folder.mkdir()
            url = running.ray_url if cp else running.url
            asked = {"url": url, "dp": [dp, 2], "cp": [cp, 2], "folder": str(folder), "every": EVERY}
            made.append(Rank(folder, asked, running.ray_address))
            made[-1].open_gate(STEPS_A_KILL)
            made[-1].start()
        return made

    yield make
    for rank in made:
        rank.process.kill()
        rank.process.wait()


def wait_until(is_true, ranks, what):
    until = time.monotonic() + DEADLINE_SECONDS
    while not is_true():
        assert time.monotonic() < until, f"{what}: {[rank.step() for rank in ranks]}"
        for rank in ranks:
            rank.check()
        time.sleep(0.05)


def kill(running, role, way):
    """Kill a ready member of a role; return its name and its life."""
    import ray

    ready = [one for one in running.status().members if one.role == role and one.phase == "ready"]
    if way == "ray":
        # Only the loop has the handles of feeders. A copy: its thread changes the dictionary.
        actor = running._loop._lives.copy()[ready[0].life].actor
        ray.kill(actor)
    else:
        os.kill(ready[0].pid, signal.SIGKILL)
    return ready[0].name, ready[0].life


def is_back(running, name, life):
    members = {member.name: member for member in running.status().members}
    return name in members and members[name].phase == "ready" and members[name].life > life


def test_every_rank_gets_the_bytes_of_a_quiet_run_whoever_is_killed(plan, ranks):
    settings: dict[str, Any] = {"builders": 3, "block_bytes": 1024, "node_bytes": 320 << 20}
    with ray_session(num_cpus=4), serve(plan, cp_size=2, layout="te", **settings) as running:
        started = ranks(running)
        victims = [started[1], started[2]]
        for number, (role, way) in enumerate(KILLS):
            first = number * STEPS_A_KILL
            wait_until(lambda s=first: all(r.step() >= s for r in started), started, f"step {first}")
            for rank in started:
                rank.open_gate(first + 2 * STEPS_A_KILL)
            if role == "rank":
                victim = victims.pop()
                victim.process.kill()
                victim.process.wait()
                victim.start()
                continue
            name, life = kill(running, role, way)
            wait_until(lambda n=name, i=life: is_back(running, n, i), started, f"{name} to be back")
        for rank in started:
            rank.open_gate(1 << 30)
        wait_until(lambda: all((r.folder / "done").exists() for r in started), started, "the end")
        restarts = running.status().num_restarts
    assert restarts == {"builder": 6, "feeder": 3, "service": 1}
    for rank in started:
        assert rank.lines() == serial_lines(plan, rank.asked)


def serial_lines(plan, asked):
    """Return what a rank gets from the plan itself, when nothing is killed."""
    digest_of = runpy.run_path(str(RANK))["digest_of"]
    (dp_rank, dp_size), (cp_rank, cp_size) = asked["dp"], asked["cp"]
    place = {"dp_rank": dp_rank, "dp_size": dp_size, "cp_rank": cp_rank, "cp_size": cp_size}
    with Loader(plan, layout="te", **place) as loader:
        lines = [digest_of(batch) for batch in loader]
    assert len(lines) == 2 * Plan.open(plan).num_steps
    return lines
