"""Compare a service with Ray Data's ``streaming_split`` over the same packs, as consumers on Ray see both.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_streaming_split.py
Read:  one JSON line per case: real tokens per second and consumer (median, min and max over passes that
       alternate), and how many times as fast the service is; the goal is 10. ``dp``: two consumers, each has
       half of the packs. ``cp``: both train on every pack, half of its tokens each: the service sends halves,
       while ``streaming_split`` gives whole rows, so each consumer reads all of them, and its half is counted
       (taking it costs it nothing here). A consumer's clock runs from its first batch to its last, so
       what both need to start is not in it; ``whole`` counts from the call to the end.
       The peer gets every advantage: rows that are packed and labelled already, uncompressed, in numpy that
       is not copied, from Parquet files in the page cache (``files``). Once more, for ``dp``, its rows are
       made by the code that the service's builders have, two steps a task (``built``): the same work, so
       transport and scheduling are what differs. The service builds from plan and corpus and gives torch
       tensors that are each rank's own. Every token that comes is compared first. Both have two of Ray's
       CPUs, one after the other, and int32 tokens. It needs pandas, as Ray Data does.
"""

import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Ray gives workers way to all else on the machine (15): with other work about, they would not be measured.
os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
import torch
from bench_bytes_per_rank import PACK_TOKENS, make_plan
from ray.data.extensions import ArrowTensorArray
from split_consumers import COLUMNS, CONSUMERS, Consumer, Packs, open_loader, sums

from ringfeed.pipeline.batch import Batch
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.plan import Plan
from ringfeed.workers import serve
from ringfeed.workers.environment import WORKER_THREADS
from ringfeed.workers.service import Service

NUM_TOKENS = int(os.environ.get("BENCH_SPLIT_TOKENS", "32_000_000"))
BUILDERS, FILES = 2, 16
NODE_BYTES, STORE_BYTES = 512 << 20, 1 << 30
PASSES = 3
GOAL = 10


def write_rows(plan: Plan, folder: Path) -> int:
    """Write packs as the peer has them: a row each, in files of about equal size; return how many."""
    place = {"dp_rank": 0, "dp_size": 1, "cp_rank": 0, "cp_size": 1}
    with Loader(plan.path, **place, layout="te", token_dtype=torch.int32) as loader:
        batches = list(loader)
    folder.mkdir()
    # Each consumer gets the same number of rows: none may be left over.
    assert len(batches) % CONSUMERS == 0
    bounds = np.linspace(0, len(batches), FILES + 1).astype(int)
    for number in range(FILES):
        pq.write_table(
            table_of(batches[bounds[number] : bounds[number + 1]]),
            folder / f"{number:02}.parquet",
            compression="none",
            use_dictionary=False,
        )
    return len(batches)


def table_of(batches: list[Batch]) -> pa.Table:
    """Return one row a batch: columns that Ray Data hands out as they are, and the offsets as a list."""
    columns = {
        name: ArrowTensorArray.from_numpy(np.stack([one.tensors[name].numpy() for one in batches]))
        for name in COLUMNS
    }
    lengths = [np.diff(one.tensors["cu_seqlens"].numpy()) for one in batches]
    counts = [int((~one.tensors["padding_mask"]).sum()) for one in batches]
    return pa.table({**columns, "seq_lens": lengths, "num_tokens": counts})


def splits_of(rows: "ray.data.Dataset", cp_size: int) -> list[Any]:
    """Return what each consumer reads: a part of the rows, or all of them."""
    if cp_size == 1:
        return list(rows.streaming_split(CONSUMERS, equal=True))
    return [rows.streaming_split(1, equal=True)[0] for _ in range(CONSUMERS)]


def check(plan: Plan, service: Service, rows: "ray.data.Dataset", consumers: list[Any], cp_size: int) -> None:
    """Compare every token that comes, both ways, with the plan's."""
    refs = [one.service_sums.remote(service.ray_url, cp_size, i) for i, one in enumerate(consumers)]
    for number, found in enumerate(ray.get(refs)):
        with open_loader(plan.path, cp_size, number) as loader:
            expected = [sums({name: batch.tensors[name].numpy() for name in COLUMNS}) for batch in loader]
        assert found == expected
    packs = []
    for number in range(CONSUMERS):
        with open_loader(plan.path, 1, number) as loader:
            packs += [sums({name: batch.tensors[name].numpy() for name in COLUMNS}) for batch in loader]
    splits = zip(consumers, splits_of(rows, cp_size), strict=True)
    found = ray.get([consumer.split_sums.remote(split) for consumer, split in splits])
    for part in [found[0] + found[1]] if cp_size == 1 else found:
        assert sorted(part) == sorted(packs)


def measure(
    cases: dict[str, Callable[[], list[dict[str, float]]]],
) -> dict[str, list[list[dict[str, float]]]]:
    """Alternate between the ways; return what every consumer found in every pass. All is warm."""
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in cases}
    for _ in range(PASSES):
        for name, call in cases.items():
            found[name].append(call())
    totals = {round(sum(one["tokens"] for one in result)) for results in found.values() for result in results}
    assert len(totals) == 1, totals
    return found


def report_of(case: str, peer: str, found: dict[str, list[list[dict[str, float]]]]) -> dict[str, Any]:
    """Compare the service with one way of the peer."""
    report: dict[str, Any] = {"case": case, "peer": peer, "consumers": CONSUMERS}
    for side, name in (("service", "service"), ("split", peer)):
        rates = [statistics.mean(one["rate"] for one in result) / 1e6 for result in found[name]]
        wholes = [statistics.mean(one["whole"] for one in result) / 1e6 for result in found[name]]
        firsts = [one["first"] for result in found[name] for one in result]
        report |= {
            f"{side}_mtok_per_s": round(statistics.median(rates), 2),
            f"{side}_mtok_per_s_min": round(min(rates), 2),
            f"{side}_mtok_per_s_max": round(max(rates), 2),
            f"{side}_whole_mtok_per_s": round(statistics.median(wholes), 2),
            f"{side}_first_s": round(statistics.median(firsts), 2),
        }
    report["of_split"] = round(report["service_mtok_per_s"] / report["split_mtok_per_s"], 2)
    report["of_split_whole"] = round(report["service_whole_mtok_per_s"] / report["split_whole_mtok_per_s"], 2)
    return {**report, "goal": GOAL}


def measure_case(plan: Plan, datasets: dict[str, "ray.data.Dataset"], cp_size: int) -> list[dict[str, Any]]:
    """Check and time one way to divide the work."""
    consumers = [ray.remote(num_cpus=0)(Consumer).remote() for _ in range(CONSUMERS)]
    case = "dp" if cp_size == 1 else "cp"
    with serve(
        plan.path, cp_size=cp_size, layout="te", builders=BUILDERS, node_bytes=NODE_BYTES, name=case
    ) as service:

        def ours() -> list[dict[str, float]]:
            url = service.ray_url
            return ray.get([one.service.remote(url, cp_size, i) for i, one in enumerate(consumers)])

        def theirs(rows: "ray.data.Dataset") -> list[dict[str, float]]:
            size = plan.packs_per_step * cp_size // CONSUMERS
            splits = zip(consumers, splits_of(rows, cp_size), strict=True)
            return ray.get([consumer.split.remote(split, cp_size, size) for consumer, split in splits])

        for rows in datasets.values():
            check(plan, service, rows, consumers, cp_size)
        peers = {name: (lambda rows=rows: theirs(rows)) for name, rows in datasets.items()}
        found = measure({"service": ours, **peers})
    for consumer in consumers:
        ray.kill(consumer)
    return [report_of(case, peer, found) for peer in datasets]


def main() -> None:
    """Run all cases on a Ray of its own, with CPUs for both sides."""
    os.environ.update(WORKER_THREADS)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as temporary:
        plan = make_plan(Path(temporary), NUM_TOKENS)
        num_packs = write_rows(plan, Path(temporary, "rows"))
        ray.init(
            address="local",
            num_cpus=2 * BUILDERS,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        files = ray.data.read_parquet(str(Path(temporary, "rows")))
        built = ray.data.range(plan.num_steps).map_batches(
            Packs,
            fn_constructor_args=(plan.path,),
            batch_size=2,
            compute=ray.data.ActorPoolStrategy(size=BUILDERS),
            # Whole CPUs would leave none for its own reading, and it would wait for ever.
            num_cpus=0.25,
        )
        facts = {
            "packs": num_packs,
            "passes": PASSES,
            "pack_tokens": PACK_TOKENS,
            "builders": BUILDERS,
            "threads": 1,
            "cpus": os.cpu_count(),
            "worker_niceness": int(os.environ["RAY_worker_niceness"]),  # noqa: SIM112
            "ray": ray.__version__,
            "machine": platform.processor() or platform.machine(),
        }
        for cp_size, peers in ((CONSUMERS, {"files": files}), (1, {"files": files, "built": built})):
            for report in measure_case(plan, peers, cp_size):
                load = round(os.getloadavg()[0], 1)
                print(json.dumps({**report, **facts, "load": load}), flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()
