"""A small run, what it gives without a service, and real processes of feeders over it."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.sharding.layouts import read_layout
from ringfeed.workers.block_builder import BlockBuilder, PlanOpener
from ringfeed.workers.flight_server import FlightServer

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
        self.process.communicate()

    def end(self) -> None:
        """Let it end by itself."""
        if self.process.returncode is None:
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


@pytest.fixture
def serve(plan):
    """Return a function that starts a server in this process; it stops with the test."""
    servers = []

    def serve_one(options=None, *, layout="te", supply=None, **more):
        servers.append(FlightServer(supply or builder_of(plan, layout), options, **more))
        return servers[-1]

    yield serve_one
    for server in servers:
        server.stop(grace_seconds=2)


@pytest.fixture
def make_builder(plan):
    """Return a function that makes a builder of blocks of a few micro-batches."""
    return lambda layout="te", **options: builder_of(plan, layout, **options)


def builder_of(path, layout, *, block_bytes=1024):
    opened = OpenOptions(layout=read_layout(layout), cp_size=2)
    opener = PlanOpener(plan=path, spec=open_spec(Plan.open(path), opened, pad_id=5))
    return BlockBuilder(opener, block_bytes=block_bytes)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """A folder of PEM files: a CA, a server's and a rank's certificate of it, and somebody else's."""
    folder = tmp_path_factory.mktemp("certificates")
    own = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    for name in ("ca", "other"):
        openssl(*own, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem", folder=folder)
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key"]
    for name in ("server", "rank"):
        out = ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
        openssl(*own, *signed, *names, "-subj", f"/CN={name}", *out, folder=folder)
    return folder


def openssl(*arguments, folder):
    program = shutil.which("openssl")
    assert program, "openssl is needed to make certificates"
    subprocess.run([program, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)
