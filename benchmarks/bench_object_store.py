"""Compare blocks through Ray's object store with the least that they could cost.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_object_store.py
Read:  one JSON line per case. ``object_store``: blocks of 8 MB from an actor, through ``ObjectStoreFetcher``,
       each copied into one torch tensor, beside ``ray.get`` of the same actor's batches and the same copy:
       medians of both rates over passes that alternate, and one over the other; the goal is 0.85. As many
       blocks are under way both ways. Blocks hold int32 ids and labels, as a rank with
       ``token_dtype=torch.int32`` keeps them.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pyarrow as pa
import ray
import torch
from bench_flight import BLOCK_BYTES, BLOCKS, PASSES, REQUEST, Prebuilt

from ringfeed.pipeline.step_block import TOKEN_COLUMNS
from ringfeed.workers.builder_pool import BuilderPool
from ringfeed.workers.object_store import ObjectStoreFetcher
from ringfeed.workers.ray_builders import RayBuilderCalls
from ringfeed.workers.ray_session import ray_session
from ringfeed.workers.roster import BuilderMember, Roster

AHEAD = 4
STORE_BYTES = 256 << 20


class Builder:
    """Answers as a builder does, with a block that is ready."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        """Keep the block."""
        self._batch = batch

    def block(self, request: bytes) -> pa.RecordBatch:  # noqa: ARG002
        """Return it."""
        return self._batch


def copy_tokens(rows: pa.RecordBatch, staging: Any) -> None:
    """Copy ids and labels, as a loader does."""
    for row, column in enumerate(TOKEN_COLUMNS):
        np.copyto(staging[row], rows.column(column).values.to_numpy())


def bare_seconds(actor: Any, staging: Any) -> float:
    """Return the time of all blocks by ``ray.get`` and a copy."""
    request = REQUEST.to_json()
    waiting = deque(actor.block.remote(request) for _ in range(AHEAD))
    copy_tokens(ray.get(waiting.popleft()), staging)
    began = time.perf_counter()
    for number in range(1, BLOCKS + 1):
        if number <= BLOCKS + 1 - AHEAD:
            waiting.append(actor.block.remote(request))
        copy_tokens(ray.get(waiting.popleft()), staging)
    return time.perf_counter() - began


def fetcher_seconds(pool: BuilderPool, staging: Any) -> float:
    """Return the time of as many blocks through a fetcher, and a copy."""
    fetcher = ObjectStoreFetcher(pool, num_threads=AHEAD)
    waiting = deque(fetcher.fetch(REQUEST) for _ in range(AHEAD))
    copy_tokens(waiting.popleft().result().rows, staging)
    began = time.perf_counter()
    for number in range(1, BLOCKS + 1):
        if number <= BLOCKS + 1 - AHEAD:
            waiting.append(fetcher.fetch(REQUEST))
        copy_tokens(waiting.popleft().result().rows, staging)
    return time.perf_counter() - began


def measure() -> dict[str, Any]:
    """Alternate between the two ways."""
    supply = Prebuilt()
    batch = supply.made.to_batch()
    actor: Any = ray.remote(num_cpus=1)(Builder).remote(batch)
    member = BuilderMember(name="builder", node_id="", actor=actor)
    roster = Roster(version=1, facts_json=supply.facts().to_json(), builders=(member,))
    pool = BuilderPool(lambda: roster, RayBuilderCalls())
    staging = torch.full((2, BLOCK_BYTES // 8), -1, dtype=torch.int32).numpy()
    for seconds in (lambda: bare_seconds(actor, staging), lambda: fetcher_seconds(pool, staging)):
        # Checked, and not counted: the first time anything is mapped.
        seconds()
        for row, column in zip(staging, TOKEN_COLUMNS, strict=True):
            assert np.array_equal(row, supply.made.rows.column(column).values.to_numpy())
        staging[:] = -1
    pairs = [(bare_seconds(actor, staging), fetcher_seconds(pool, staging)) for _ in range(PASSES)]
    rates = [[BLOCKS * BLOCK_BYTES / seconds / 1e9 for seconds in side] for side in zip(*pairs, strict=True)]
    return {
        "case": "object_store",
        "block_mb": BLOCK_BYTES >> 20,
        "ray_get_gb_per_s": round(statistics.median(rates[0]), 3),
        "fetcher_gb_per_s": round(statistics.median(rates[1]), 3),
        "of_ray_get": round(statistics.median(rates[1]) / statistics.median(rates[0]), 3),
        "goal": 0.85,
    }


def main() -> None:
    """Run the case on a Ray of its own."""
    with ray_session(num_cpus=2, object_store_bytes=STORE_BYTES):
        report = measure()
    facts = {
        "threads": 1,
        "ray": ray.__version__,
        "pyarrow": pa.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps({**report, **facts}), flush=True)


if __name__ == "__main__":
    main()
