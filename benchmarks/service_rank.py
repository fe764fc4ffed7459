"""A trainer rank in a process of its own, for ``bench_service.py``: does what it is told, and times it."""

import json
import os
import subprocess
import sys
import time
import zlib
from itertools import islice
from typing import Any

import torch

from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.loader_metrics import NoMetrics
from ringfeed.workers.ray_session import join_ray

CP_SIZE = 2
WARM_STEPS, CHECKED_STEPS = 10, 40


class Waited(NoMetrics):
    """Keeps for how long the training loop stood still at each batch."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.seconds: list[float] = []

    def batch(self, *, tokens: int, seconds: float) -> None:  # noqa: ARG002
        """Note one."""
        self.seconds.append(seconds)


class Rank:
    """A trainer rank: a child process that does one thing after the other."""

    def __init__(self, transport: str, address: str) -> None:
        """Start it; it imports meanwhile."""
        environment = {**os.environ, "RAY_ADDRESS": address}
        self._process = subprocess.Popen(
            [sys.executable, __file__, transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, what: str, **arguments: Any) -> None:
        """Let it begin."""
        assert self._process.stdin is not None
        print(json.dumps([what, arguments]), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """Wait for what it found."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def do(self, what: str, **arguments: Any) -> Any:
        """Let it begin, and wait."""
        self.ask(what, **arguments)
        return self.answer()

    def end(self) -> None:
        """Let it end."""
        self._process.communicate()


def open_loader(source: str, *, cp_rank: int = 0, metrics: Waited | None = None) -> Loader:
    """Open one rank's loader."""
    place = {"dp_rank": 0, "dp_size": 1, "cp_rank": cp_rank, "cp_size": CP_SIZE}
    layout = None if "://" in source else "te"
    return Loader(source, **place, layout=layout, token_dtype=torch.int32, metrics=metrics)


def checksum(tensors: dict[str, torch.Tensor]) -> list[int]:
    """Return a number for each tensor's bytes."""
    return [zlib.crc32(tensors[name].numpy().tobytes()) for name in sorted(tensors)]


def first_batch(source: str, *, state: dict[str, Any] | None) -> dict[str, Any]:
    """In a rank: open the loader and take one batch."""
    cpu, began = time.process_time(), time.perf_counter()
    loader = open_loader(source)
    opened = time.perf_counter()
    if state is not None:
        loader.load_state_dict(state)
    batch = next(iter(loader))
    ended = time.perf_counter()
    found = {
        "open_ms": (opened - began) * 1e3,
        "ms": (ended - began) * 1e3,
        "cpu_ms": (time.process_time() - cpu) * 1e3,
        "sum": checksum(dict(batch.tensors)),
    }
    loader.close()
    return found


def check_steps(source: str, *, plan: str) -> int:
    """In a rank: compare the first steps with the plan's, every tensor of both cp ranks."""
    count = 0
    for cp_rank in range(CP_SIZE):
        with open_loader(source, cp_rank=cp_rank) as loader, open_loader(plan, cp_rank=cp_rank) as direct:
            batches = CHECKED_STEPS * direct.num_micro_batches
            for batch, other in zip(islice(loader, batches), islice(direct, batches), strict=True):
                assert batch.info == other.info
                assert checksum(dict(batch.tensors)) == checksum(dict(other.tensors))
                count += 1
    return count


def time_steps(source: str, *, pause_ms: float, num_steps: int, cp_rank: int) -> dict[str, list[float]]:
    """In a rank: return the milliseconds waited in each step after the first ones, by both clocks."""
    waited = Waited()
    times = []
    with open_loader(source, cp_rank=cp_rank, metrics=waited) as loader:
        batches = iter(loader)
        num_batches = loader.num_micro_batches
        for _ in range(min(num_steps, loader.num_steps)):
            if pause_ms:
                time.sleep(pause_ms / 1e3)
            began = time.perf_counter()
            for _ in range(num_batches):
                next(batches)
            times.append((time.perf_counter() - began) * 1e3)
    own = [1e3 * sum(waited.seconds[i : i + num_batches]) for i in range(0, len(waited.seconds), num_batches)]
    return {"times": times[WARM_STEPS:], "waited": own[WARM_STEPS:]}


def be_rank(transport: str) -> None:
    """Child process: do what comes on standard input."""
    torch.set_num_threads(1)
    if transport == "ray-actor":
        join_ray()
    print(json.dumps("ready"), flush=True)
    calls: dict[str, Any] = {"first": first_batch, "check": check_steps, "steps": time_steps}
    for line in sys.stdin:
        what, arguments = json.loads(line)
        print(json.dumps(calls[what](**arguments)), flush=True)


if __name__ == "__main__":
    be_rank(sys.argv[1])
