"""Time the way from a BSHD batch to all ranks' views beside nemo-automodel's own conversion.

Run:   OMP_NUM_THREADS=1 benchmarks/.venv/bin/python benchmarks/peer_cut_all.py
Read:  one JSON line; ``ratio`` and ``cpu_ratio`` say how many times as long the peer takes. Its side is
       ``process_input_for_thd`` once, then per rank what its ``_shard_thd_chunk_for_te`` does: one
       index_select per column and int64 copies. The indices, which it gets from a TransformerEngine
       kernel, are made beforehand and not counted: in its favour. ``cut_all`` is given the same rows
       and computes its index maps in every call.
"""

import json
import os
import platform
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from bench_cut_all import CP_SIZE, NAMES, NUM_SETS, ROW_SLOTS, ROWS, batch_offsets, in_turns, times

from ringfeed.pipeline.views import cut_all
from ringfeed.sharding.layouts import make_layout

try:
    import torch
    from nemo_automodel.components.distributed.thd_utils import process_input_for_thd
except ImportError as error:
    raise SystemExit(
        f"skipped: {error.name} is not installed; `make bench-venv` installs the peers"
    ) from None


def peer_views(batch: dict[str, torch.Tensor], indices: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return what nemo-automodel gives every rank."""
    thd = process_input_for_thd(dict(batch))
    names = (*NAMES, "padding_mask")
    views = []
    for local in indices:
        part = {name: thd[name].index_select(0, local) for name in names}
        views.append({name: part[name].to(torch.int64).contiguous() for name in NAMES})
    return views


def peer_batches(
    offsets: np.ndarray[Any, Any], sources: list[dict[str, Any]]
) -> list[dict[str, torch.Tensor]]:
    """Return the same rows as the peer wants them: int64 [B, S] and its length tables."""
    slots = np.diff(offsets).reshape(ROWS, -1)
    lengths = {"seq_lens": torch.from_numpy(slots.copy()), "seq_lens_padded": torch.from_numpy(slots.copy())}
    return [
        {
            **{
                name: torch.from_numpy(source[name].reshape(ROWS, ROW_SLOTS).astype(np.int64))
                for name in NAMES
            },
            **lengths,
        }
        for source in sources
    ]


def main() -> None:
    """Check that both give the same tokens, then time them in turns."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    offsets, layout = batch_offsets(), make_layout("te")
    sources = [
        {name: rng.integers(0, 50_000, int(offsets[-1])).astype(np.int32) for name in NAMES}
        for _ in range(NUM_SETS)
    ]
    batches = peer_batches(offsets, sources)
    indices = [index_map.positions for index_map in layout.index_maps(offsets, cp_size=CP_SIZE)]
    outs = [cut_all(source, offsets, layout=layout, cp_size=CP_SIZE) for source in sources]
    for ours, theirs in zip(outs[0], peer_views(batches[0], indices), strict=True):
        assert all(np.array_equal(ours[name], theirs[name].numpy()) for name in NAMES)

    def cut(i: int) -> None:
        cut_all(sources[i], offsets, layout=layout, cp_size=CP_SIZE, out=outs[i])

    found = in_turns({"cut_all": cut, "nemo_automodel": lambda i: peer_views(batches[i], indices)})
    report = {
        "case": "bshd-to-views/te",
        **times(found, "nemo_automodel", "cut_all"),
        **{f"{name}_{key}": round(value, 1) for name, one in found.items() for key, value in one.items()},
        "tokens": int(offsets[-1]),
        "slots": len(offsets) - 1,
        "cp_size": CP_SIZE,
        "threads": 1,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
