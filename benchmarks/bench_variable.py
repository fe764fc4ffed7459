"""How even and how full are steps of variable packs, beside fixed ones and a WLB-style planner?

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_variable.py
Read:  one JSON line per corpus and planner, medians of three seeds, and one table at the end. dp 8, 256 steps
       of 4.2M tokens (32 packs of 131,072 on average, or 8 of four times that), documents padded to 1, costs
       of a 7B-like model. ``fill`` is over the slots that packs have; ``room`` is the longest pack, for
       memory to hold, in packs of 131,072. The last window + 1 steps are left out: no look-ahead is left.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from balance_corpora import LONGEST, lengths_of
from balance_wlb import plan_wlb_style
from numpy.typing import NDArray

from ringfeed.pipeline.planner.balance import BalanceMeter
from ringfeed.pipeline.planner.cost import DEFAULT_COST_MODEL
from ringfeed.pipeline.planner.documents import LengthsTable
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.packing import cut_slates
from ringfeed.pipeline.planner.rows import window_rows
from ringfeed.pipeline.planner.windows import WindowStart, plan_windows
from ringfeed.pipeline.recipe import SourceRef

Int64 = NDArray[np.int64]
Figures = dict[str, float]

PACK_TOKENS = LONGEST
DP, PACKS_PER_STEP, STEPS = 8, 32, 256
SEEDS = (0, 1, 2)
CASES = (
    ("log-normal, median 600", 16),
    ("log-normal, median 600", 32),
    ("20 % of tokens in 32k to 128k", 32),
    ("20 % of documents 32k to 128k", 8),
    ("uniform 128 to 128k", 8),
)
VARIABLE = {"balance": "work", "pack_shape": "variable", "piece_tokens": PACK_TOKENS}
LONGEST_COST = int(DEFAULT_COST_MODEL.piece_costs(np.array([LONGEST]))[0])
PLANNERS: dict[str, dict[str, Any]] = {
    "next fit": {"balance": "in_order"},
    "best fit": {"balance": "best_fit"},
    "work, fixed": {"balance": "work"},
    "work, variable, cap 1.02": {**VARIABLE, "room": 1.02},
    "work, variable, cap 8/7": {**VARIABLE, "room": 8 / 7},
    "work, variable, cap 2 in eighths": {**VARIABLE, "room": 2, "length_buckets": "eighths"},
    "work, variable, cap 2 in powers": {**VARIABLE, "room": 2, "length_buckets": "powers_of_two"},
    "work, variable, 8 packs, a budget": {**VARIABLE, "room": 4, "share": 4, "work_budget": LONGEST_COST},
}
"""Options; ``room``: the longest pack, and ``share``: the mean one, in packs of ``PACK_TOKENS``."""


def plan_ours(lengths: Int64, window: int, asked: dict[str, Any]) -> Figures:
    """Plan with ringfeed, in memory."""
    rest = dict(asked)
    room, share = rest.pop("room", 1), rest.pop("share", 1)
    sizes = {"pack_tokens": int(PACK_TOKENS * room), "packs_per_step": PACKS_PER_STEP // share}
    if room != 1:
        sizes["mean_tokens"] = PACK_TOKENS * share
    options = PlanOptions(
        output=Path("plan"),
        lengths=Path("lengths.npy"),
        slate_size=DP,
        pad_multiple=1,
        window=window,
        **sizes,
        **rest,
    )
    source = SourceRef(kind="lengths", name="lengths", fingerprint="", num_documents=len(lengths))
    table = LengthsTable(Path("lengths.npy"), lengths, (source,))
    meter = BalanceMeter(packs_per_step=options.packs_per_step, slate_size=DP, dp_size=DP)
    tallies = []
    start = time.process_time()
    for window_planned in plan_windows(table, options, start=WindowStart.beginning()):
        rows, tally = window_rows(window_planned, table, options)
        tallies.append(tally)
        if len(rows.steps):
            meter.add(rows.steps, slates=rows.slates, planned=rows.costs, costs=None)
    elapsed = time.process_time() - start
    sums = {name: np.concatenate([getattr(tally, name) for tally in tallies]) for name in SUMS}
    settled = len(sums["tokens"]) - window - 1
    assert int(sums["tokens"].sum()) == int(lengths.sum())
    return {
        **balance_of(meter, settled),
        "fill": float(sums["tokens"][:settled].sum() / sums["room"][:settled].sum()),
        "displacement_mean": float(sums["displacement"].sum() / sums["pieces"].sum()),
        "displacement_max": float(sums["displacement_max"].max()),
        "room": sizes["pack_tokens"] / PACK_TOKENS,
        "cpu_ms_per_step": elapsed / len(sums["tokens"]) * 1e3,
    }


SUMS = ("tokens", "room", "pieces", "displacement", "displacement_max")


def plan_peer(lengths: Int64, window: int) -> Figures:
    """Plan in the style of WLB-LLM: a cap of 1.02 packs, queues from a quarter, half and most of one on."""
    costs = DEFAULT_COST_MODEL.piece_costs(lengths)
    start = time.process_time()
    plan = plan_wlb_style(
        lengths,
        costs,
        pack_tokens=PACK_TOKENS,
        packs_per_step=PACKS_PER_STEP,
        cap=1.02,
        thresholds=[PACK_TOKENS // 4, PACK_TOKENS // 2, PACK_TOKENS * 3 // 4],
    )
    elapsed = time.process_time() - start
    placed = plan.steps >= 0
    totals = np.zeros(plan.num_steps * PACKS_PER_STEP, np.int64)
    np.add.at(totals, plan.steps[placed] * PACKS_PER_STEP + plan.packs[placed], costs[placed])
    steps = np.repeat(np.arange(plan.num_steps), PACKS_PER_STEP)
    slates = cut_slates(steps, np.arange(len(totals)) % PACKS_PER_STEP, totals, slate_size=DP)
    meter = BalanceMeter(packs_per_step=PACKS_PER_STEP, slate_size=DP, dp_size=DP)
    meter.add(steps, slates=slates, planned=totals, costs=None)
    late = plan.steps[placed] - plan.drawn[placed]
    return {
        **balance_of(meter, plan.num_steps - window - 1),
        "fill": 1.0,
        "displacement_mean": float(late.mean()),
        "displacement_max": float(late.max()),
        "room": 1.02,
        "cpu_ms_per_step": elapsed / plan.num_steps * 1e3,
    }


def balance_of(meter: BalanceMeter, num_steps: int) -> Figures:
    """Return how even the first steps are."""
    found = meter.balance(num_steps=num_steps)
    return {
        "step_imbalance": found.step_imbalance,
        "step_imbalance_p99": found.step_imbalance_p99,
        "micro_batch_imbalance": found.micro_batch_imbalance,
    }


def measure(corpus: str, window: int, plan: Callable[[Int64, int], Figures]) -> Figures:
    """Return the median of each figure over the seeds; of displacements the largest."""
    # A window more than is measured.
    tokens = (STEPS + window + 1) * PACKS_PER_STEP * PACK_TOKENS
    runs = [plan(lengths_of(corpus, tokens=tokens, seed=seed), window) for seed in SEEDS]
    return {
        name: max(r[name] for r in runs)
        if name == "displacement_max"
        else statistics.median(r[name] for r in runs)
        for name in runs[0]
    }


def main() -> None:
    """Measure every corpus with every planner."""
    machine = {"threads": 1, "numpy": np.__version__, "machine": platform.processor() or platform.machine()}
    machine |= {"cpus": str(os.cpu_count()), "date": time.strftime("%Y-%m-%d")}
    table = ["| corpus | planner | fill | step | p99 | micro-batch | displacement | room | CPU ms a step |"]
    table.append("|---|---|---|---|---|---|---|---|---|")
    for corpus, window in CASES:
        planners = {"WLB-style, cap 1.02": plan_peer}
        for name, asked in PLANNERS.items():
            planners[name] = lambda lengths, steps, asked=asked: plan_ours(lengths, steps, asked)
        for name, plan in planners.items():
            plan(lengths_of(corpus, tokens=4 * window * PACKS_PER_STEP * PACK_TOKENS, seed=9), window)
            found = measure(corpus, window, plan)
            rounded = {key: round(value, 5) for key, value in found.items()}
            print(
                json.dumps({"case": f"{corpus}; W {window}", "planner": name, **rounded, **machine}),
                flush=True,
            )
            table.append(row(f"{corpus}; W {window}", name, found))
    print("\n".join(table))


def row(case: str, planner: str, found: Figures) -> str:
    """Return one line of the table."""
    cells = [
        f"{found['fill']:.2%}",
        f"{found['step_imbalance']:.4f}",
        f"{found['step_imbalance_p99']:.3f}",
        f"{found['micro_batch_imbalance']:.4f}",
        f"{found['displacement_mean']:.2f} / {found['displacement_max']:.0f}",
        f"{found['room']:.2f}",
        f"{found['cpu_ms_per_step']:.1f}",
    ]
    return f"| {case} | {planner} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
