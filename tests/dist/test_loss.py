"""Gradients under the shipped global count, over real gloo processes, equal one process's."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.dist


def test_gradients_equal_one_process_with_the_whole_step(run_ranks, tmp_path):
    run_ranks(Path(__file__).with_name("loss_rank.py"), num_ranks=2, folder=tmp_path)
