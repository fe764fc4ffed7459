"""Pre-shard a plan on Ray: one task per folder of steps, one pass over a pack for all cp ranks.

In:   ``ShardConfig`` (``pipeline/config.py``)
Out:  a shards folder, published whole; ``ShardReport``

Tasks are pure (``pipeline/shard_writer.py``), so the number of workers, their deaths and a restart change
no byte. Each writes into a folder of its own and the driver alone puts it in place and notes it in the
journal (``shard_journal.py``): two workers with one task, as after a lost connection, cannot meet.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.shard_writer import (
    ShardTask,
    num_folders,
    shards_made_from,
    shards_manifest,
    write_steps,
)
from ringfeed.pipeline.staging import StagedFolder
from ringfeed.pipeline.store import SHARDS_FORMAT
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.plan_opening import PlanChoice, open_checked
from ringfeed.workers.ray_session import ray_session
from ringfeed.workers.shard_journal import FinishedFolder, ShardJournal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ringfeed.pipeline.config import ShardConfig
    from ringfeed.pipeline.manifest import Manifest
    from ringfeed.pipeline.progress import Progress

__all__ = ["ShardReport", "run_shard"]

_FOLDER_BYTES = (32 << 20, 64 << 30)
"""Least and most bytes that a folder of steps aims at. The most keeps 15T tokens within ``_MANY_FOLDERS``:
every rank reads the manifest, which lists each folder's files."""
_MANY_FOLDERS = 4096
_BYTES_PER_SLOT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """What the job did."""

    output: Path
    fingerprint: str
    num_steps: int
    num_folders: int
    num_folders_written: int
    """Written by this run; the others were there before."""
    tokens: int
    """Slots of all packs, padding included."""
    bytes: int
    """Of all files."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {**asdict(self), "output": str(self.output)}


def run_shard(config: ShardConfig, *, progress: Progress) -> ShardReport:
    """Write the shards that ``config`` asks for; go on from a killed run, do nothing if they are there.

    Raises:
        ValueError: if plan, layout and sizes do not fit, or the output was made from something else.
        CorruptDataError: if plan or corpora are damaged.
        JobFailedError: if Ray cannot be reached, or workers die too often.
        OSError: if the disk is full; what is finished stays for the next run.
    """
    started = time.monotonic()
    plan = Plan.open(config.plan)
    task = _plan_task(plan, config)
    total = num_folders(plan, steps_per_folder=task.steps_per_folder)
    written = 0
    with StagedFolder.open(
        config.output, format=SHARDS_FORMAT, made_from=shards_made_from(plan, task)
    ) as staged:
        manifest = staged.finished
        if manifest is None:
            journal = ShardJournal(staged.path, staged.scratch)
            missing = [index for index in range(total) if index not in journal.finished]
            written = len(missing)
            if missing:
                job = _Job(plan=plan, task=replace(task, folder=staged.scratch), missing=missing)
                _run_on_ray(job, journal, workers=config.workers, progress=progress)
            files = [entry for index in range(total) for entry in journal.finished[index]]
            manifest = _with_plan_path(shards_manifest(plan, task, files), plan.path, config.output)
            staged.publish(manifest)
    return ShardReport(
        output=config.output,
        fingerprint=manifest.fingerprint,
        num_steps=plan.num_steps,
        num_folders=total,
        num_folders_written=written,
        tokens=int(manifest.facts["num_slots"]),
        bytes=sum(entry.bytes for entry in manifest.files),
        seconds=time.monotonic() - started,
    )


def _plan_task(plan: Plan, config: ShardConfig) -> ShardTask:
    """Open what the job reads and refuse what cannot work, before any worker starts."""
    opener = open_checked(
        PlanChoice(
            plan=config.plan,
            layout=make_layout(config.layout, **config.layout_options),
            cp_size=config.cp,
            tp_size=config.tp,
            unit=config.unit,
            slot_budget=config.slot_budget,
            skip=config.skip,
            corpora=config.corpus,
        )
    )
    return ShardTask(
        plan=opener.plan,
        folder=config.output,
        spec=opener.spec,
        steps_per_folder=_steps_per_folder(plan, opener.spec.pack_slots),
        corpora=opener.corpora,
        overlay=opener.overlay,
    )


def _steps_per_folder(plan: Plan, pack_slots: int) -> int:
    """Return a number that depends on the plan alone: workers and machines must not show in the files."""
    bytes_per_step = plan.packs_per_step * pack_slots * _BYTES_PER_SLOT
    least, most = _FOLDER_BYTES
    target = min(most, max(least, plan.num_steps * bytes_per_step // _MANY_FOLDERS))
    return max(1, target // bytes_per_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What is left to do."""

    plan: Plan
    task: ShardTask
    missing: list[int]
    """Indices of folders."""

    def num_slots(self, index: int) -> int:
        """Return the slots of folder ``index`` at most, as if every step and every pack were full."""
        steps = self.task.steps_per_folder
        num_steps = min(steps, self.plan.num_steps - index * steps)
        return num_steps * self.plan.packs_per_step * self.task.spec.pack_slots


def _run_on_ray(job: _Job, journal: ShardJournal, *, workers: int | None, progress: Progress) -> None:
    with ray_session(num_cpus=workers) as session:
        # Imports ray, whose settings the session has just made.
        from ringfeed.workers.ray_executor import RayExecutor

        in_flight = min(workers or session.num_cpus, len(job.missing))
        progress.log(f"shard: {in_flight} workers on Ray ({session.address})")
        progress.begin("shard", total=sum(map(job.num_slots, job.missing)), unit="tokens")
        function: Callable[[int], FinishedFolder] = partial(write_folder, job.task)
        for folder in RayExecutor(num_in_flight=in_flight).map_as_finished(function, job.missing):
            journal.adopt(folder)
            progress.advance(job.num_slots(folder.index))
        progress.end()


def write_folder(task: ShardTask, index: int) -> FinishedFolder:
    """Write one folder of steps in a place of its own. Runs in a Ray worker.

    Args:
        task: its ``folder`` is where attempts go.
        index: of the folder.
    """
    import pyarrow as pa

    # One worker a CPU is enough; Arrow would start a thread for each of them again.
    pa.set_cpu_count(1)
    attempt = ShardJournal.new_attempt(task.folder)
    entries = write_steps(replace(task, folder=attempt), index)
    return FinishedFolder(index=index, attempt=attempt.name, entries=tuple(entries))


def _with_plan_path(manifest: Manifest, plan: Path, output: Path) -> Manifest:
    """Note where the plan is, for ``verify``; not part of the fingerprint, since folders move."""
    relative = os.path.relpath(plan.resolve(), output.resolve())
    return replace(manifest, facts={**manifest.facts, "plan_path": relative})
