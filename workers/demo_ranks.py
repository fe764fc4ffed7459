"""Run the demo's training processes: start them, watch them, and leave none behind.

In:   ``TrainJob``s (``demo_job.py``)
Out:  a ``RankRecord`` of every process of every job

Each process holds the end of a pipe as its standard input and ends when the pipe does
(``demo_process.py``), so that even a killed demo leaves no process.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ringfeed.pipeline.executor import JobFailedError
from ringfeed.pipeline.progress import Progress
from ringfeed.workers.demo_job import RankRecord, TrainJob, read_record

__all__ = ["run_jobs"]

_POLL_SECONDS = 0.2
_LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class _Rank:
    job: TrainJob
    rank: int
    process: "subprocess.Popen[bytes]"

    def slots_done(self) -> int:
        """Count the slots of the steps in the record so far; its last line is no step."""
        record = self.job.record(self.rank)
        lines = record.read_bytes().count(b"\n") if record.exists() else 0
        return min(self.job.steps, lines) * self.job.slots_per_rank


def run_jobs(jobs: Sequence[TrainJob], *, progress: Progress) -> list[list[RankRecord]]:
    """Run the processes of all ``jobs`` side by side; return each job's records in rank order.

    Raises:
        JobFailedError: if a process fails: the others are ended, and its last line is told.
    """
    ranks: list[_Rank] = []
    progress.begin("train", total=sum(job.steps * job.slots_per_step for job in jobs), unit="tokens")
    try:
        for job in jobs:
            ranks.extend(_start(job, rank) for rank in range(job.num_ranks))
        _wait(ranks, progress)
    finally:
        for rank in ranks:
            _stop(rank.process)
        progress.end()
    return [[read_record(job.record(rank)) for rank in range(job.num_ranks)] for job in jobs]


def _start(job: TrainJob, rank: int) -> _Rank:
    description = job.folder / f"{job.name}.json"
    description.write_text(job.to_json())
    # Left over from a run that was kept: a stale rendezvous would be believed.
    for stale in (job.record(rank), *([job.rendezvous] if rank == 0 else [])):
        stale.unlink(missing_ok=True)
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    with job.log(rank).open("w") as log:
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "ringfeed.workers.demo_process", str(description), str(rank)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **one_thread},
        )
    return _Rank(job, rank, process)


def _wait(ranks: Sequence[_Rank], progress: Progress) -> None:
    """Return when all have ended well."""
    shown = 0
    running = list(ranks)
    while running:
        failed = [rank for rank in running if rank.process.poll()]
        if failed:
            # One that lost its peer fails, too, and later than the cause did.
            raise _failure(min(failed, key=_last_words), progress)
        running = [rank for rank in running if rank.process.returncode is None]
        done = sum(rank.slots_done() for rank in ranks)
        progress.advance(done - shown)
        shown = done
        time.sleep(_POLL_SECONDS)


def _last_words(rank: _Rank) -> float:
    return rank.job.log(rank.rank).stat().st_mtime


def _failure(rank: _Rank, progress: Progress) -> JobFailedError:
    log = rank.job.log(rank.rank)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for line in lines[-_LOG_LINES:]:
        progress.log(f"{rank.job.name} rank {rank.rank}: {line}")
    code = rank.process.returncode
    told = lines[-1].strip() if lines else "it printed nothing"
    return JobFailedError(f"{rank.job.name} rank {rank.rank} ended with exit code {code}: {told}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin is not None:
        process.stdin.close()
    process.kill()
    process.wait()
