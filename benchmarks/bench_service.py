"""Time a whole service, with Ray behind it, as trainer ranks in processes of their own see it.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_service.py [first] [steps] [steady]
Read:  one JSON line per case and transport: ``flight`` (a process on the feeder's machine, which maps blocks
       from ``/dev/shm``) and ``ray-actor`` (a driver beside a raylet). What comes is compared with the plan.
       ``first``: from the call of ``Loader`` to the first batch in a process that has imported everything
       (and joined Ray), as soon as a fresh service is up: from the plan's start, at most 1 s, and from a
       state at half of the plan, at most 50 ms more. Every run has a service and a process of its own;
       ``rank_cpu_ms`` is the CPU time of all threads of the rank.
       ``steps``: what a rank waits in ``next()`` for a step of 0.5 MB views, at most 5 ms in the median: with
       no pause between steps (builders make everything meanwhile), and with 30 ms as a trainer would need,
       beside the same loader over the plan; passes alternate. ``steady``: both cp ranks at once, 50 ms
       a step, what they stood still after the first steps, by the loader's own count.
       Builders' caches are smaller than a pass. ``load`` is the machine's load average at the end of a case,
       ``worker_niceness`` that of builders and feeders.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Ray gives workers way to all else on the machine (15): with other work about, they would not be measured.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from bench_bytes_per_rank import PACK_TOKENS, make_plan
from service_rank import CHECKED_STEPS, CP_SIZE, Rank, checksum, open_loader

from ringfeed.pipeline.plan import Plan
from ringfeed.workers import serve
from ringfeed.workers.ray_session import ray_session
from ringfeed.workers.service import Service

BUILDERS = 2
NUM_TOKENS = int(os.environ.get("BENCH_SERVICE_TOKENS", "32_000_000"))
NODE_BYTES, STORE_BYTES = 512 << 20, 512 << 20
TRANSPORTS = ("flight", "ray-actor")
STARTS, PASSES = 5, 5
PAUSED_STEPS, STEADY_STEPS = 150, 200
PAUSES_MS = (0, 30)
STEADY_MS = 50


def start_service(plan: Plan, name: str) -> Service:
    """Start one of several on this Ray."""
    return serve(plan.path, cp_size=CP_SIZE, layout="te", builders=BUILDERS, node_bytes=NODE_BYTES, name=name)


def source_of(service: Service, transport: str) -> str:
    """Return the URL for a transport."""
    return service.ray_url if transport == "ray-actor" else service.url


def spread(name: str, values: list[float], digits: int = 2) -> dict[str, float]:
    """Return median, min and max."""
    found = {"": statistics.median(values), "_min": min(values), "_max": max(values)}
    return {name + end: round(value, digits) for end, value in found.items()}


def half_state(plan: Plan) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Return the state at half of the plan, and the checksums of the first batch there and at the start."""
    half = plan.num_steps // 2
    with open_loader(str(plan.path)) as loader:
        sums = {}
        for number, batch in enumerate(loader):
            if number == 0:
                sums["cold"] = checksum(dict(batch.tensors))
            if number + 1 == half * loader.num_micro_batches:
                break
        state = loader.state_dict()
        sums["half"] = checksum(dict(next(iter(loader)).tensors))
    assert state["step"] == half
    return state, sums


def measure_first(plan: Plan, transport: str, address: str) -> dict[str, Any]:
    """Start services, each for one first batch; starts from both places alternate."""
    state, sums = half_state(plan)
    states: dict[str, Any] = {"cold": None, "half": state}
    times: dict[str, list[float]] = {"cold": [], "half": [], "open": [], "cpu": []}
    for number in range(STARTS):
        for where, start in states.items():
            rank = Rank(transport, address)
            rank.answer()
            with start_service(plan, f"{transport}-{where}-{number}") as service:
                found = rank.do("first", source=source_of(service, transport), state=start)
                rank.end()
            assert found["sum"] == sums[where]
            times[where].append(found["ms"])
            times["open"].append(found["open_ms"])
            times["cpu"].append(found["cpu_ms"])
    more = [half - cold for half, cold in zip(times["half"], times["cold"], strict=True)]
    return {
        "case": "first",
        "transport": transport,
        **spread("first_batch_ms", times["cold"], 1),
        "limit_ms": 1_000,
        **spread("resumed_ms", times["half"], 1),
        "resumed_more_ms": round(statistics.median(times["half"]) - statistics.median(times["cold"]), 1),
        "resumed_more_ms_min": round(min(more), 1),
        "resumed_more_ms_max": round(max(more), 1),
        "limit_more_ms": 50,
        **spread("open_ms", times["open"], 1),
        **spread("rank_cpu_ms", times["cpu"], 1),
        "starts": STARTS,
    }


def measure_steps(plan: Plan, service: Service, address: str) -> list[dict[str, Any]]:
    """Alternate between the plan and both transports, each with the pauses."""
    sources = {"plan": str(plan.path), **{name: source_of(service, name) for name in TRANSPORTS}}
    ranks = {name: Rank(name, address) for name in sources}
    for name, rank in ranks.items():
        rank.answer()
        assert rank.do("check", source=sources[name], plan=str(plan.path)) >= CHECKED_STEPS * CP_SIZE
    keys = [(name, pause) for pause in PAUSES_MS for name in sources]
    times: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
    medians: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
    for _ in range(PASSES):
        for name, pause in keys:
            steps = PAUSED_STEPS if pause else plan.num_steps
            asked = {"pause_ms": pause, "num_steps": steps, "cp_rank": 0}
            found = ranks[name].do("steps", source=sources[name], **asked)["times"]
            times[name, pause] += found
            medians[name, pause].append(statistics.median(found))
    for rank in ranks.values():
        rank.end()
    return [
        {
            "case": "steps",
            "transport": name,
            "pause_ms": pause,
            "view_mb": round(4 * PACK_TOKENS // CP_SIZE * 8 / 1e6, 2),
            "wait_ms_p50": round(statistics.median(times[name, pause]), 2),
            "wait_ms_p50_min": round(min(medians[name, pause]), 2),
            "wait_ms_p50_max": round(max(medians[name, pause]), 2),
            "wait_ms_mean": round(statistics.mean(times[name, pause]), 2),
            "plan_wait_ms_p50": round(statistics.median(times["plan", pause]), 2),
            "plan_wait_ms_mean": round(statistics.mean(times["plan", pause]), 2),
            "limit": 5.0,
        }
        for pause in PAUSES_MS
        for name in TRANSPORTS
    ]


def measure_steady(service: Service, transport: str, address: str) -> dict[str, Any]:
    """Let both cp ranks train, as if on GPUs: the CPU is free meanwhile."""
    ranks = [Rank(transport, address) for _ in range(CP_SIZE)]
    for rank in ranks:
        rank.answer()
    asked = {"pause_ms": STEADY_MS, "num_steps": STEADY_STEPS}
    for number, rank in enumerate(ranks):
        rank.ask("steps", source=source_of(service, transport), cp_rank=number, **asked)
    waited = [one for rank in ranks for one in rank.answer()["waited"]]
    for rank in ranks:
        rank.end()
    return {
        "case": "steady",
        "transport": transport,
        "step_ms": STEADY_MS,
        "ranks": CP_SIZE,
        "steps": len(waited),
        "waited_ms_per_step": round(statistics.mean(waited), 3),
        "waited_ms_p50": round(statistics.median(waited), 3),
        "waited_ms_p99": round(statistics.quantiles(waited, n=100, method="inclusive")[98], 2),
        "waited_ms_max": round(max(waited), 2),
        "of_the_time": round(sum(waited) / (len(waited) * STEADY_MS + sum(waited)), 5),
    }


def tell(report: dict[str, Any], plan: Plan) -> None:
    """Print a case."""
    facts = {
        "num_steps": plan.num_steps,
        "builders": BUILDERS,
        "threads": 1,
        "load": round(os.getloadavg()[0], 1),
        "cpus": os.cpu_count(),
        "worker_niceness": int(os.environ["RAY_worker_niceness"]),  # noqa: SIM112
        "ray": ray.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps({**report, **facts}), flush=True)


def main() -> None:
    """Run all cases, or those that are named, on a Ray of its own."""
    wanted = sys.argv[1:] or ["first", "steps", "steady"]
    with tempfile.TemporaryDirectory() as temporary:
        plan = make_plan(Path(temporary), NUM_TOKENS)
        with ray_session(num_cpus=BUILDERS, object_store_bytes=STORE_BYTES):
            address = ray.get_runtime_context().gcs_address
            if "first" in wanted:
                for transport in TRANSPORTS:
                    tell(measure_first(plan, transport, address), plan)
            with start_service(plan, "feed") as service:
                if "steps" in wanted:
                    for report in measure_steps(plan, service, address):
                        tell(report, plan)
                if "steady" in wanted:
                    for transport in TRANSPORTS:
                        tell(measure_steady(service, transport, address), plan)


if __name__ == "__main__":
    main()
