"""The demo: the whole line on real text, checked by training.

In:   ``DemoConfig`` (``pipeline/config.py``); the Python standard library's sources
Out:  an ``Outcome`` with a ``DemoReport`` (``demo_report.py``): exit code 1 if the losses differ

    ingest -> plan -> shard on Ray -> load and train on dp 2 x cp 2 processes,
    beside one process that trains the same model on the same batches, unsharded, from the plan

The parts are those of any other run; only the model and the training loop exist for the demo.
"""

from __future__ import annotations

import sysconfig
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ringfeed.pipeline.config import ShardConfig
from ringfeed.pipeline.console import DONE, FAILED, Outcome
from ringfeed.pipeline.ingest import IngestOptions, run_ingest
from ringfeed.pipeline.planner.options import Balance, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.sources.encoding import EncodingErrors
from ringfeed.pipeline.tokenizer import ByteTokenizer
from ringfeed.workers.demo_job import TrainJob
from ringfeed.workers.demo_ranks import run_jobs
from ringfeed.workers.demo_report import DemoReport, Stage, render
from ringfeed.workers.shard_job import run_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfeed.pipeline.config import DemoConfig
    from ringfeed.pipeline.ingest import IngestReport
    from ringfeed.pipeline.planner.report import PlanReport
    from ringfeed.pipeline.progress import Progress
    from ringfeed.workers.demo_job import RankRecord
    from ringfeed.workers.shard_job import ShardReport

__all__ = ["run_demo", "standard_library_sources", "train_jobs"]

DP_SIZE = 2
CP_SIZE = 2
LAYOUT = "te"
PACK_TOKENS = 8192
PACKS_PER_STEP = 2
"""One for each dp rank: attention over 8,192 tokens on two cores is most of the demo's time."""


def run_demo(config: DemoConfig, *, progress: Progress) -> Outcome:
    """Run every stage, compare the losses of both trainings, and report.

    Raises:
        ValueError: if the machine has no sources of the standard library, or too few for the steps.
        JobFailedError: if Ray or a training process fails.
        OSError: if the disk is full.
    """
    started = time.monotonic()
    with _folder(config.output) as folder:
        ingested = _ingest(folder, progress)
        plan_started = time.monotonic()
        planned = _plan(folder, progress)
        plan_seconds = time.monotonic() - plan_started
        if config.steps > planned.steps:
            raise ValueError(f"steps={config.steps}: the plan has {planned.steps}; choose at most that many")
        sharded = _shard(folder, config.workers, progress)
        sharded_run, unsharded_run = run_jobs(train_jobs(folder, steps=config.steps), progress=progress)
    plan_stage = Stage(name="plan", tokens=planned.tokens, seconds=plan_seconds)
    report = DemoReport(
        documents=ingested.documents,
        skipped_empty=ingested.skipped_empty,
        skipped_encoding=ingested.skipped_encoding,
        tokens=ingested.tokens,
        packs=planned.packs,
        fill=planned.fill,
        slot_padding=planned.slot_padding,
        tail_padding=planned.tail_padding,
        rank_bytes_per_step=max(record.result.bytes for record in sharded_run) // config.steps,
        full_bytes_per_step=unsharded_run[0].result.bytes // config.steps,
        stages=(_ingest_stage(ingested), plan_stage, _shard_stage(planned, sharded), *_stages(sharded_run)),
        sharded_losses=sharded_run[0].losses,
        unsharded_losses=unsharded_run[0].losses,
        ranks_agree=len({record.losses for record in sharded_run}) == 1,
        seconds=time.monotonic() - started,
        kept_in=config.output,
    )
    return Outcome(text=render(report), facts=report.to_json(), exit_code=DONE if report.passed else FAILED)


def standard_library_sources() -> tuple[Path, ...]:
    """Return the files and folders of Python's standard library that hold sources.

    Raises:
        ValueError: if there are none, as where Python comes without its sources.
    """
    library = Path(sysconfig.get_path("stdlib"))
    installed = ("site-packages", "dist-packages")
    found = [
        entry
        for entry in sorted(library.iterdir())
        if entry.name not in installed
        and (entry.suffix == ".py" if entry.is_file() else next(entry.rglob("*.py"), None) is not None)
    ]
    if not found:
        raise ValueError(f"{library} has no *.py files; the demo reads the standard library's sources")
    return tuple(found)


def train_jobs(folder: Path, *, steps: int) -> tuple[TrainJob, TrainJob]:
    """Return the sharded run over dp x cp processes and the unsharded one over one."""
    vocab_size = ByteTokenizer().vocab_size
    sharded = TrainJob(
        name="sharded",
        folder=folder,
        source=folder / "shards",
        layout=None,
        dp_size=DP_SIZE,
        cp_size=CP_SIZE,
        steps=steps,
        slots_per_step=PACKS_PER_STEP * PACK_TOKENS,
        vocab_size=vocab_size,
        is_sharded=True,
    )
    unsharded = TrainJob(
        name="unsharded",
        folder=folder,
        source=folder / "plan",
        layout="identity",
        dp_size=1,
        cp_size=1,
        steps=steps,
        slots_per_step=PACKS_PER_STEP * PACK_TOKENS,
        vocab_size=vocab_size,
        is_sharded=False,
    )
    return sharded, unsharded


@contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="ringfeed-demo-") as folder:
        yield Path(folder)


def _ingest(folder: Path, progress: Progress) -> IngestReport:
    options = IngestOptions(
        sources=standard_library_sources(),
        glob="*.py",
        output=folder / "corpus",
        name="stdlib",
        encoding_errors=EncodingErrors.SKIP,
    )
    return run_ingest(options, progress=progress)


def _plan(folder: Path, progress: Progress) -> PlanReport:
    options = PlanOptions(
        corpora=(folder / "corpus",),
        output=folder / "plan",
        pack_tokens=PACK_TOKENS,
        packs_per_step=PACKS_PER_STEP,
        slate_size=DP_SIZE,
        max_cp=CP_SIZE,
        balance=Balance.BEST_FIT,
        seed=0,
    )
    return run_plan(options, progress=progress)


def _shard(folder: Path, workers: int | None, progress: Progress) -> ShardReport:
    facts = {"plan": folder / "plan", "output": folder / "shards", "cp": CP_SIZE, "layout": LAYOUT}
    config = ShardConfig.model_validate({**facts, "workers": workers})
    return run_shard(config, progress=progress)


def _ingest_stage(report: IngestReport) -> Stage:
    return Stage(name="ingest", tokens=report.tokens, seconds=report.seconds)


def _shard_stage(planned: PlanReport, report: ShardReport) -> Stage:
    return Stage(name="shard (with Ray's start)", tokens=planned.tokens, seconds=report.seconds)


def _stages(records: list[RankRecord]) -> tuple[Stage, Stage]:
    """Return loading and training, over all ranks: they run side by side, so the slowest one counts."""
    results = [record.result for record in records]
    load = Stage(
        name="load",
        tokens=sum(result.load_tokens for result in results),
        seconds=max(result.load_seconds for result in results),
    )
    train = Stage(
        name="train",
        tokens=sum(result.tokens for result in results),
        seconds=max(result.train_seconds for result in results),
    )
    return load, train
