"""``Batch.sharder.gather_token_tensor`` over real gloo processes: shard, gather, gradients."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.dist


def test_gather_undoes_shard_and_adds_gradients(run_ranks, tmp_path):
    run_ranks(Path(__file__).with_name("sharder_rank.py"), num_ranks=2, folder=tmp_path)
