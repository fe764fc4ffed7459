"""Time planning: the best-fit kernel alone, whole plans, and the size of a plan of 15T tokens.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_planning.py
Read:  one JSON line per case; times are CPU seconds of one thread, medians with their range.
       ``kernel``: lengths to packs, beside a copy and an argsort of the same lengths in the same run.
       ``plan``: ``run_plan`` as a user calls it: draw, pack, costs, chain, compressed blocks, report; with
       the largest resident memory of its process. ``format``: bytes of blocks and snapshots from the
       middle of a shuffled corpus of 15T tokens, and what all of it would take.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.best_fit import best_fit_decreasing, descending_order
from ringfeed.pipeline.planner.cursors import LaneCursor, SourceCursor, StreamCursor
from ringfeed.pipeline.planner.documents import LengthsTable
from ringfeed.pipeline.planner.options import Balance, BlockLimits, PlanOptions
from ringfeed.pipeline.planner.rows import window_rows
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.planner.snapshots import Snapshot
from ringfeed.pipeline.planner.windows import WindowStart, plan_windows
from ringfeed.pipeline.planner.writer import PlanWriter, WriteRule
from ringfeed.pipeline.recipe import SourceRef

PACK_TOKENS = 131_072
RUNS = 9
TOKENS_OF_A_LARGE_CORPUS = 15e12
MACHINE = {
    "threads": 1,
    "numpy": np.__version__,
    "machine": platform.processor() or platform.machine(),
    "cpus": os.cpu_count(),
}


def log_normal(num_documents: int, seed: int = 0) -> NDArray[np.int64]:
    """Return web-like lengths: median 600, sigma 1.5, 1 to a pack."""
    lengths = np.random.default_rng(seed).lognormal(np.log(600), 1.5, num_documents)
    return np.clip(lengths, 1, PACK_TOKENS).astype(np.int64)


def cpu_seconds(call: Callable[[], object]) -> list[float]:
    """Return the CPU time of each of ``RUNS`` calls after two that are not counted."""
    times = []
    for _ in range(RUNS + 2):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return times[2:]


def report(case: str, **figures: object) -> None:
    """Print one line."""
    print(json.dumps({"case": case, **figures, **MACHINE}), flush=True)


def rate(num_documents: int, times: list[float]) -> dict[str, float]:
    """Return million documents per CPU second: median, least, most."""
    rates = {"median": statistics.median(times), "min": max(times), "max": min(times)}
    return {f"mdocs_per_cpu_s_{name}": round(num_documents / t / 1e6, 2) for name, t in rates.items()}


def check_packs(
    lengths: NDArray[np.int64], packs: NDArray[np.int64], left: NDArray[np.int64], pack_tokens: int
) -> int:
    """Refuse a wrong answer; return how many packs there are beyond the lower bound."""
    assert len(packs) == len(lengths)
    used = np.zeros(len(left), np.int64)
    np.add.at(used, packs, lengths)
    assert (used > 0).all()
    assert (used <= pack_tokens).all()
    assert np.array_equal(pack_tokens - used, left)
    return len(left) - -(-int(lengths.sum()) // pack_tokens)


def bench_kernel(num_documents: int, pack_tokens: int) -> None:
    """Time lengths to packs, in memory."""
    lengths = np.minimum(log_normal(num_documents), pack_tokens)
    packs, left, _ = best_fit_decreasing(lengths, descending_order(lengths, pack_tokens), pack_tokens)
    over = check_packs(lengths, packs, left, pack_tokens)
    copy = np.empty_like(lengths)
    times = {
        "best_fit": cpu_seconds(
            lambda: best_fit_decreasing(lengths, descending_order(lengths, pack_tokens), pack_tokens)
        ),
        "argsort": cpu_seconds(lambda: np.argsort(-lengths, kind="stable")),
        "memcpy": cpu_seconds(lambda: np.copyto(copy, lengths)),
    }
    for name, measured in times.items():
        report(
            f"kernel/{name}",
            documents=num_documents,
            pack_tokens=pack_tokens,
            **rate(num_documents, measured),
            **({"packs": len(left), "packs_over_lower_bound": over} if name == "best_fit" else {}),
        )


def plan_options(folder: Path, balance: str, *, pack_tokens: int, packs_per_step: int) -> PlanOptions:
    """Return the options of all plans here."""
    return PlanOptions(
        output=folder / balance,
        lengths=folder / "lengths.npy",
        pack_tokens=pack_tokens,
        packs_per_step=packs_per_step,
        slate_size=8,
        pad_multiple=16,
        balance=Balance(balance),
        seed=1,
    )


def bench_plan(balance: str, num_documents: int) -> None:
    """Plan once, in this process; called in one of its own, so that memory is its own too."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Kernels are compiled, or read from the cache, before the clock runs.
        np.save(folder / "lengths.npy", log_normal(1_000))
        run_plan(plan_options(folder, balance, pack_tokens=PACK_TOKENS, packs_per_step=32))
        lengths = log_normal(num_documents)
        np.save(folder / "lengths.npy", lengths)
        folder.joinpath(balance).rename(folder / "first")
        start = time.process_time()
        result = run_plan(plan_options(folder, balance, pack_tokens=PACK_TOKENS, packs_per_step=32))
        elapsed = time.process_time() - start
        check_plan(Plan.open(folder / balance), lengths)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report(
        f"plan/{balance}",
        documents=num_documents,
        mdocs_per_cpu_s=round(num_documents / elapsed / 1e6, 2),
        cpu_ms_per_step=round(elapsed / result.steps * 1e3, 2),
        peak_rss_mib=round(peak),
        fill=round(result.fill, 5),
        settled_fill=round((result.settled or {"fill": 0})["fill"], 5),
        step_imbalance=round(result.step_imbalance, 4),
        micro_batch_imbalance=round(result.micro_batch_imbalance, 4),
        displacement_mean=round(result.displacement_mean, 2),
        displacement_max=result.displacement_max,
        split=result.split,
        bytes_per_piece=round(result.bytes_per_piece, 2),
        bytes_per_step=round(result.bytes_per_step),
        mb_per_million_documents=round(result.bytes / num_documents, 2),
    )


def check_plan(plan: Plan, lengths: NDArray[np.int64]) -> None:
    """Every token once, no pack over its budget."""
    seen = np.zeros(len(lengths), np.int64)
    for block in plan.blocks():
        np.add.at(seen, block.rows.pieces.documents, block.rows.pieces.lengths)
    assert np.array_equal(seen, lengths)
    assert plan.scan_footprints(multiple=plan.pad_multiple, budget=plan.pack_tokens).num_over == 0


class LargeTable(LengthsTable):
    """A corpus of any size: the length of a document is one of a million, by a hash of its id."""

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return self.array[(mixed >> np.uint64(44)).astype(np.int64)].astype(np.int64)

    @property
    def num_documents(self) -> int:
        return int(TOKENS_OF_A_LARGE_CORPUS / self.array.mean())


def bench_format(num_windows: int) -> None:
    """Write some windows from the middle of a plan of 15T tokens."""
    source = SourceRef(kind="lengths", name="lengths", fingerprint="", num_documents=0)
    table = LargeTable(Path("lengths.npy"), log_normal(1 << 20), (source,))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = plan_options(folder, "best_fit", pack_tokens=PACK_TOKENS, packs_per_step=32)
        lane = LaneCursor(block=table.num_documents // 65_536 // 2)
        middle = StreamCursor(sources=(SourceCursor(lanes=(lane,)),))
        start = replace(WindowStart.beginning(), cursor=middle)
        snapshot = Snapshot(window=start, steps_done=0, chain="00" * 16)
        rule = WriteRule(limits=BlockLimits(), overflow=options.overflow)
        writer = PlanWriter(folder, rule=rule, number=0, snapshot=snapshot)
        num_steps = num_pieces = 0
        for window in islice(plan_windows(table, options, start=start), num_windows):
            rows, tally = window_rows(window, table, options)
            writer.add(window, rows, tally, steps_done=0)
            num_steps += window.num_steps
            num_pieces += len(rows.pieces)
        writer.finish(window)
        size = {
            kind: sum(path.stat().st_size for path in folder.glob(f"{kind}-*"))
            for kind in ("block", "snapshot")
        }
    steps = TOKENS_OF_A_LARGE_CORPUS / (options.packs_per_step * PACK_TOKENS)
    total = sum(size.values()) / num_steps * steps
    report(
        "format/15T-tokens",
        documents=table.num_documents,
        tokens_per_document=round(float(table.array.mean())),
        steps_measured=num_steps,
        bytes_per_piece=round(size["block"] / num_pieces, 2),
        bytes_per_step=round(size["block"] / num_steps),
        snapshot_share=round(size["snapshot"] / size["block"], 4),
        steps=round(steps),
        blocks=round(steps / num_steps * writer.num_blocks),
        gigabytes=round(total / 1e9, 1),
    )


def main() -> None:
    """Run every case, whole plans in processes of their own."""
    if len(sys.argv) == 3:
        bench_plan(sys.argv[1], int(sys.argv[2]))
        return
    bench_kernel(1_000_000, PACK_TOKENS)
    bench_kernel(200_000, 8_192)
    for balance in ("work", "best_fit", "in_order", "concat"):
        subprocess.run([sys.executable, __file__, balance, "1000000"], check=True)
    for balance in ("work", "best_fit"):
        subprocess.run([sys.executable, __file__, balance, "10000000"], check=True)
    bench_format(60)


if __name__ == "__main__":
    main()
