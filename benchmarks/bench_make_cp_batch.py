"""Time ``make_cp_batch_for_te``, one rank's THD batch out of a BSHD batch, beside taking its tokens alone.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_make_cp_batch.py
Read:  one JSON line per case, timed in turns in one run on one thread, over batches that are rotated past
       the last-level cache. ``take`` is the floor: one ``index_select`` for ids, labels, positions and
       mask with indices that are ready. ``ratio`` is median by median of wall time, ``cpu_ratio`` of the
       thread's CPU time. Beside nemo-automodel's own: benchmarks/peer_make_cp_batch.py.
"""

import json
import os
import platform
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from bench_cut_all import CP_SIZE, NUM_SETS, ROW_SLOTS, ROWS, batch_offsets, in_turns, times

from ringfeed.sharding import automodel

CP_RANK = 3
NAMES = ("input_ids", "labels", "position_ids")
CASES = {"one-stream": 1, "chunked": ROWS}

Batch = dict[str, Any]


def mesh() -> Any:
    """Return what a mesh has to be: a size and a rank."""
    return SimpleNamespace(size=lambda: CP_SIZE, get_local_rank=lambda: CP_RANK, get_group=lambda: None)


def batches() -> list[Batch]:
    """Return int64 batches of packed rows, every slot a few tokens longer than its sequence."""
    rng = np.random.default_rng(1)
    slots = np.diff(batch_offsets()).reshape(ROWS, -1).astype(np.int64)
    # The last slot of a row is its tail: one token, then padding.
    real = np.maximum(1, slots - rng.integers(0, 2 * CP_SIZE, slots.shape))
    made = []
    for _ in range(NUM_SETS):
        tokens = rng.integers(0, 50_000, (len(NAMES), ROWS, ROW_SLOTS))
        made.append(
            {
                **{name: torch.from_numpy(column) for name, column in zip(NAMES, tokens, strict=True)},
                "seq_lens": torch.from_numpy(real.copy()),
                "seq_lens_padded": torch.from_numpy(slots.copy()),
            }
        )
    return made


def facts() -> dict[str, Any]:
    """Return the conditions of every line."""
    offsets = batch_offsets()
    return {
        "tokens": int(offsets[-1]),
        "slots": len(offsets) - 1,
        "cp_size": CP_SIZE,
        "columns": "3 x int64, 1 x bool",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }


def main() -> None:
    """Check one batch against its index map, then time both cases."""
    torch.set_num_threads(1)
    sources = batches()
    _, ready = automodel.make_cp_batch_for_te(mesh(), sources[0], return_local_indices=True)
    flat = [{name: source[name].reshape(-1) for name in NAMES} for source in sources]
    mask = torch.zeros(ROWS * ROW_SLOTS, dtype=torch.bool)
    for case, num_chunks in CASES.items():
        made = automodel.make_cp_batch_for_te(mesh(), sources[0], num_chunks=num_chunks)
        # Right before fast. Slots are whole rows' slots, so chunks hold the same tokens in the same order.
        assert all(torch.equal(made[name].reshape(-1), flat[0][name][ready]) for name in NAMES)

        def make(i: int, num_chunks: int = num_chunks) -> None:
            automodel.make_cp_batch_for_te(mesh(), sources[i], num_chunks=num_chunks)

        def take(i: int) -> None:
            for name in NAMES:
                flat[i][name].index_select(0, ready)
            mask.index_select(0, ready)

        found = in_turns({"take": take, "make_cp_batch": make})
        timed = {
            f"{name}_{key}": round(value, 1) for name, one in found.items() for key, value in one.items()
        }
        print(
            json.dumps(
                {"case": f"make_cp_batch/{case}", **times(found, "make_cp_batch", "take"), **timed, **facts()}
            )
        )


if __name__ == "__main__":
    main()
