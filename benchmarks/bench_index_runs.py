"""Time the layouts' runs, and ``take``, at the sizes a trainer uses. One JSON line per case.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_index_runs.py
Read:  median of the processor time of 200 runs after 3 unmeasured ones, one thread. Compare medians
       of one machine only; ``lowest_us`` is what a quiet machine would show. Targets: one rank's
       runs of 1,024 documents in 50 us, all 8 ranks' of 400 slots well under 100 us (layout te).
"""

import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from ringfeed.sharding.index_map import IndexMap, merge
from ringfeed.sharding.layouts import make_layout

CP_SIZE = 8
MULTIPLE = 2 * CP_SIZE
LAYOUTS = ("te", "head_tail", "contiguous", "whole_document", "ptrr", "magi")
# (T, N): one pack of 131k tokens; and eight packs of 32k with some fifty documents each.
SIZES = ((131_072, 1), (131_072, 64), (131_072, 1_024), (262_144, 400))


def measure(call: Callable[[], object], *, warmup: int = 3, runs: int = 200) -> dict[str, float]:
    """Return the median and the lowest processor time of ``call`` in microseconds."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(runs):
        start = time.process_time_ns()
        call()
        times.append(time.process_time_ns() - start)
    return {"median_us": statistics.median(times) / 1e3, "lowest_us": min(times) / 1e3}


def uneven_offsets(num_tokens: int, num_slots: int) -> npt.NDArray[np.int32]:
    """Return slot offsets int32 [N + 1] with borders drawn evenly among the multiples."""
    drawn = np.random.default_rng(0).choice(num_tokens // MULTIPLE - 1, num_slots - 1, replace=False)
    return np.concatenate([[0], np.sort(drawn + 1) * MULTIPLE, [num_tokens]]).astype(np.int32)


def report(case: str, call: Callable[[], object], **facts: int) -> None:
    """Print one case with its conditions."""
    machine = platform.processor() or platform.machine()
    print(json.dumps({"case": case, **measure(call), **facts, "cp_size": CP_SIZE, "machine": machine}))


def bench_layouts() -> None:
    """All ranks' runs at once, and one rank's alone."""
    for name in LAYOUTS:
        layout = make_layout(name)
        for num_tokens, num_slots in SIZES:
            offsets = uneven_offsets(num_tokens, num_slots)
            maps = layout.index_maps(offsets, cp_size=CP_SIZE)
            # Right before fast: a wrong map can be arbitrarily quick.
            chunk = np.arange(num_tokens)
            assert np.array_equal(merge(maps, [index_map.take(chunk) for index_map in maps]), chunk)
            facts = {"tokens": num_tokens, "slots": num_slots}
            report(f"{name}/all-ranks", partial(layout.index_maps, offsets, cp_size=CP_SIZE), **facts)
            report(
                f"{name}/one-rank", partial(layout.index_map, offsets, cp_size=CP_SIZE, cp_rank=3), **facts
            )


def bench_take() -> None:
    """Where copying run by run beats one gather: ``index_map._SHORTEST_RUN_TO_COPY``."""
    num_tokens = 131_072
    chunk = np.arange(num_tokens, dtype=np.int32)
    for width in (16, 64, 256, 1_024, 4_096):
        starts = np.arange(0, num_tokens, 2 * width)
        index_map = IndexMap(np.stack([starts, np.full_like(starts, width)], axis=1), num_tokens)
        positions = index_map.positions.numpy()
        assert np.array_equal(index_map.take(chunk), chunk[positions])
        report(f"take/runs-of-{width}", partial(index_map.take, chunk), tokens=len(index_map))


def main() -> None:
    """Run every case."""
    bench_layouts()
    bench_take()


if __name__ == "__main__":
    main()
