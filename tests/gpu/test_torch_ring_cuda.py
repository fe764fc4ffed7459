"""Torch's ring attention itself, which has no CPU kernel: against plain causal attention.

One device is a ring of one rank; two devices are two ranks over NCCL (``torch_ring_rank.py``).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's ring attention needs a CUDA device"),
]

HERE = Path(__file__).parent
TIMEOUT_S = 300


def run_ring(folder, *, num_ranks):
    command = [sys.executable, str(HERE / "torch_ring_rank.py"), str(folder), str(num_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(num_ranks)]
    try:
        return [process.wait(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_one_rank_equals_plain_attention(tmp_path):
    assert run_ring(tmp_path, num_ranks=1) == [0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a ring of two ranks needs two CUDA devices")
def test_two_ranks_equal_plain_attention(tmp_path):
    assert run_ring(tmp_path, num_ranks=2) == [0, 0]
