"""A small run, what it gives without a service, and real processes of feeders over it."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan

FEEDERS = Path(__file__).with_name("feeders.py")


@pytest.fixture(scope="session")
def plan(tmp_path_factory):
    """180 documents of two corpora in steps of 8 packs of 128 slots."""
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(2)
    for name, top, count in (("small", 300, 120), ("large", 90_000, 60)):
        documents = [rng.integers(0, top, n) for n in rng.integers(1, 200, count)]
        write_corpus(folder / name, documents, name=name, pad_id=5)
    options: dict[str, Any] = {
        "balance": "best_fit",
        "window": 2,
        "pack_tokens": 128,
        "packs_per_step": 8,
        "max_cp": 4,
    }
    corpora = [folder / "small", folder / "large"]
    run_plan(PlanOptions(output=folder / "plan", corpora=corpora, **options))
    return folder / "plan"


@dataclass(slots=True)
class Feeders:
    """A process of Flight servers."""

    process: subprocess.Popen
    urls: list[str]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Let it end by itself."""
        if self.process.poll() is None:
            self.process.communicate(timeout=30)


def begin(plan: Path, servers: list[dict[str, Any]]) -> Feeders:
    """Start a process with one server for each of ``servers``; see ``feeders.py``."""
    asked = json.dumps({"plan": str(plan), "servers": servers})
    process = subprocess.Popen(
        [sys.executable, str(FEEDERS), asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return Feeders(process, json.loads(process.stdout.readline()))


@pytest.fixture(scope="module")
def start_for_module(plan):
    """Return a function that starts a process of feeders; it ends with the module."""
    started = []

    def start_one(*servers):
        started.append(begin(plan, list(servers)))
        return started[-1]

    yield start_one
    for feeders in started:
        feeders.end()


@pytest.fixture
def start(plan):
    """Return a function that starts a process of feeders; it ends with the test."""
    started = []

    def start_one(*servers):
        started.append(begin(plan, list(servers)))
        return started[-1]

    yield start_one
    for feeders in started:
        feeders.end()


@pytest.fixture(scope="session")
def load():
    """Return a function that opens a loader; the place has defaults."""

    def load_rank(source, *, cp=(0, 2), dp=(0, 2), **options):
        return Loader(source, dp_rank=dp[0], dp_size=dp[1], cp_rank=cp[0], cp_size=cp[1], **options)

    return load_rank


@pytest.fixture(scope="session")
def assert_same_batches():
    """Return a function that compares two streams of batches byte by byte."""

    def compare(found, expected):
        count = 0
        for batch, other in zip(found, expected, strict=True):
            assert batch.info == other.info
            assert batch.tensors.keys() == other.tensors.keys()
            for name, tensor in other.tensors.items():
                assert batch.tensors[name].dtype == tensor.dtype
                assert batch.tensors[name].equal(tensor), name
            count += 1
        assert count

    return compare
