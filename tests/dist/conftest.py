"""Start the ranks of a test as processes; a hang or a crash of one fails the test with its output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 240


@pytest.fixture(scope="session")
def run_ranks():
    """Run ``SCRIPT FOLDER NUM_RANKS RANK`` once a rank and wait for all of them."""
    return _run_ranks


def _run_ranks(script: Path, *, num_ranks: int, folder: Path) -> None:
    logs = [folder / f"log-{num_ranks}-{rank}.txt" for rank in range(num_ranks)]
    command = [sys.executable, "-W", "error::FutureWarning", str(script), str(folder), str(num_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as stream:
                processes.append(
                    subprocess.Popen(
                        [*command, str(rank)], stdout=stream, stderr=subprocess.STDOUT, env=environment
                    )
                )
        codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        told = "\n".join(log.read_text()[-2000:] for log in logs)
        raise AssertionError(f"exit codes {codes}\n{told}")
