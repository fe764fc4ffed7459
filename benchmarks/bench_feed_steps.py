"""Count what goes over the wire to one of eight cp ranks, and time steps that come from a service.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_feed_steps.py
Read:  one JSON line per case. ``wire``: all bytes on the TCP connections of a rank that loads a whole plan
       over Flight, both ways, counted by a relay, over the bytes of its dp rank's batches: input_ids, labels
       and position_ids as int32, for all slots. The worst rank is reported; at most 1.05 / 8. ``steps``:
       time of a step of 0.5 MB views with nothing trained in between, from a feeder in a process of its own
       (blocks of 8 MB sent, or mapped from ``/dev/shm``), beside the same loader over the plan in this
       process: medians of steps, and means, which have the waits for blocks in them; passes alternate. The
       overhead is the service's time over the plan's, which may be below 0: the feeder builds beside the
       rank. At most 5 ms in the median. A service with Ray behind it is not measured here.
"""

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from bench_bytes_per_rank import PACK_TOKENS, STEP_BYTES_PER_SLOT, make_plan

from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.block_builder import BlockBuilder, PlanOpener
from ringfeed.workers.flight_options import ServerOptions
from ringfeed.workers.flight_server import FlightServer

WIRE_CP, STEPS_CP = 8, 2
PASSES, WARM_STEPS = 5, 5


def serve(plan: str, cp_size: int, shared_bytes: int) -> None:
    """Child process: a feeder with its builder, until standard input ends."""
    spec = open_spec(Plan.open(Path(plan)), OpenOptions(layout=make_layout("te"), cp_size=cp_size), pad_id=0)
    builder = BlockBuilder(PlanOpener(plan=Path(plan), spec=spec))
    with FlightServer(builder, ServerOptions(shared_bytes=shared_bytes)) as server:
        print(server.url, flush=True)
        sys.stdin.read()
    os._exit(0)


class Feeder:
    """The child process."""

    def __init__(self, plan: Plan, *, cp_size: int, shared_bytes: int) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, __file__, "serve", str(plan.path), str(cp_size), str(shared_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def end(self) -> None:
        """Let it end."""
        self._process.communicate()


class Relay:
    """Passes TCP connections on and counts their bytes, both ways."""

    def __init__(self, url: str) -> None:
        """Listen on a free port."""
        host, _, port = url.removeprefix("flight://").partition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.count = 0
        self.url = f"flight://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._target)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 20):
                with self._lock:
                    self.count += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return


def open_loader(source: Any, *, cp_size: int, cp_rank: int = 0) -> Loader:
    """Open one rank's loader."""
    layout = "te" if isinstance(source, Path) else None
    place = {"dp_rank": 0, "dp_size": 1, "cp_rank": cp_rank, "cp_size": cp_size}
    return Loader(source, **place, layout=layout, token_dtype=torch.int32)


def count_wire(plan: Plan) -> dict[str, Any]:
    """Load everything as every rank and count; what comes is compared with the plan."""
    feeder = Feeder(plan, cp_size=WIRE_CP, shared_bytes=0)
    counts = []
    for rank in range(WIRE_CP):
        relay = Relay(feeder.url)
        with (
            open_loader(relay.url, cp_size=WIRE_CP, cp_rank=rank) as loader,
            open_loader(plan.path, cp_size=WIRE_CP, cp_rank=rank) as direct,
        ):
            slots = 0
            for batch, other in zip(loader, direct, strict=True):
                assert batch.info == other.info
                assert all(batch.tensors[name].equal(tensor) for name, tensor in other.tensors.items())
                slots += PACK_TOKENS
        counts.append(relay.count / (slots * STEP_BYTES_PER_SLOT))
    feeder.end()
    return {
        "case": "wire",
        "cp_size": WIRE_CP,
        "of_an_eighth": round(max(counts) * WIRE_CP, 4),
        "of_an_eighth_min": round(min(counts) * WIRE_CP, 4),
        "limit": 1.05,
    }


def time_steps(source: Any) -> list[float]:
    """Return the milliseconds of each step of a plan after the first ones."""
    with open_loader(source, cp_size=STEPS_CP) as loader:
        batches = iter(loader)
        times = []
        for _ in range(loader.num_steps):
            began = time.perf_counter()
            for _ in range(loader.num_micro_batches):
                next(batches)
            times.append((time.perf_counter() - began) * 1e3)
    return times[WARM_STEPS:]


def measure_steps(plan: Plan) -> list[dict[str, Any]]:
    """Alternate between the plan in this process and both ways from a feeder."""
    feeders = {
        "sent": Feeder(plan, cp_size=STEPS_CP, shared_bytes=0),
        "mapped": Feeder(plan, cp_size=STEPS_CP, shared_bytes=1 << 30),
    }
    sources: dict[str, Any] = {"plan": plan.path, **{name: one.url for name, one in feeders.items()}}
    times: dict[str, list[float]] = {name: [] for name in sources}
    medians: dict[str, list[float]] = {name: [] for name in sources}
    for number in range(PASSES + 1):
        for name, source in sources.items():
            found = time_steps(source)
            if number:
                times[name] += found
                medians[name].append(statistics.median(found))
    for feeder in feeders.values():
        feeder.end()
    reports = []
    for name in feeders:
        overheads = [one - other for one, other in zip(medians[name], medians["plan"], strict=True)]
        reports.append(
            {
                "case": f"steps_{name}",
                "view_mb": round(4 * PACK_TOKENS // STEPS_CP * 8 / 1e6, 2),
                "step_ms_p50": round(statistics.median(times[name]), 2),
                "step_ms_mean": round(statistics.mean(times[name]), 2),
                "plan_step_ms_p50": round(statistics.median(times["plan"]), 2),
                "plan_step_ms_mean": round(statistics.mean(times["plan"]), 2),
                "overhead_ms_p50": round(statistics.median(overheads), 2),
                "overhead_ms_p50_min": round(min(overheads), 2),
                "overhead_ms_p50_max": round(max(overheads), 2),
                "overhead_ms_mean": round(statistics.mean(times[name]) - statistics.mean(times["plan"]), 2),
                "limit": 5.0,
            }
        )
    return reports


def main() -> None:
    """Run all cases in a temporary folder."""
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    torch.set_num_threads(1)
    facts = {"threads": 1, "machine": platform.processor() or platform.machine()}
    with tempfile.TemporaryDirectory() as temporary:
        plan = make_plan(Path(temporary), 16_000_000)
        for report in (count_wire(plan), *measure_steps(plan)):
            print(json.dumps({**report, "num_steps": plan.num_steps, **facts}), flush=True)


if __name__ == "__main__":
    main()
