"""One rank of ``test_digest_check.py``: SCRIPT FOLDER NUM_RANKS RANK. The folder holds two plans."""

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringfeed.pipeline.digest_check import CHECK_EVERY, DigestCheck, RankMismatchError
from ringfeed.pipeline.loader import Loader


def load(folder, rank, *, plan="plan", dp=(0, 1), group, **options):
    return Loader(
        folder / plan,
        layout="te",
        dp_rank=dp[0],
        dp_size=dp[1],
        cp_rank=rank,
        cp_size=2,
        cp_group=group,
        **options,
    )


def refused(loader):
    """Iterate until the ranks disagree; return after how many batches and what was said."""
    batches, count = iter(loader), 0
    try:
        for _ in batches:
            count += 1
    except RankMismatchError as error:
        assert next(batches, None) is None
        return count, str(error)
    raise AssertionError("the ranks were not stopped")


def check_agreeing_ranks(folder, rank, group):
    loader = load(folder, rank, group=group)
    batches = list(loader)
    assert len(batches) == loader.num_steps * loader.num_micro_batches
    assert loader.num_steps > CHECK_EVERY
    # At the start and every so many steps; an iteration from a state begins with a comparison again.
    once = -(-loader.num_steps // CHECK_EVERY)
    assert loader._check.num_checks == once
    loader.load_state_dict(load(folder, rank, group=None).state_dict())
    assert sum(1 for _ in loader.steps()) == loader.num_steps
    assert loader._check.num_checks == 2 * once


def check_other_plan(folder, rank, group):
    loader = load(folder, rank, plan=("plan", "other")[rank], group=group)
    count, text = refused(loader)
    assert count == 0
    assert "rank 0 has step digest" in text
    assert "rank 1 has step digest" in text
    assert "different plans or skip lists" in text
    assert loader.state_dict()["step"] == 0


def check_other_skip_list(folder, rank, group):
    loader = load(folder, rank, skip=(None, folder / "skip.txt")[rank], group=group)
    assert "different plans or skip lists" in refused(loader)[1]


def check_other_state(folder, rank, group):
    loader = load(folder, rank, group=group)
    if rank:
        ahead = load(folder, rank, group=None)
        batches = iter(ahead)
        for _ in range(ahead.num_micro_batches):
            next(batches)
        loader.load_state_dict(ahead.state_dict())
    text = refused(loader)[1]
    assert "at step 0, micro-batch 0" in text
    assert "at step 1, micro-batch 0" in text
    assert "load one state on all ranks" in text


def check_wrong_group(folder, rank, group):
    loader = load(folder, 0, dp=(rank, 2), group=group)
    assert "several dp coordinates" in refused(loader)[1]


def check_drift_is_found_later(folder, rank, group):
    """A second epoch changes the end of the first one: the plans are the same up to there."""
    loader = load(folder, rank, plan=("plan", "longer")[rank], group=group)
    loader._check._every = 1
    count, text = refused(loader)
    step = count // loader.num_micro_batches
    assert step > CHECK_EVERY
    assert f"at step {step}, micro-batch 0" in text


def check_device_mesh(folder, rank, group):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    assert next(iter(load(folder, rank, group=mesh))).info.step == 0


def check_arguments(folder, rank, group):
    for every in (0, -1):
        try:
            DigestCheck(group, every=every)
        except ValueError as error:
            assert f"every={every}" in str(error)
        else:
            raise AssertionError(every)
    alone = dist.new_group([0])
    if rank:
        try:
            DigestCheck(alone)
        except ValueError as error:
            assert "this process is not in it" in str(error)
        else:
            raise AssertionError("a group without this rank was taken")


def main(folder: Path, num_ranks: int, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        world_size=num_ranks,
        rank=rank,
        timeout=timedelta(seconds=60),
    )
    for name, check in sorted(globals().items()):
        if name.startswith("check_"):
            check(folder, rank, dist.group.WORLD)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
