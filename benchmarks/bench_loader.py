"""Measure a loader, from a plan and from pre-sharded files, beside a memcpy of the same bytes.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_loader.py
Read:  one JSON line per case: median, min and max over passes of million local tokens per CPU second
       (all threads together), and the median as a part of ``memcpy``: ids, labels and positions (int32)
       and the mask of the same batches, copied out of buffers rotated past the cache into fresh memory
       like a batch's own. ``build`` makes batches in the calling thread; ``iterate`` is the loader as a
       trainer uses it, with its thread that builds ahead.
"""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from ringfeed.pipeline.batch_builder import BatchBuilder
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import Balance, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.shard_writer import (
    ShardTask,
    ShardWriter,
    num_folders,
    shards_made_from,
    shards_manifest,
)
from ringfeed.pipeline.staging import StagedFolder
from ringfeed.pipeline.store import SHARDS_FORMAT
from ringfeed.sharding.layouts import make_layout

NUM_TOKENS = 6_000_000
PACKS_PER_STEP = 4
WARMUP, RUNS = 1, 7
MEMCPY_BUFFERS_BYTES = 256 << 20


def make_sources(folder: Path, *, pack_tokens: int, cp_size: int) -> dict[str, Path]:
    """Return a plan over log-normal documents, 1,200 tokens in the mean, and its shards."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.6, 1.0, NUM_TOKENS // 1_200), 16, 200_000).astype(int)
    documents = (rng.integers(0, 50_000, length, dtype=np.int32) for length in lengths)
    write_corpus(folder / "corpus", documents, name="lognormal")
    options = PlanOptions(
        output=folder / "plan",
        corpora=[folder / "corpus"],
        pack_tokens=pack_tokens,
        packs_per_step=PACKS_PER_STEP,
        max_cp=8,
        balance=Balance.BEST_FIT,
        seed=0,
    )
    run_plan(options)
    plan = Plan.open(folder / "plan")
    asked = OpenOptions(layout=make_layout("te"), cp_size=cp_size)
    task = ShardTask(
        plan=plan.path,
        folder=folder / "shards.partial",
        spec=open_spec(plan, asked, pad_id=0),
        steps_per_folder=64,
    )
    made_from = shards_made_from(plan, task)
    with (
        StagedFolder.open(folder / "shards", format=SHARDS_FORMAT, made_from=made_from) as staged,
        ShardWriter(task) as writer,
    ):
        folders = range(num_folders(plan, steps_per_folder=64))
        entries = [entry for index in folders for entry in writer.write_steps(index)]
        staged.publish(shards_manifest(plan, task, entries))
    return {"plan": plan.path, "shards": folder / "shards"}


def open_loader(source: Path, *, cp_size: int, dtype: torch.dtype) -> Loader:
    """Return the loader of the last cp rank; dp 1, so that it has every pack."""
    return Loader(
        source, dp_rank=0, dp_size=1, cp_rank=cp_size - 1, cp_size=cp_size, layout="te", token_dtype=dtype
    )


def cpu_seconds(call: Callable[[], object]) -> list[float]:
    """Return the CPU time of each of ``RUNS`` calls, after ``WARMUP`` unmeasured ones."""
    times = []
    for run in range(WARMUP + RUNS):
        start = time.process_time()
        call()
        if run >= WARMUP:
            times.append(time.process_time() - start)
    return times


def iterate(loader: Loader, start: dict[str, Any]) -> None:
    """Take every batch of the plan from its start."""
    loader.load_state_dict(start)
    for _ in loader:
        pass


def build_all(builder: BatchBuilder) -> None:
    """Build every batch of the plan in this thread."""
    for step in range(builder.source.num_steps):
        for micro_batch in range(builder.num_micro_batches):
            builder.build(step, micro_batch)


def memcpy_all(num_batches: int, num_local: int) -> Callable[[], None]:
    """Return a call that copies as many bytes as all batches hold as int32."""
    batch_bytes = num_local * 13
    sources = [np.ones(batch_bytes, dtype=np.uint8) for _ in range(MEMCPY_BUFFERS_BYTES // batch_bytes + 1)]

    def copy() -> None:
        for i in range(num_batches):
            sources[i % len(sources)].copy()

    return copy


def check(sources: dict[str, Path], *, cp_size: int) -> int:
    """Compare the two sources batch by batch and return how many batches there are."""
    loaders = [open_loader(source, cp_size=cp_size, dtype=torch.int64) for source in sources.values()]
    num_batches = 0
    for ours, theirs in zip(*loaders, strict=True):
        assert ours.info == theirs.info
        assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())
        num_batches += 1
    return num_batches


def measure(folder: Path, *, pack_tokens: int, cp_size: int) -> None:
    """Print all cases of one pack length and cp size."""
    sources = make_sources(folder, pack_tokens=pack_tokens, cp_size=cp_size)
    num_batches = check(sources, cp_size=cp_size)
    num_local = pack_tokens // cp_size
    cases: dict[str, Callable[[], object]] = {"memcpy": memcpy_all(num_batches, num_local)}
    for name, source in sources.items():
        for dtype in (torch.int32, torch.int64):
            short = str(dtype).removeprefix("torch.")
            loader = open_loader(source, cp_size=cp_size, dtype=dtype)
            cases[f"{name}/build/{short}"] = partial(build_all, loader._builder)
            cases[f"{name}/iterate/{short}"] = partial(iterate, loader, loader.state_dict())
    base = 0.0
    for case, call in cases.items():
        times = cpu_seconds(call)
        rates = sorted(num_batches * num_local / t / 1e6 for t in times)
        median = statistics.median(rates)
        base = base or median
        report = {
            "case": case,
            "pack_tokens": pack_tokens,
            "cp_size": cp_size,
            "median_mtok_per_cpu_s": round(median, 1),
            "min_mtok_per_cpu_s": round(rates[0], 1),
            "max_mtok_per_cpu_s": round(rates[-1], 1),
            "of_memcpy": round(median / base, 3),
            "median_us_per_batch": round(statistics.median(times) / num_batches * 1e6),
            "batches": num_batches,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
        }
        print(json.dumps(report), flush=True)


def main() -> None:
    """Run all cases in a temporary folder."""
    torch.set_num_threads(1)
    for pack_tokens, cp_size in ((8_192, 1), (32_768, 1), (131_072, 1), (131_072, 8)):
        with tempfile.TemporaryDirectory() as temporary:
            measure(Path(temporary), pack_tokens=pack_tokens, cp_size=cp_size)


if __name__ == "__main__":
    main()
