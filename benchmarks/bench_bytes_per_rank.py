"""Count what one of eight cp ranks reads, copies and holds, and what a loader's memory depends on.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_bytes_per_rank.py
Read:  one JSON line per case. The step's bytes are input_ids, labels and position_ids as int32, for
       all slots. ``files``: everything the worst rank read (views, indexes, tables, manifest) over the
       step's bytes; at most 1.02 / 8. ``plan``: bytes that a rank copied into its views over the step's
       bytes, and all it holds of a step (with padding mask, offsets and document ids) over the step's bytes
       with its mask; at most 1.05 / 8. ``memory``: heap peak and anonymous memory of a process that loads
       the same number of batches from a corpus and from one four times as large. Shards of both have as
       many folders: what grows with those is the manifest, and `ringfeed shard` makes at most some 4,096.
"""

import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_source import PlanSource
from ringfeed.pipeline.planner.options import Balance, BlockLimits, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.shard_writer import (
    ShardTask,
    ShardWriter,
    num_folders,
    shards_made_from,
    shards_manifest,
)
from ringfeed.pipeline.staging import StagedFolder
from ringfeed.pipeline.store import SHARDS_FORMAT, FileStore
from ringfeed.sharding.layouts import make_layout

CP_SIZE, PACK_TOKENS, PACKS_PER_STEP = 8, 32_768, 4
STEP_BYTES_PER_SLOT = 12
FOLDERS = 6
MEMORY_BATCHES = 25


def make_plan(folder: Path, num_tokens: int) -> Plan:
    """Return a plan over log-normal documents, 1,200 tokens in the mean."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.6, 1.0, num_tokens // 1_200), 16, 200_000).astype(int)
    documents = (rng.integers(0, 50_000, length, dtype=np.int32) for length in lengths)
    write_corpus(folder / "corpus", documents, name="lognormal")
    run_plan(
        PlanOptions(
            output=folder / "plan",
            corpora=[folder / "corpus"],
            pack_tokens=PACK_TOKENS,
            packs_per_step=PACKS_PER_STEP,
            max_cp=CP_SIZE,
            balance=Balance.BEST_FIT,
            seed=0,
            # A plan of any size is cut into blocks; small ones here, so that both sizes have full ones.
            block_limits=BlockLimits(steps=8),
        )
    )
    return Plan.open(folder / "plan")


def make_task(plan: Plan, folder: Path) -> ShardTask:
    """Return what cuts ``plan`` for layout te."""
    corpora = plan.open_corpora()
    spec = open_spec(plan, OpenOptions(layout=make_layout("te"), cp_size=CP_SIZE), pad_id=corpora.pad_id)
    corpora.close()
    return ShardTask(plan=plan.path, folder=folder, spec=spec, steps_per_folder=-(-plan.num_steps // FOLDERS))


def make_shards(plan: Plan, folder: Path) -> Path:
    """Return shards of ``plan``, written by this process."""
    output = folder / "shards"
    task = make_task(plan, folder / "shards.partial")
    made_from = shards_made_from(plan, task)
    with (
        StagedFolder.open(output, format=SHARDS_FORMAT, made_from=made_from) as staged,
        ShardWriter(task) as writer,
    ):
        folders = range(num_folders(plan, steps_per_folder=task.steps_per_folder))
        entries = [entry for index in folders for entry in writer.write_steps(index)]
        staged.publish(shards_manifest(plan, task, entries))
    return output


def count_files(plan: Plan, shards: Path) -> dict[str, Any]:
    """Read all views of every rank and count."""
    step_bytes = plan.num_packs * PACK_TOKENS * STEP_BYTES_PER_SLOT
    read = []
    for rank in range(CP_SIZE):
        store = FileStore.open(shards)
        for step in range(store.num_steps):
            for pack in range(store.step_facts(step).num_packs):
                assert len(store.pack_view(step, pack, cp_rank=rank).view.input_ids) * CP_SIZE == PACK_TOKENS
        read.append(store.bytes_read + (shards / "manifest.json").stat().st_size)
        store.close()
    return {"case": "files", "of_an_eighth": round(max(read) / step_bytes * CP_SIZE, 4), "limit": 1.02}


def count_plan(plan: Plan, folder: Path) -> dict[str, Any]:
    """Make all views of every rank from the plan and count; the worst step of the worst rank is reported."""
    corpora = plan.open_corpora()
    spec = make_task(plan, folder).spec
    copied, held, real = 0.0, 0.0, 0
    for rank in range(CP_SIZE):
        source = PlanSource(plan, corpora, spec=spec)
        for step in range(source.num_steps):
            packs = range(source.step_facts(step).num_packs)
            written = kept = 0
            for pack in packs:
                view = source.pack_view(step, pack, cp_rank=rank).view
                written += view.input_ids.nbytes + view.labels.nbytes + view.position_ids.nbytes
                kept += source.bytes_held + view.documents.nbytes
                kept += view.cu_seqlens.nbytes + view.cu_seqlens_padded.nbytes
            slots = len(packs) * PACK_TOKENS
            copied = max(copied, written / (slots * STEP_BYTES_PER_SLOT))
            # The bool mask is on both sides, the offsets and ids of documents on the rank's alone.
            held = max(held, kept / (slots * (STEP_BYTES_PER_SLOT + 1)))
        real += source.tokens_copied
    corpora.close()
    # All ranks together copied every planned token once, none twice.
    assert real == sum(int(plan.step_packs(step).pieces.lengths.sum()) for step in range(plan.num_steps))
    return {
        "case": "plan",
        "copied_of_an_eighth": round(copied * CP_SIZE, 4),
        "held_of_an_eighth": round(held * CP_SIZE, 4),
        "limit": 1.05,
    }


def load_batches(source: str) -> None:
    """Child process: load batches as a trainer would and print what memory that took."""
    from ringfeed.pipeline.loader import Loader

    # Compiling and importing is the same for both sizes, and not what is asked.
    _iterate(source, Loader, 4)
    before = _anonymous()
    tracemalloc.start()
    _iterate(source, Loader, MEMORY_BATCHES)
    peak = tracemalloc.get_traced_memory()[1]
    print(json.dumps({"heap_peak": peak, "anonymous_growth": _anonymous() - before}))


def _iterate(source: str, loader_type: Any, num_batches: int) -> None:
    layout = "te" if source.endswith("plan") else None
    loader = loader_type(source, dp_rank=0, dp_size=1, cp_rank=3, cp_size=CP_SIZE, layout=layout)
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)


def _anonymous() -> int:
    """Return the process's anonymous memory; mapped files are the page cache's, not the loader's."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no /proc/self/smaps_rollup with an Anonymous line: run this on Linux")


def measure_memory(sources: dict[str, Path]) -> dict[str, Any]:
    """Load from each source in a process of its own."""
    report: dict[str, Any] = {"case": "memory", "batches": MEMORY_BATCHES}
    for name, source in sources.items():
        run = subprocess.run(
            [sys.executable, __file__, str(source)], check=True, capture_output=True, text=True
        )
        report[name] = json.loads(run.stdout.splitlines()[-1])
    return report


def main() -> None:
    """Run all cases in a temporary folder."""
    if len(sys.argv) > 1:
        load_batches(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as temporary:
        plans, shards = {}, {}
        for name, num_tokens in (("small", 4_000_000), ("large", 16_000_000)):
            folder = Path(temporary) / name
            folder.mkdir()
            plans[name] = make_plan(folder, num_tokens)
            shards[name] = make_shards(plans[name], folder)
        files, plan = (
            count_files(plans["small"], shards["small"]),
            count_plan(plans["small"], Path(temporary)),
        )
        facts = {"cp_size": CP_SIZE, "pack_tokens": PACK_TOKENS, "packs": plans["small"].num_packs}
        for report in (files, plan):
            print(json.dumps({**report, **facts}))
            measured = [value for key, value in report.items() if key.endswith("of_an_eighth")]
            assert max(measured) <= report["limit"], report
        sources = {
            f"{mode}_{name}": paths[name]
            for name in plans
            for mode, paths in (
                ("plan", {key: value.path for key, value in plans.items()}),
                ("files", shards),
            )
        }
        print(json.dumps(measure_memory(sources)))


if __name__ == "__main__":
    main()
