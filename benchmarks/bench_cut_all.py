"""Time ``views.cut_all``, all ranks of a large batch, beside a plain copy of the same bytes.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_cut_all.py
Read:  one JSON line per case. The two are timed in turns in one run, on one thread, over buffers that
       are rotated past the last-level cache. ``ratio`` is median by median of wall time, ``cpu_ratio``
       of the thread's CPU time: on a machine with other work the longer call is interrupted more often,
       and only the second says what the code costs. Index maps are computed in every call. Target: layout
       te at most 4 times the copy.
       Beside nemo-automodel's conversion: benchmarks/peer_cut_all.py.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt

from ringfeed.pipeline.views import cut_all
from ringfeed.sharding.layouts import make_layout

ROWS, ROW_SLOTS, DOCUMENTS, CP_SIZE = 8, 32_768, 50, 8
NAMES = ("input_ids", "labels", "position_ids")
# 30 sets of 3 MB in and 3 MB out: several times any last-level cache that shares cores with others.
NUM_SETS = 30
ROUNDS = 150

Columns = dict[str, npt.NDArray[np.int32]]


def row_offsets(rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return slot offsets of one row: log-normal documents padded to 2 * cp, one tail slot."""
    multiple = 2 * CP_SIZE
    weights = rng.lognormal(0.0, 1.0, DOCUMENTS)
    lengths = np.maximum(1, weights / weights.sum() * (ROW_SLOTS - DOCUMENTS * multiple)).astype(np.int64)
    ends = np.cumsum(-(-lengths // multiple) * multiple)
    return np.concatenate([[0], ends, [ROW_SLOTS]])


def batch_offsets() -> npt.NDArray[np.int32]:
    """Return the slot offsets of all rows end to end."""
    rng = np.random.default_rng(0)
    rows = [row_offsets(rng)[1:] + row * ROW_SLOTS for row in range(ROWS)]
    return np.concatenate([[0], *rows]).astype(np.int32)


def in_turns(calls: dict[str, Callable[[int], object]]) -> dict[str, dict[str, float]]:
    """Time every call once a round, so that a busy moment hits all of them; microseconds."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(ROUNDS + NUM_SETS):
        for name, call in calls.items():
            start, cpu_start = time.perf_counter_ns(), time.thread_time_ns()
            call(round_number % NUM_SETS)
            cpu_time, wall_time = time.thread_time_ns() - cpu_start, time.perf_counter_ns() - start
            if round_number >= NUM_SETS:
                wall[name].append(wall_time / 1e3)
                cpu[name].append(cpu_time / 1e3)
    return {
        name: {
            "median_us": statistics.median(wall[name]),
            "lowest_us": min(wall[name]),
            "highest_us": max(wall[name]),
            "cpu_median_us": statistics.median(cpu[name]),
        }
        for name in calls
    }


def times(found: dict[str, dict[str, float]], one: str, other: str) -> dict[str, float]:
    """Return how many times as long ``one`` takes as ``other``, by wall and by CPU time."""
    return {
        "ratio": round(found[one]["median_us"] / found[other]["median_us"], 2),
        "cpu_ratio": round(found[one]["cpu_median_us"] / found[other]["cpu_median_us"], 2),
    }


def bench(layout_name: str, offsets: npt.NDArray[np.int32], sources: list[Columns]) -> None:
    """Check one layout's cut against its index maps, then time it."""
    layout = make_layout(layout_name)
    maps = layout.index_maps(offsets, cp_size=CP_SIZE)
    outs = [cut_all(columns, offsets, layout=layout, cp_size=CP_SIZE) for columns in sources]
    # Right before fast: a wrong cut can be arbitrarily quick.
    for columns, out in zip(sources, outs, strict=True):
        for index_map, part in zip(maps, out, strict=True):
            assert all(np.array_equal(part[name], index_map.take(columns[name])) for name in NAMES)
    copies = [{name: column.copy() for name, column in columns.items()} for columns in sources]

    def cut(i: int) -> None:
        cut_all(sources[i], offsets, layout=layout, cp_size=CP_SIZE, out=outs[i])

    def copy(i: int) -> None:
        for name in NAMES:
            np.copyto(copies[i][name], sources[i][name])

    found = in_turns({"memcpy": copy, "cut_all": cut})
    report = {
        "case": f"cut_all/{layout_name}",
        **times(found, "cut_all", "memcpy"),
        **{f"{name}_{key}": round(value, 1) for name, one in found.items() for key, value in one.items()},
        "runs": sum(len(index_map.runs) for index_map in maps),
        "tokens": int(offsets[-1]),
        "slots": len(offsets) - 1,
        "cp_size": CP_SIZE,
        "columns": "3 x int32",
        "threads": 1,
        "numpy": np.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(report))


def main() -> None:
    """Run every layout on the same batch."""
    rng = np.random.default_rng(1)
    offsets = batch_offsets()
    total = int(offsets[-1])
    sources = [
        {name: rng.integers(0, 50_000, total).astype(np.int32) for name in NAMES} for _ in range(NUM_SETS)
    ]
    for layout_name in ("te", "contiguous", "head_tail", "whole_document"):
        bench(layout_name, offsets, sources)


if __name__ == "__main__":
    main()
