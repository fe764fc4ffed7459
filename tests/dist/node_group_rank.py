"""One rank of ``test_node_group.py``: SCRIPT FOLDER NUM_RANKS RANK. The folder holds a plan and a service's URL.

Ranks go by twos: tp peers, who share a fetch. Each pair is a dp rank.
"""

import json
import sys
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.local_fetcher import LocalFetcher
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.block_builder import BlockBuilder, PlanOpener

SMALL = 8_000


class Rank:
    def __init__(self, folder, num_ranks, rank):
        self.folder, self.rank, self.num_ranks = folder, rank, num_ranks
        self.url = (folder / "url.txt").read_text()
        groups = [dist.new_group([first, first + 1]) for first in range(0, num_ranks, 2)]
        self.group = groups[rank // 2]
        self.is_leader = rank % 2 == 0
        self.shared = []

    def load(self, source=None, *, cp=(1, 2), **options):
        place = {"dp_rank": self.rank // 2, "dp_size": self.num_ranks // 2, "cp_rank": cp[0], "cp_size": cp[1]}
        loader = Loader(source or self.url, **place, **options)
        feed: Any = loader._source
        if source is None:
            self.shared.append(Path("/dev/shm") / feed._fetcher._address.folder)
        return loader

    def expected(self, **options):
        return self.load(self.folder / "plan", layout="te", **options)

    def refused(self, **options):
        try:
            self.load(node_group=self.group, **options)
        except ValueError as error:
            return str(error)
        raise AssertionError("it was taken")


def compare(found, expected):
    count = 0
    for batch, other in zip(found, expected, strict=True):
        assert batch.info == other.info
        assert batch.tensors.keys() == other.tensors.keys()
        for name, tensor in other.tensors.items():
            assert batch.tensors[name].equal(tensor), name
        count += 1
    assert count
    return count


def check_same_bytes(rank):
    with rank.load(node_group=rank.group, prefetch_bytes=SMALL) as loader:
        compare(loader, rank.expected())


def check_members_of_other_speed(rank):
    with rank.load(node_group=rank.group, prefetch_bytes=SMALL) as loader:
        for batch, other in zip(loader, rank.expected(), strict=True):
            compare([batch], [other])
            time.sleep(0.0 if rank.is_leader else 0.01)


def check_other_columns(rank):
    """A pipeline stage takes what it needs; what any wants is fetched."""
    own = [["labels", "cu_seqlens"], ["input_ids", "position_ids"]][rank.rank % 2]
    for columns in (own, ["padding_mask"]):
        with rank.load(node_group=rank.group, columns=columns) as loader:
            compare(loader, rank.expected(columns=columns))


def check_what_is_written_into_a_batch_changes_no_other(rank):
    expected = list(rank.expected())
    with rank.load(node_group=rank.group, prefetch_bytes=SMALL) as loader:
        for batch, other in zip(loader, expected, strict=True):
            if rank.is_leader:
                compare([batch], [other])
            for tensor in batch.tensors.values():
                tensor.fill_(1)
            dist.barrier(rank.group)
    with rank.load(node_group=rank.group, prefetch_bytes=SMALL) as loader:
        compare(loader, expected)


def check_a_state_goes_on(rank):
    expected = list(rank.expected())
    with rank.load(node_group=rank.group, prefetch_bytes=SMALL) as loader:
        compare(islice(loader, 7), expected[:7])
        state = loader.state_dict()
        compare(loader, expected[7:])
        loader.load_state_dict(state)
        compare(islice(loader, 3), expected[7:10])
    with rank.load(node_group=rank.group) as loader:
        loader.load_state_dict(state)
        compare(loader, expected[7:])


def check_a_leader_that_is_done_leaves_nobody_behind(rank):
    """The leader has ended its loader, and a step without a barrier, before the other has begun."""
    with rank.load(node_group=rank.group, prefetch_bytes=SMALL) as loader:
        time.sleep(0.0 if rank.is_leader else 1.0)
        compare(islice(loader, 9), list(rank.expected())[:9])


def check_a_device_mesh_and_a_folder(rank):
    mesh = init_device_mesh("cpu", (rank.num_ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    with rank.load(node_group=mesh["tp"]) as loader:
        compare(islice(loader, 2), list(rank.expected())[:2])
    with rank.load(rank.folder / "plan", layout="te", node_group=rank.group) as loader:
        compare(loader, rank.expected())


def check_any_fetcher_will_do_and_only_the_leaders_is_used(rank):
    plan = rank.folder / "plan"
    opened = OpenOptions(layout=make_layout("te"), cp_size=2)
    builder = BlockBuilder(PlanOpener(plan=plan, spec=open_spec(Plan.open(plan), opened, pad_id=0)))
    with rank.load(LocalFetcher(builder), node_group=rank.group) as loader:
        compare(loader, rank.expected())
    assert (builder.num_builds > 0) == rank.is_leader


def check_members_must_ask_alike(rank):
    text = rank.refused(cp=(rank.rank % 2, 2))
    first = rank.rank // 2 * 2
    assert f"cp_rank=0 on rank {first} and 1 on rank {first + 1}" in text
    text = rank.refused(source=rank.folder / ("plan", "other")[rank.rank % 2], layout="te")
    assert f"rank {first} loads from" in text
    assert "same source" in text


def check_members_must_give_the_same_options(rank):
    first = rank.rank // 2 * 2
    for options in ({"unit": 4}, {"tp_size": 2}, {"slot_budget": 99}, {"layout": "contiguous"}, {"skip": "s"}):
        ((name, _),) = options.items()
        text = rank.refused(**({} if rank.is_leader else options))
        assert f"give all members the same {name}" in text
        assert f"on rank {first} and" in text


def check_any_error_of_the_leader_is_told_to_all(rank):
    class Broken:
        def facts(self):
            raise RuntimeError("a surprise")

        def close(self):
            pass

    try:
        rank.load(Broken(), node_group=rank.group)
    except (RuntimeError if rank.is_leader else ValueError) as error:
        assert "a surprise" in str(error)  # noqa: PT017 - no pytest here
        return
    raise AssertionError("it was opened")


def check_an_error_of_the_leader_is_told_to_all(rank):
    text = rank.refused(cp=(0, 4))
    assert "--cp 4" in text
    assert rank.is_leader or "which fetches for this node group" in text


def check_nothing_stays_behind(rank):
    dist.barrier()
    until = time.monotonic() + 20
    assert len(rank.shared) > 5
    while left := [path for path in rank.shared if path.exists()]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def run_until_killed(rank):
    """Print the group's folder, then each step; the test kills one of the two."""
    loader = rank.load(node_group=rank.group, prefetch_bytes=SMALL)
    print(json.dumps(str(rank.shared[0])), flush=True)
    try:
        for batch in loader:
            print(json.dumps(batch.info.step), flush=True)
            time.sleep(0.02 if rank.is_leader else 0.06)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
        sys.stdin.read()
        return
    print(json.dumps("done"), flush=True)


def main(folder: Path, num_ranks: int, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{num_ranks}",
        world_size=num_ranks,
        rank=rank,
        timeout=timedelta(seconds=100),
    )
    own = Rank(folder, num_ranks, rank)
    if sys.argv[4:] == ["kill"]:
        run_until_killed(own)
        return
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check(own)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
