"""Time MagiAttention's dispatch, computed by ringfeed, at the sizes a trainer uses.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_magi_dispatch.py
Read:  one JSON line per case: documents end to end, causal, cp 8, from offsets to every rank's index map.
       ``median_us`` is processor time, over 50 runs after 3 unmeasured ones, one thread; ``of_sort`` is the
       median as a multiple of sorting as many numbers as there are tokens, in the same run. Targets, for
       every algorithm: 131,072 tokens in 256 chunks in 1 ms, 1,048,576 tokens in 2,048 chunks in 10 ms;
       MagiAttention's own Python takes 9 and 81 ms (min_heap). ``backtracing_pruning`` is for a few dozen
       chunks and refuses so many.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt

from ringfeed.sharding.index_map import merge
from ringfeed.sharding.magi.layout import MagiLayout

CP_SIZE = 8
CHUNK_SIZE = 512
# (T, N)
SIZES = (
    (131_072, 1),
    (131_072, 64),
    (131_072, 1_024),
    (1_048_576, 1),
    (1_048_576, 64),
    (1_048_576, 8_192),
)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "min_heap": {},
    "sequential_select": {},
    "topp_heap": {"top_p": 0.5},
    "batch_topp_heap": {"top_p": 0.5, "num_of_select_chunk": 2},
    "sorted_sequential_select": {},
}


def uneven_offsets(num_tokens: int, num_documents: int) -> npt.NDArray[np.int32]:
    """Return offsets int32 [N + 1] with borders drawn evenly among the tokens."""
    drawn = np.random.default_rng(0).choice(num_tokens - 1, num_documents - 1, replace=False)
    return np.concatenate([[0], np.sort(drawn + 1), [num_tokens]]).astype(np.int32)


def measure(call: Callable[[], object], *, warmup: int = 3, runs: int = 50) -> dict[str, float]:
    """Return the median and the lowest processor time of ``call`` in microseconds."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(runs):
        start = time.process_time_ns()
        call()
        times.append(time.process_time_ns() - start)
    return {"median_us": statistics.median(times) / 1e3, "lowest_us": min(times) / 1e3}


def check(layout: MagiLayout, offsets: npt.NDArray[np.int32]) -> int:
    """Refuse a wrong answer, which can be arbitrarily quick; return the number of chunks."""
    num_tokens = int(offsets[-1])
    maps = layout.index_maps(offsets, cp_size=CP_SIZE)
    keys = np.arange(1, num_tokens + 1) - np.repeat(offsets[:-1], np.diff(offsets))
    held = [index_map.take(keys) for index_map in maps]
    assert np.array_equal(merge(maps, held), keys)
    partition = layout.partition(offsets, cp_size=CP_SIZE)
    assert [int(part.sum()) for part in held] == partition.rank_areas
    assert partition.pad_size == 0
    return partition.grid.num_chunks


def main() -> None:
    """Print one line per algorithm and size."""
    for algorithm, options in ALGORITHMS.items():
        layout = MagiLayout(chunk_size=CHUNK_SIZE, algorithm=algorithm, **options)
        for num_tokens, num_documents in SIZES:
            offsets = uneven_offsets(num_tokens, num_documents)
            num_chunks = check(layout, offsets)
            numbers = np.random.default_rng(1).integers(0, 1 << 40, num_tokens)
            found = measure(lambda: layout.index_maps(offsets, cp_size=CP_SIZE))  # noqa: B023
            sort = measure(lambda: np.sort(numbers), runs=20)  # noqa: B023
            result = {
                "case": algorithm,
                "tokens": num_tokens,
                "documents": num_documents,
                "chunks": num_chunks,
                **found,
                "of_sort": round(found["median_us"] / sort["median_us"], 3),
                "cp_size": CP_SIZE,
                "threads": 1,
                "numpy": np.__version__,
                "machine": platform.processor() or platform.machine(),
            }
            print(json.dumps(result))


if __name__ == "__main__":
    main()
